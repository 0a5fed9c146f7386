"""What makes releases, recipes and weights; run from the root of a checkout: `python -m tools.NAME`."""
