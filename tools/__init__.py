"""What makes releases, recipes and weights.

Run from the root of a checkout: `python -m tools.NAME`.
"""
