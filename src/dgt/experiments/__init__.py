"""The paper's tables as experiments: each row is trained with several seeds, and all results are kept."""
