"""Checks of a dataset: its bytes against what the journals say, and its states against a second computation."""
