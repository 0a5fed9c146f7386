"""The GPU path: the operator as Triton kernels, forward and backward (section 3.1 and the appendix).

All but ``fallback`` needs Triton: it is imported only where it is used. Reasons: ``docs/kernels.md``. Files:

- ``operators``: what PyTorch sees. Everything below is reached through it.
- ``fallback``: what ``backend="auto"`` does where a kernel fails.
- ``grouping``: query groups, queries in their order, tiles of them, and the statistics of Eq. 3.
- ``selection``: the top-k keys of every group. ``passes``: the launches that do both.
- ``tiled``: attention of tiles of queries, also with a remainder. ``inverse``: which groups chose a key.
- ``products``: the four forms of the appendix, for comparison.
- ``common``, ``launch``: what kernels share, and how they are run.
"""
