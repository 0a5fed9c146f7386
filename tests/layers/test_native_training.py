"""Training on the native kernels: results, settings that they respect, and when PyTorch is used."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dgt.layers import DGAttention, native
from dgt.layers.block import Block
from dgt.layers.convolution import ConditionalPositionEncoding, InvertedResidualFFN
from dgt.layers.heads import split_heads_of
from dgt.ops.cpu import library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)


@pytest.fixture
def without_native(monkeypatch):
    """A wrapper that runs a function without native layers."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(native, "reason_against_native", lambda: "not wanted")
            return function(*arguments)

    return run


def small_network(**options) -> InvertedResidualFFN:
    torch.manual_seed(0)
    return InvertedResidualFFN(8, **options).train()


def test_training_follows_statistics_as_pytorch_does(without_native) -> None:
    for momentum in (0.1, 0.5, None):
        network = small_network()
        for norm in (network.norm1, network.norm2, network.norm3):
            norm.momentum = momentum
        twin = copy.deepcopy(network)
        for _ in range(3):
            x = torch.randn(2, 5, 4, 8)
            assert network.trains_natively(x)
            network(x)
            without_native(twin, x)
        expected = twin.state_dict()
        for name, tensor in network.state_dict().items():
            # Each step rounds both; 3 steps do not accumulate more than this.
            torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=2e-6)


def test_norms_that_track_nothing_stay_so() -> None:
    network = small_network()
    network.norm2 = nn.BatchNorm2d(32, track_running_stats=False)
    assert network.trains_natively(torch.randn(2, 4, 4, 8))
    network(torch.randn(2, 4, 4, 8))
    assert network.norm2.running_mean is None


def test_what_is_not_plain_training_stays_pytorchs() -> None:
    x = torch.randn(2, 4, 4, 8)
    assert small_network().trains_natively(x)
    assert not small_network().eval().trains_natively(x)
    assert not small_network().double().trains_natively(x.double())
    assert not small_network().trains_natively(x[:1, :1, :1])  # PyTorch's error says why
    with torch.autocast("cpu", torch.bfloat16):
        assert not small_network().trains_natively(x)
    mixed = small_network()
    mixed.norm2.eval()  # frozen statistics in one norm
    assert not mixed.trains_natively(x)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(small_network())
    assert not synchronized.trains_natively(x)
    without_weights = small_network()
    without_weights.norm1 = nn.BatchNorm2d(32, affine=False)
    assert not without_weights.trains_natively(x)
    replaced = small_network()
    replaced.expand = nn.Sequential(replaced.expand)
    assert not replaced.trains_natively(x)
    for act in (nn.ReLU(), nn.GELU(approximate="tanh")):
        activated = small_network()
        activated.act = act
        assert not activated.trains_natively(x)


def test_hooks_are_called() -> None:
    for name in ("expand", "norm1", "depthwise", "norm3", "act"):
        network = small_network()
        calls = []
        getattr(network, name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        network(torch.randn(2, 4, 4, 8))
        assert calls, name
    encoding = ConditionalPositionEncoding(8)
    calls = []
    encoding.conv.register_forward_pre_hook(lambda *_: calls.append(1))
    encoding.add_to(torch.randn(1, 4, 4, 8))
    assert calls


def test_one_token_is_an_error_as_in_pytorch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        small_network()(torch.randn(1, 1, 1, 8))


def test_evaluation_with_gradients_is_pytorchs(without_native) -> None:
    network = small_network().eval()
    x = torch.randn(2, 5, 4, 8, requires_grad=True)
    network(x).sum().backward()
    found, x.grad = x.grad, None
    without_native(network, x).sum().backward()
    assert torch.equal(found, x.grad)


def test_dropout_follows_the_network() -> None:
    network = small_network(drop=0.5)
    out = network(torch.randn(4, 6, 6, 8))
    dropped = (out == 0).float().mean().item()
    assert 0.3 < dropped < 0.7


def test_a_block_trains_as_with_pytorch(without_native) -> None:
    torch.manual_seed(0)
    block = Block(16, DGAttention(16, num_heads=2, num_groups=4, top_k=12)).train()
    x = torch.randn(2, 7, 5, 16)
    block(x)  # seeds the centroids
    mask = torch.ones(2, 7, 5, dtype=torch.bool)
    mask[1, 4:] = False
    grad = torch.randn(2, 7, 5, 16)

    def gradients() -> list[torch.Tensor]:
        twin = copy.deepcopy(block)
        leaf = x.detach().requires_grad_()
        twin(leaf, mask).backward(grad)
        return [leaf.grad, *(parameter.grad for parameter in twin.parameters())]

    found = gradients()
    expected = without_native(gradients)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums of 70 tokens through three norms: 300 roundings of the largest.
        assert (ours - theirs).abs().max() <= 2e-5 * (1 + theirs.abs().max())


def test_checkpointing_of_gradients_changes_no_bit() -> None:
    network = small_network()
    x = torch.randn(2, 6, 5, 8)
    found = []
    for is_checkpointed in (False, True):
        twin = copy.deepcopy(network)
        leaf = x.detach().requires_grad_()
        out = checkpoint(twin, leaf, use_reentrant=False) if is_checkpointed else twin(leaf)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(parameter.grad for parameter in twin.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_compiled_training_steps_are_the_same() -> None:
    network = small_network()
    compiled_network = copy.deepcopy(network)
    compiled = torch.compile(compiled_network, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 6, 5, 8)
    outputs = []
    for run in (network, compiled):
        out = run(x)
        out.square().sum().backward()
        outputs.append(out)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    expected = dict(network.named_parameters())
    for name, parameter in compiled_network.named_parameters():
        scale = 1 + expected[name].grad.abs().max()
        assert (parameter.grad - expected[name].grad).abs().max() <= 2e-5 * scale, name
    for name, tensor in compiled_network.state_dict().items():
        torch.testing.assert_close(tensor, network.state_dict()[name], atol=1e-5, rtol=1e-5)


def test_functional_transforms_are_pytorchs() -> None:
    network = small_network().eval()
    parameters = dict(network.named_parameters())
    x = torch.randn(2, 4, 4, 8)

    def loss(p: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(network, p, (x,)).square().sum()

    network.norm1.running_mean.zero_()
    found = torch.func.grad(loss)(parameters)
    assert found["expand.weight"].abs().max() > 0
    encoding = ConditionalPositionEncoding(8)
    jacobian = torch.func.jacrev(encoding.add_to)(torch.randn(1, 2, 2, 8))
    assert jacobian.shape == (1, 2, 2, 8, 1, 2, 2, 8)


def split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def test_gradients_that_stand_side_by_side_are_not_copied() -> None:
    qkv = torch.randn(2, 5, 3, 4, 6, requires_grad=True)
    kept = torch.randn(2, 5, 3, 4, 6)
    found = torch.autograd.grad(split_heads_of(qkv), qkv, split(kept))[0]
    assert found.data_ptr() == kept.data_ptr()
    assert torch.equal(found, kept)


def test_other_gradients_are_joined() -> None:
    qkv = torch.randn(2, 5, 3, 4, 6, requires_grad=True)
    kept = torch.randn(2, 5, 3, 4, 6)
    query, key, value = split(kept)
    apart = (query, key.clone(), value)
    assert torch.equal(torch.autograd.grad(split_heads_of(qkv), qkv, apart)[0], kept)
    swapped = (key, query, value)
    expected = kept[:, :, [1, 0, 2]]
    assert torch.equal(torch.autograd.grad(split_heads_of(qkv), qkv, swapped)[0], expected)
    (only_key,) = torch.autograd.grad(split_heads_of(qkv)[1].sum(), qkv)
    assert torch.equal(only_key[:, :, 1], torch.ones(2, 5, 4, 6))
    assert only_key[:, :, [0, 2]].abs().max() == 0
    # With `create_graph` gradients are copied, so that each is a separate function.
    grads = [grad.clone().requires_grad_() for grad in split(kept)]
    (joined,) = torch.autograd.grad(split_heads_of(qkv), qkv, grads, create_graph=True)
    joined[:, :, 2].sum().backward()
    assert grads[0].grad.abs().max() == 0
    assert torch.equal(grads[2].grad, torch.ones(2, 4, 5, 6))


def test_attention_trains_on_one_projection(without_native) -> None:
    torch.manual_seed(0)
    layer = DGAttention(24, num_heads=3, num_groups=4, top_k=12).train()
    x = torch.randn(2, 5, 7, 24, requires_grad=True)
    layer(x)
    layer.eval()
    grad = torch.randn(2, 5, 7, 24)
    found = torch.autograd.grad(layer(x), (x, layer.qkv.weight), grad)
    expected = without_native(lambda: torch.autograd.grad(layer(x), (x, layer.qkv.weight), grad))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
