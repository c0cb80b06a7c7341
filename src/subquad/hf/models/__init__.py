"""Models of this library in transformers' classes: config, stack, heads, tokenizer, loading."""
