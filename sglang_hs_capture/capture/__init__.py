"""What runs inside the model's process: taps on the forward, and the thread that turns batches into stored rows."""
