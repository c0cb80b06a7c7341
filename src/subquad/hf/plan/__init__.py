"""Which mechanism for which layer and head of a model: statistics, candidates, search."""
