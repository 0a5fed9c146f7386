"""Parameters and FLOPs: the paper's numbers, the formulas behind them, and the rows of `dgt info`."""

import math
import re
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.models.cost import attention_share
from dgt.ops import flops
from dgt.utils.errors import UserError
from dgt_command.info import model_rows, model_table


def test_costs_are_those_of_the_paper_and_stand_beside_them() -> None:
    rows = {row["model"]: row for row in model_rows()}
    for name, params, gigaflops in (
        ("dgt_tiny", 24.09, 4.35),
        ("dgt_small", 51.76, 9.41),
        ("dgt_base", 90.28, 16.40),
    ):
        row = rows[name]
        assert round(row["params"] / 1e6, 2) == round(row["paper_params"] / 1e6, 2) == params
        assert round(row["flops"] / 1e9, 2) == round(row["paper_flops"] / 1e9, 2) == gigaflops
    table = model_table(list(rows.values()))
    assert all(name in table for name in ("dgt_nano", "24.09", "51.76", "90.28", "16.40"))
    assert model_rows("dgt_tiny", (256, 256))[0]["paper_flops"] is None


def test_stages_add_up() -> None:
    counted = dgt.cost("dgt_tiny")
    assert sum(stage.params for stage in counted.stages) == counted.params
    assert sum(stage.flops for stage in counted.stages) == pytest.approx(counted.flops, abs=1)


@pytest.mark.parametrize("residual_keys", [0, 1, 4])
def test_one_attention_layer_costs_what_the_formula_says(residual_keys: int) -> None:
    class Wrapped(nn.Module):
        in_chans = 8

        def __init__(self) -> None:
            super().__init__()
            self.attn = dgt.DGAttention(8, 2, num_groups=5, top_k=7, residual_keys=residual_keys)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.attn(images.permute(0, 2, 3, 1))

    tokens, dim, groups, top_k, heads = 36, 8, 5, 7, 2
    linears = tokens * dim * 4 * dim
    sorting = heads * round(top_k * groups * math.log2(tokens))
    expected = linears + 2 * top_k * tokens * dim + 2 * tokens * groups * dim + sorting
    if residual_keys:
        expected += (3 * groups + 2 * residual_keys) * tokens * dim  # the sums, and more keys
    if residual_keys > 1:
        expected += flops.clustering((1, heads, tokens, dim // heads), residual_keys) / 2
    assert dgt.cost(Wrapped(), (6, 6)).flops == pytest.approx(expected, abs=heads)


def test_equation_7_gives_the_ratios_of_the_paper() -> None:
    """0.05, 0.19, and 0.75 for the first three stages of DGT-T at 224 px; a selection per head would give 0.76."""
    shares = [
        attention_share(tokens, channels)
        for tokens, channels in ((3136, 64), (784, 128), (196, 256))
    ]
    assert [round(share, 2) for share in shares] == [0.05, 0.19, 0.75]
    assert round(attention_share(196, 256 // 8), 2) == 0.76
    assert attention_share(49, 512) == attention_share(49, 512, top_k=49) > 1


def test_equation_7_is_what_is_counted() -> None:
    tokens, dim = 36, 8
    image = (1, 1, tokens, dim)
    call = SimpleNamespace(query=image, key=image, centroids=(1, 5, dim), top_k=7, residual_keys=0)
    ours = flops.attention(call) / 2
    assert ours / (2 * tokens**2 * dim) == pytest.approx(
        attention_share(tokens, dim, 7, 5), abs=1e-4
    )


def test_what_the_printed_parameters_decide() -> None:
    """Without biases the printed digits would differ; some small parts could each be removed without changing them."""

    def printed(name: str, left_out: str) -> float:
        model = timm.create_model(name, device="meta")
        kept = {
            key: parameter
            for key, parameter in model.named_parameters()
            if not re.search(left_out, key)
        }
        return round(sum(parameter.numel() for parameter in kept.values()) / 1e6, 2)

    names = ("dgt_tiny", "dgt_small", "dgt_base")
    for part in (r"merge\.norm", "logit_scale", r"head\.norm"):
        assert [printed(name, part) for name in names] == [24.09, 51.76, 90.28]
    assert [printed(name, r"^(?!.*norm).*bias") for name in names] == [24.01, 51.64, 90.12]


def test_a_model_is_counted_as_it_is_and_left_alone() -> None:
    model = timm.create_model("dgt_nano", num_classes=3, top_k=8).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fewer, more = dgt.cost(model, (64, 96)).flops, dgt.cost("dgt_nano", (64, 96)).flops
    assert fewer < more
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_model_is_counted_in_the_same_way() -> None:
    linear = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert dgt.cost(linear, (5, 7)).flops == 35 * 3 * 4 + 35 * 4


def test_a_model_that_is_built_for_one_size_is_built_for_the_one_given() -> None:
    counts = [dgt.cost(name, (64, 96)) for name in ("vit_base_patch16_384", "vit_base_patch16_224")]
    assert counts[0] == counts[1]
    assert counts[0].flops < dgt.cost("vit_base_patch16_384", (96, 96)).flops


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("maxvit_tiny_tf_224", (250, 224), "divisible"),
        ("maxvit_tiny_rw_224", (20, 20), "zero"),
    ],
)
def test_a_size_that_a_model_refuses_is_reported_in_a_sentence(
    name: str, size: tuple[int, int], reason: str
) -> None:
    """Whatever type of error the model raises."""
    with pytest.raises(
        UserError, match=rf"model must accept images of {size[0]} x {size[1]} pixels: .*{reason}"
    ):
        dgt.cost(name, size)


def test_a_part_that_gets_a_parameter_is_counted() -> None:
    """For example a class token, for which the counter's own bookkeeping used to fail."""
    total = dgt.cost("pit_ti_224")
    assert (round(total.params / 1e6, 2), round(total.flops / 1e9, 2)) == (4.85, 0.7)


@pytest.mark.parametrize(
    ("argument", "value", "error", "expected"),
    [
        ("model", "dgt_huge", ValueError, "a module or the name of a timm model, got 'dgt_huge'"),
        ("model", 3, TypeError, "a module or the name of a timm model, got int"),
        ("image_size", 224, TypeError, r"\(height, width\) in pixels, got 224"),
        ("image_size", (0, 224), ValueError, "at least 1, got 0"),
    ],
)
def test_bad_arguments(argument: str, value: object, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=f"{argument} must be {expected}"):
        dgt.cost(**{"model": "dgt_tiny", argument: value})
