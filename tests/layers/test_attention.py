"""The attention layers: shapes, limits, masks, settings, and what they reject."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dgt


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("shape", [(2, 6, 5, 16), (2, 30, 16), (1, 1, 1, 16), (1, 1, 16)])
@pytest.mark.parametrize("kind", [dgt.DGAttention, dgt.GlobalAttention])
def test_the_shape_stays(kind, shape, cosine) -> None:
    assert kind(16, 2, cosine=cosine)(torch.randn(shape)).shape == shape


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("residual_keys", [0, 1, 4])
def test_all_keys_make_global_attention(residual_keys, cosine, training, layer, tokens) -> None:
    """Also with residual keys: nothing is left for them."""
    grouped = layer(top_k=30, cosine=cosine, residual_keys=residual_keys).train(training)
    everywhere = dgt.GlobalAttention(16, 2, cosine=cosine)
    everywhere.load_state_dict(
        {k: v for k, v in grouped.state_dict().items() if k in everywhere.state_dict()}
    )
    torch.testing.assert_close(grouped(tokens(1)), everywhere(tokens(1)), rtol=0, atol=1e-5)


def test_global_attention_is_the_textbook_formula(tokens) -> None:
    layer, x = dgt.GlobalAttention(16, 2), tokens(1).flatten(1, 2)
    query, key, value = (
        t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer.qkv(x).chunk(3, dim=-1)
    )
    weight = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
    expected = layer.proj((weight @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_cosine_attention_is_that_of_swin_v2(tokens) -> None:
    """Normalized queries and keys, and a scale per head that starts at 10 and is capped at 100."""
    layer, x = dgt.GlobalAttention(16, 2, cosine=True), tokens(1).flatten(1, 2)
    torch.testing.assert_close(layer.logit_scale.exp().flatten(), torch.tensor([10.0, 10.0]))
    layer.logit_scale.data[1] = 9.0
    query, key, value = (
        t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer.qkv(x).chunk(3, dim=-1)
    )
    score = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-1, -2)
    weight = (score * torch.tensor([10.0, 100.0]).view(2, 1, 1)).softmax(-1)
    expected = layer.proj((weight @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_cosine_ranks_keys_normalized(layer, tokens) -> None:
    """The norm of a key then has no effect: scaling some keys does not change the selection."""
    attention = layer(cosine=True, qkv_bias=False)
    stretched = tokens(1) * (0.1 + 10 * torch.rand(4, 6, 5, 1))
    assert torch.equal(attention.inspect(stretched).key_ids, attention.inspect(tokens(1)).key_ids)
    plain = layer(qkv_bias=False)
    assert not torch.equal(plain.inspect(stretched).key_ids, plain.inspect(tokens(1)).key_ids)


@pytest.mark.parametrize("residual_keys", [0, 1, 4])
def test_a_layer_is_the_operator_between_its_projections(residual_keys, layer, tokens) -> None:
    """To the bit, outputs and gradients; 0 residual keys, the default, are the paper."""
    attention = layer(residual_keys=residual_keys).train()
    attention(tokens(0))  # seeds the centroids
    found, expected = tokens(1).requires_grad_(), tokens(1).requires_grad_()
    output = attention(found)
    query, key, value = attention.split_heads(expected)
    named = {"residual_keys": residual_keys} if residual_keys else {}
    seen = dgt.dynamic_group_attention(
        query, key, value, attention.unit_centroids(), 6, attention.scale, **named
    )
    assert torch.equal(output, attention.merge_heads(seen.output, expected))
    for result in (output, attention.merge_heads(seen.output, expected)):
        result.square().sum().backward()
    assert torch.equal(found.grad, expected.grad)
    assert found.grad.norm() > 0
    assert attention.observed.counts.sum() == 2 * 2 * 4 * 30  # two calls, two heads, four images


def test_residual_keys_come_nearer_to_global_attention(layer, tokens) -> None:
    everywhere = dgt.GlobalAttention(16, 2)
    errors = []
    for residual_keys in (0, 1, 16):
        grouped = layer(residual_keys=residual_keys).eval()
        everywhere.load_state_dict(grouped.state_dict(), strict=False)
        errors.append((grouped(tokens(1)) - everywhere(tokens(1))).norm())
    assert errors[2] < errors[1] < errors[0] / 2


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (dgt.GlobalAttention, {}),
        (dgt.DGAttention, {"num_groups": 5, "top_k": 6}),
        (dgt.DGAttention, {"num_groups": 5, "top_k": 6, "residual_keys": 1}),
        (dgt.DGAttention, {"num_groups": 5, "top_k": 6, "residual_keys": 4}),
    ],
)
def test_a_padded_image_gives_what_it_gives_alone(kind, settings, cosine, tokens) -> None:
    layer = kind(16, 2, cosine=cosine, **settings)
    small = tokens(1, 1, 4, 3)
    batch = torch.randn(2, 6, 5, 16) * 3
    batch[1, :4, :3] = small[0]
    mask = torch.ones(2, 6, 5, dtype=torch.bool)
    mask[1, 4:] = mask[1, :, 3:] = False
    out = layer.eval()(batch, mask)
    torch.testing.assert_close(out[1, :4, :3], layer(small)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(out[:1], layer(batch[:1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [None, {}, {"residual_keys": 1}, {"residual_keys": 4}])
def test_an_image_of_padding_alone_stays_finite(settings, tokens) -> None:
    """And one with fewer tokens than there are residual keys."""
    layer = dgt.GlobalAttention(16, 2) if settings is None else dgt.DGAttention(16, 2, **settings)
    x = tokens(1).requires_grad_()
    mask = torch.ones(4, 6, 5, dtype=torch.bool)
    mask[2] = False
    mask[3, 1:] = mask[3, :, 3:] = False
    layer(x, mask).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_settings_may_change_at_any_time(layer, tokens) -> None:
    attention = layer().eval()
    reference = attention(tokens(1))
    attention.backend = "reference"
    torch.testing.assert_close(attention(tokens(1)), reference, rtol=0, atol=1e-5)
    attention.top_k = 3
    assert attention.inspect(tokens(1)).key_ids.shape[-1] == 3
    assert not torch.allclose(attention(tokens(1)), reference)


def test_inspecting_changes_nothing(layer, tokens) -> None:
    attention = layer().train()
    before = {name: buffer.clone() for name, buffer in attention.named_buffers()}
    attention.inspect(tokens(1))
    assert all(torch.equal(before[name], buffer) for name, buffer in attention.named_buffers())
    assert not attention.seeded


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("dim", 31, "be divisible by num_heads, got 31 and 2"),
        ("num_groups", 0, "be at least 1, got 0"),
        ("tau", 1.5, r"be between 0 and 1, got 1\.5"),
        ("tau_weighs", "both", "be 'old' .* or 'new', got 'both'"),
        ("backend", "fast", "be one of auto, .*got 'fast'"),
    ],
)
def test_bad_settings(argument, value, expected) -> None:
    with pytest.raises(ValueError, match=f"^{argument}.* must {expected}"):
        dgt.DGAttention(**{"dim": 32, "num_heads": 2, argument: value})


@pytest.mark.parametrize(
    ("x", "mask", "error", "message"),
    [
        (torch.zeros(5, 16), None, ValueError, r"x must be a \(B, H, W, 16\) or \(B, L, 16\) fl"),
        (torch.zeros(2, 5, 4), None, ValueError, r"x must be a .*, got a \(2, 5, 4\) tensor"),
        (torch.zeros(2, 5, 16).int(), None, TypeError, r"x must be a .* tensor of torch\.int32"),
        (
            torch.zeros(2, 5, 16),
            torch.ones(2, 5),
            TypeError,
            r"mask must .*, got a \(2, 5\) tensor",
        ),
        (
            torch.zeros(2, 5, 16),
            torch.ones(2, 4).bool(),
            ValueError,
            r"mask must .*\(2, 4\) tensor",
        ),
    ],
)
def test_inputs_that_do_not_fit(x, mask, error, message, layer) -> None:
    for attention in (layer(), dgt.GlobalAttention(16, 2)):
        with pytest.raises(error, match=f"^{message}"):
            attention(x, mask)


@pytest.mark.parametrize("side", [4, 20])
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_to_attend_to(grad, side, layer) -> None:
    """No images are none; an image without tokens is refused."""
    for attention in (layer().eval(), dgt.GlobalAttention(16, 2)):
        with torch.set_grad_enabled(grad):
            assert attention(torch.zeros(0, side, side, 16)).shape == (0, side, side, 16)
            with pytest.raises(ValueError, match=r"x must not be empty, got a \(1, "):
                attention(torch.zeros(1, 0, side, 16))


def test_all_weights_have_gradients_without_tokens() -> None:
    """Processes of DistributedDataParallel wait for them."""
    crossed = dgt.DGCrossAttention(16, 2, num_groups=2, top_k=2, cosine=True)
    crossed(torch.randn(2, 5, 16), torch.randn(2, 0, 16)).sum().backward()
    alone = dgt.GlobalAttention(16, 2, cosine=True)
    alone(torch.randn(0, 5, 16)).sum().backward()
    for weight in (*crossed.parameters(), *alone.parameters()):
        assert weight.grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_top_k_that_was_set_to_nothing(grad, layer, tokens) -> None:
    attention = layer().eval()
    attention.top_k = 0
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match="top_k must be at least 1, got 0"),
    ):
        attention(tokens(0))


def test_more_residual_keys_than_tokens(layer, tokens) -> None:
    with pytest.raises(ValueError, match=r"residual_keys must be at most the 30 keys .*, got 31"):
        layer(residual_keys=31)(tokens(0))


def test_forward_mode_differentiation_is_refused_or_right(layer, tokens) -> None:
    """Never silently zero, as for an operator without a vmap or jvp rule."""
    x, tangent = tokens(0).double(), torch.randn(tokens(0).shape, dtype=torch.float64)
    attention = layer(dtype=torch.float64).eval()
    with pytest.raises(
        ValueError, match='backend must be "reference" for forward-mode differentiation, got "auto"'
    ):
        torch.func.jvp(attention, (x,), (tangent,))
    attention.backend = "reference"
    step = 1e-6
    numeric = (attention(x + step * tangent) - attention(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(
        torch.func.jvp(attention, (x,), (tangent,))[1], numeric, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_of_zeros_have_no_direction(dtype) -> None:
    attention = dgt.DGAttention(
        16, 2, num_groups=3, top_k=4, qkv_bias=False, cosine=True, dtype=dtype
    ).eval()
    assert attention(torch.zeros(1, 4, 4, 16, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"cosine": True}, {"dtype": torch.float64}, {"top_k": 99}])
@pytest.mark.parametrize("side", [4, 9])  # few tokens and many
def test_prediction_without_gradients_equals_that_with_them(options, side) -> None:
    layer = dgt.DGAttention(8, 2, **{"num_groups": 4, "top_k": 7, **options}).eval()
    x = torch.randn(2, side, side, 8, dtype=options.get("dtype"))
    mask = torch.rand(2, side, side) < 0.7
    for real in (None, mask):
        expected = layer(x.clone().requires_grad_(), real)
        with torch.no_grad():
            torch.testing.assert_close(layer(x, real), expected.detach())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [dgt.DGAttention, dgt.GlobalAttention])
def test_traced_with_gradients_enabled(kind) -> None:
    layer, longer = kind(16, 2).eval(), torch.randn(3, 40, 16)
    traced = torch.jit.trace(layer, torch.randn(1, 30, 16))
    torch.testing.assert_close(traced(longer), layer(longer), rtol=0, atol=1e-5)


def test_exported_it_predicts_in_steps_that_every_machine_has(layer, tokens) -> None:
    """Other runtimes have their own operators for them; no step names the backend used here."""
    attention, x, ran = layer().eval(), tokens(0), []

    def backend(graph, _):
        ran.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), attention(x))
    # The compiler sees operators, not their implementation.
    assert not any("scatter" in name for name in ran)
    nodes = torch.export.export(attention, (x,)).graph.nodes
    steps = [node for node in nodes if str(node.target).startswith("dgt.")]
    assert [str(node.target) for node in steps] == [
        "dgt.group_queries.default",
        "dgt.select_keys.default",
        "dgt.attend.default",
    ]
    assert not any(isinstance(argument, str) for node in steps for argument in node.args)


@pytest.mark.parametrize("options", [{}, {"residual_keys": 3}, {"backend": "torch"}])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("grad", [False, True])
def test_a_broken_image_leaves_the_others_alone(grad, value, options, layer, tokens) -> None:
    attention, x = layer(**options).eval(), tokens(0)
    expected = attention(x)
    x[1, 2, 3, 4] = value
    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        found = attention(x, torch.ones(x.shape[:-1], dtype=torch.bool))
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert found[1].isnan().all()
    if grad:
        (in_x,) = torch.autograd.grad(found[[0, 2, 3]].square().sum(), x)
        assert in_x[[0, 2, 3]].isfinite().all()
        assert in_x[[0, 2, 3]].abs().sum() > 0
    with pytest.raises(ValueError, match="must not contain NaN"):
        attention.train()(x)


@pytest.mark.parametrize("options", [{}, {"residual_keys": 1}, {"cosine": True}])
def test_gradients_of_single_images_by_vmap(options, layer, tokens) -> None:
    attention, x = layer(**options).eval(), tokens(0)
    weights = dict(attention.named_parameters())

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(attention, weights, (image[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    singly = [
        torch.autograd.grad(attention(image[None]).square().sum(), list(weights.values()))
        for image in x
    ]
    for gradient, expected in zip(found.values(), zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(gradient, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"residual_keys": 2}, {"backend": "torch"}])
def test_gradients_of_many_at_once(options, layer, tokens) -> None:
    attention, x = layer(**options).eval(), tokens(0).requires_grad_()
    output = attention(x)
    many = torch.randn(3, *output.shape)
    (found,) = torch.autograd.grad(output, x, many, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(output, x, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(found, torch.stack(singly))
