"""The way of packed rows from the device to host memory."""
