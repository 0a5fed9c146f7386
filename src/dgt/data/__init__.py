"""Data: the built-in scenes, readers of labeled images, transforms, and the data modules of the
tasks.
"""
