"""Large inputs at half precision: every model's output stays finite."""

from __future__ import annotations

import pytest
import timm
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dgt_nano", "dgt_base"])
def test_inputs_a_thousand_times_too_large_stay_finite(name: str, dtype: torch.dtype) -> None:
    model = timm.create_model(name).eval().to(dtype)
    images = (1000 * torch.randn(1, 3, 64, 64)).to(dtype)
    with torch.inference_mode():
        assert images.isfinite().all()
        assert model(images).isfinite().all()
