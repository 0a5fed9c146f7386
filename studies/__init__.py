"""Experiments on the paper's claims beyond its tables; `dgt ablate` runs the tables.

    python -m studies.retrieval                      Retrieval at a distance: the law of G and k
    python -m studies.key_choice --run RUN           Which keys, at fixed weights: a trained run's layers
    python -m studies.replacement --weights FILE     Other attentions in a trained global ViT
    python -m studies.replacement_pairs ...          Their paired differences in mIoU
    python -m studies.like_to_like --run RUN         Labels of groups and of their keys, in a trained model

Run from the root of a checkout.
"""
