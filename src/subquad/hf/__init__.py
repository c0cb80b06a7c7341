"""Hugging Face transformers: our own models in its classes, and its models with our attention."""
