"""The GPU path: the operator as Triton kernels, forward and backward (section 3.1 and the appendix).

All but ``fallback`` needs Triton: it is imported only where it is used. Reasons: ``docs/kernels.md``. Files:

- ``operators``: what PyTorch sees. Everything below is reached through it.
- ``fallback``: when ``backend="auto"`` takes kernels, by a ``self_check``, and what it does where one fails.
- ``grouping``: query groups, queries in their order, tiles of them, and the statistics of Eq. 3.
- ``selection``: the top-k keys of every group. ``search``: thresholds. ``passes``: the launches that do both.
- ``gathered``: attention of many tokens, by lists of keys. ``inverse``: which groups chose a key.
- ``dense``: attention of few tokens, under a mask. ``rest``: what a group did not choose, as one key.
- ``statistics``: the step of Eq. 4.
- ``products``: the four forms of the appendix, for comparison.
- ``common``, ``launch``: what kernels share, and how they are run.
"""
