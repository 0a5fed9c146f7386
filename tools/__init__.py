"""Tools that make releases, recipe files, and published weights.

Run from the root of a checkout: `python -m tools.NAME`.
"""
