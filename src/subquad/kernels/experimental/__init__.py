"""Backends for GPUs that have not been timed on one: each is used where it is named and nowhere else."""
