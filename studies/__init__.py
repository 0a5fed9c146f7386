"""Experiments on the paper's claims beyond its tables; `dgt ablate` runs the tables.

    python -m studies.residual_training ...  Groups that train with residual keys, beside all keys
    python -m studies.residual_summary       What its runs say
    python -m studies.camvid_hours ...       All keys beside groups for the same CPU time, on whole images
    python -m studies.matching ...           Which keys decide in the cross-attention of a trained matcher
    python -m studies.figure_dinov2 ...      Pictures of DINOv2-S

Run from the root of a checkout. docs/log.md has those that are finished.
"""
