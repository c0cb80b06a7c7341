"""The training loop, on Accelerate."""
