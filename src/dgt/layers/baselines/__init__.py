"""The parts of other models that the paper compares itself with, for maps of any size.

Swin, CSWin, CMT, ViL and CrossFormer: their attention, patches and blocks, which
:mod:`dgt.models.compared` puts together.
"""
