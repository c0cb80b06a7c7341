"""Which mechanism to use: crossovers measured on this machine; error prediction and plans."""
