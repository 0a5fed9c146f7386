"""The operator as Triton kernels, forward and backward (section 3.1 and the appendix).

Imported only where used, since it needs Triton. Reasons: ``docs/kernels.md``. Files:

- ``backend``: the steps as :mod:`dgt.ops.operators` calls them; all below is reached through it.
- ``grouping``: query groups, queries in their order, tiles of them, and the statistics of Eq. 3.
- ``blocks``: bounds of scores, and the keys that reach them. ``selection``: the top-k among these.
  ``search``: thresholds. ``passes``: launches that group and select together, as a whole.
- ``gathered``: attention of many tokens, by lists of keys. ``inverse``: which groups chose a key.
- ``dense``: attention of few tokens, under a mask. ``residual``: what a group did not choose, as
  one key.
- ``statistics``: the step of Eq. 4.
- ``products``: the four forms of the appendix, for comparison.
- ``common``, ``launch``: what kernels share, and how their launches are planned and run. Where a
  function ``plan_...`` says how, of tensors that lie in memory alike, another runs it.
"""
