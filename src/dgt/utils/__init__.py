"""Shared utilities: atomic writes, the process group, seeds, errors and the log."""
