"""The backends of the attention operators: reference, chunked, native. All of them compute the same."""
