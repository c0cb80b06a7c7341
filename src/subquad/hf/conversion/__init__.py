"""Models that exist with our attention: finding their layers, replacing, checking, saving and loading."""
