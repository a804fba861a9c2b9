"""A dataset written again as the files that trainers read; one module of ``formats`` for each trainer."""
