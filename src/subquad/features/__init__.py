"""Feature maps phi and the random projections behind them: one token at a time, never along the sequence."""
