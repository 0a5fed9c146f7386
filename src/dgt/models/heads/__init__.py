"""Heads on a pyramid of four maps, with which a timm model segments or detects.

UperNet for semantic segmentation, Mask R-CNN for detection.
"""
