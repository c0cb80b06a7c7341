"""Who computes: reference, chunked, native. One operator, one meaning."""
