"""Data: the built-in scenes, readers of labelled images, transforms, and the data modules of the
tasks.
"""
