"""The dataset on disk: sharded rows, their journal, and what is needed to survive a crash at any moment."""
