"""Training converted layers on what the exact model gives."""
