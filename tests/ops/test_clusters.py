"""Clusters of tokens: against the reference, and their guarantees."""

from __future__ import annotations

import pytest
import torch

import dgt


@pytest.mark.parametrize("masked", [False, True])
def test_clusters_are_those_of_the_reference(masked, fast, draw, close) -> None:
    tokens = draw(2, 3, 250, 17, 1).query
    mask = torch.rand(2, 250, generator=torch.Generator().manual_seed(0)) < 0.6 if masked else None
    ours = dgt.cluster_tokens(tokens, 11, mask=mask, backend=fast)
    theirs = dgt.cluster_tokens(tokens, 11, mask=mask, backend="reference")
    assert torch.equal(ours.ids, theirs.ids)
    close(ours.centroids, theirs.centroids)
    assert not masked or torch.equal(ours.ids >= 0, mask[:, None].expand_as(ours.ids))


def test_centroids_are_means_and_an_empty_cluster_keeps_its_own(backend) -> None:
    tokens = torch.tensor([0.0, 0.0, 1.0, 9.0]).view(1, 1, 4, 1)
    centroids, ids = dgt.cluster_tokens(tokens, 4, backend=backend)
    assert ids.unique().tolist() == [0, *sorted(set(ids.flatten().tolist()) - {0})]
    for token, cluster in zip(tokens.flatten(), ids.flatten(), strict=True):
        assert centroids[0, 0, cluster, 0] == token
    assert sorted(centroids.flatten().tolist()) == [0, 0, 1, 9]
