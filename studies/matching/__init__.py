"""Which keys decide in the cross-attention of a trained matcher: `python -m studies.matching --help`."""
