"""What runs inside the model's process: taps on the forward, and what hands their rows to the writing process."""
