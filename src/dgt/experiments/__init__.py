"""Experiments: a claim of the paper as rows that are trained with several seeds and kept whatever
comes out.
"""
