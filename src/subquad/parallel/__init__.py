"""One sequence cut over several processes: each computes its piece, states are merged in order."""
