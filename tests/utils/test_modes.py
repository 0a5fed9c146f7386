"""A model in evaluation for a while."""

from __future__ import annotations

import contextlib

from torch import nn

from dgt.utils.modes import in_evaluation


class Merging(nn.Linear):
    """An adapter that merges its weights in evaluation, as those of loralib do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_every_module_has_its_mode_again() -> None:
    """Also modules that do more in `train` than to note the mode, and after an error."""
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Dropout(), Merging(2, 2)), Merging(2, 2)
    )
    model[1][0].eval()
    model[2].eval()
    before = [module.training for module in model.modules()]
    with contextlib.suppress(KeyError), in_evaluation(model):
        assert not any(module.training for module in model.modules())
        assert model[1][1].merged
        raise KeyError
    assert [module.training for module in model.modules()] == before
    assert (model[1][1].merged, model[2].merged) == (False, True)
