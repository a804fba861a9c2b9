"""Checks of a dataset that share nothing with the code that captured it."""
