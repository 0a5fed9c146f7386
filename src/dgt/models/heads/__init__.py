"""Heads on a pyramid of four maps: what a timm model needs to segment (UperNet) and to detect (Mask R-CNN)."""
