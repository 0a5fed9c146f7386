"""The paper's tables as experiments: rows that are trained with several seeds, all results kept."""
