"""Reading a dataset, for training and for export."""
