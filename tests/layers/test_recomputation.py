"""What the feed-forward network keeps for its backward pass, and what it computes in one; results stay the same."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from dgt.layers import InvertedResidualFFN, recomputation


def results(module: nn.Module, x: torch.Tensor, **options: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients of input and parameters, and buffers after one training step."""
    module, x = copy.deepcopy(module).train(), x.clone().requires_grad_()
    output = module(x, **options)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("masked", [False, True])
def test_training_is_the_same_bit_for_bit(masked, monkeypatch) -> None:
    torch.manual_seed(0)
    module, x = InvertedResidualFFN(6), torch.randn(2, 4, 5, 6)
    module.act = nn.GELU("tanh")  # which no operator of ours computes
    options = {"mask": torch.rand(2, 4, 5) > 0.3} if masked else {}
    economical = results(module, x, **options)
    monkeypatch.setattr(recomputation, "_can_be_repeated", lambda *_: False)
    for same, plain in zip(economical, results(module, x, **options), strict=True):
        assert torch.equal(same, plain)


@pytest.mark.parametrize("part", ["norm1", "act"])
def test_a_forward_of_its_own_is_what_gradients_are_of(part, monkeypatch) -> None:
    torch.manual_seed(0)
    module, x = InvertedResidualFFN(6), torch.randn(2, 4, 5, 6)
    module.act = nn.GELU("tanh")
    monkeypatch.setattr(getattr(module, part), "forward", lambda y: y.sin())
    found = results(module, x)
    monkeypatch.setattr(recomputation, "_can_be_repeated", lambda *_: False)
    torch.testing.assert_close(found, results(module, x), rtol=0, atol=0)


def test_second_derivatives() -> None:
    module = InvertedResidualFFN(3, 2).double().train()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))


@pytest.mark.parametrize("training", [False, True])
def test_transforms_and_traces_take_it(training) -> None:
    module, x = InvertedResidualFFN(3, 2).train(training), torch.randn(1, 2, 3, 3)
    for norm in (module.norm1, module.norm2, module.norm3):
        norm.track_running_stats = False
    expected = torch.autograd.functional.jacobian(lambda x: module(x).sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).sum())(x), expected)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: module(x).sum())(x), expected)
    torch.jit.save(torch.jit.trace(module, x), io.BytesIO())


def test_checkpointing_around_it_gives_the_same() -> None:
    module, x = InvertedResidualFFN(6).train(), torch.randn(2, 4, 5, 6, requires_grad=True)
    (plain,) = torch.autograd.grad(module(x).square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    (recomputed,) = torch.autograd.grad(again.square().sum(), x)
    assert torch.equal(plain, recomputed)


def kept_maps(output: torch.Tensor, size: int) -> set[int]:
    """Where the maps of a size lie that a graph keeps for its backward pass."""
    nodes = [output.grad_fn]
    found = set()
    for node in nodes:  # grows during the loop
        nodes += [following for following, _ in node.next_functions if following is not None]
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_raw_saved_") else ()
            for one in saved if isinstance(saved, tuple | list) else (saved,):
                if isinstance(one.data, torch.Tensor) and one.data.numel() == size:
                    found.add(one.data.data_ptr())
    return found


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_of_hidden_maps_only_the_inputs_of_activations_are_kept(approximate) -> None:
    module = InvertedResidualFFN(6).train()
    module.act = nn.GELU(approximate)
    output = module(torch.randn(2, 4, 5, 6, requires_grad=True))
    assert len(kept_maps(output, 4 * 2 * 4 * 5 * 6)) == 2


def test_modules_that_do_more_than_their_class_are_called_and_obeyed() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 6)
    for name in ("act", "norm1", "norm2"):
        module = InvertedResidualFFN(6).double()
        calls = []

        def halve(_module, _inputs, output, calls=calls):
            calls.append(1)
            return output * 0.5

        getattr(module, name).register_forward_hook(halve)
        assert torch.autograd.gradcheck(module.train(), (x[:1].double().requires_grad_(),))
        calls.clear()
        module(x.double().requires_grad_()).sum().backward()
        assert len(calls) == (2 if name == "act" else 1)
