"""The sources' experiments: one file per task, with its data, its model head and its metric."""
