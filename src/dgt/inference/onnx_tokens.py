"""The tokens of an ONNX graph of known sizes as (B, H W, C), where the model has them as (B, H, W, C).

OpenVINO takes four dimensions for an image, keeps what a convolution yields with its second one innermost, and carries
that through additions and norms to the next convolution: tokens of four dimensions are brought from one layout to the
other, slowly, several times a block. Of three dimensions they need no copy at all, and nothing else changes.
"""

from typing import Any

import onnx_ir

TO_TOKENS, TO_IMAGE = [0, 2, 3, 1], [0, 3, 1, 2]
TOKENWISE = ("Add", "Sub", "Mul", "LayerNormalization", "MatMul")  # of three dimensions as of four


def flatten_tokens(graph: Any) -> None:
    """Make the tokens between convolutions three-dimensional, in place; none if something needs their four dimensions.

    Args:
        graph: of onnx_ir, with all shapes known.
    """
    tokens = {value: tuple(value.shape) for value in _tokens(graph)}
    for node in list(graph):
        if _order(node) == TO_IMAGE and node.inputs[0] in tokens:
            value = node.inputs[0]
            node.replace_input_with(0, _reshape(graph, node, value, tokens[value]))
    for value, (batch, height, width, channels) in tokens.items():
        node, flat = value.producer(), (batch, height * width, channels)
        if node.op_type == "Transpose":
            uses = value.uses()
            reshaped = _reshape(graph, uses[0].node, value, flat)
            for use in uses:
                use.node.replace_input_with(use.idx, reshaped)
        else:
            value.shape = onnx_ir.Shape(flat)
        if node.op_type == "Reshape":
            node.replace_input_with(1, _constant(graph, node, flat))


def _tokens(graph: Any) -> list[Any]:
    """All values that are tokens as (B, H, W, C), in order; none if one is used in a way that needs all four."""
    tokens: list[Any] = []
    for node in graph:
        value, used = node.outputs[0], [taken in tokens for taken in node.inputs]
        if not any(used):
            like = node.op_type == "Reshape" and value.shape in [token.shape for token in tokens]
            tokens += [value] if like or _order(node) == TO_TOKENS else []
        elif node.op_type in TOKENWISE:
            others = [taken.shape for taken, token in zip(node.inputs, used, strict=True) if not token]
            if (node.op_type == "MatMul" and not used[0]) or any(len(shape) > 2 for shape in others):
                return []
            tokens.append(value)
        elif node.op_type != "Reshape" and _order(node) != TO_IMAGE:
            return []
    return [] if any(output in tokens for output in graph.outputs) else tokens


def _order(node: Any) -> Any:
    return list(node.attributes["perm"].as_ints()) if node.op_type == "Transpose" else None


def _constant(graph: Any, node: Any, numbers: tuple[int, ...]) -> Any:
    constant = onnx_ir.node("Constant", [], {"value_ints": numbers})
    graph.insert_before(node, constant)
    return constant.outputs[0]


def _reshape(graph: Any, node: Any, value: Any, shape: tuple[int, ...]) -> Any:
    """``value`` in another shape, computed before ``node``."""
    reshape = onnx_ir.node("Reshape", [value, _constant(graph, node, shape)])
    graph.insert_before(node, reshape)
    reshape.outputs[0].shape, reshape.outputs[0].dtype = onnx_ir.Shape(shape), value.dtype
    return reshape.outputs[0]
