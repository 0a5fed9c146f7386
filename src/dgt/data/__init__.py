"""Data: the built-in scenes, readers of labelled images, transforms, and the classification data module."""
