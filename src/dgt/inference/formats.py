"""A module as a file for other programs, with batch, height and width left free, and how such files
are run.

`torch.export` makes a graph of PyTorch's operators: a `.pt2` file, and the first step towards one
ONNX file of standard operators. In `.pt2` DG-Attention appears as this package's
`dgt::group_queries`, `dgt::select_keys` and `dgt::attend`: a
process that loads the file imports dgt first.
"""

import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dgt.layers import DGAttention
from dgt.ops.checks import describe
from dgt.utils.errors import UserError
from dgt.utils.extras import require

SIZES = "dynamic batch, height and width"
OPSET = 18
LARGEST = 2 - 2**-6  # GiB of one file, by the format it is written in, less some room for the graph
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")

Runner = Callable[[Tensor], list[Tensor]]
"""Runs a file: images (B, 3, H, W) -> outputs."""


class Size(NamedTuple):
    """Of a batch of images."""

    batch: int
    height: int
    width: int


EXAMPLE = Size(2, 96, 160)
"""What a module is recorded with: sides that differ, and leave more than one token at stride 32."""


@dataclass(frozen=True)
class Source:
    """A module to export.

    Args:
        module: maps (B, 3, H, W) images to a tensor or a list of tensors; float32, in evaluation
            mode.
        outputs: name of each of those.
        size: the only side of images that the module takes, in pixels; None where it takes any.
        about: further facts, kept in the file: what the classes are, how images are normalized.
        fixed: batch, height and width of all images that the file is for; None leaves free what the
            module does.
        extended: write every DG-Attention, and every :func:`dgt.clustered_attention`, as one ONNX
            operator, which OpenVINO knows by an extension
            (:func:`dgt.openvino_extension_path`).
    """

    module: nn.Module
    outputs: tuple[str, ...] = ("logits",)
    size: int | None = None
    about: dict[str, str] = field(default_factory=dict)
    fixed: tuple[int, int, int] | None = None
    extended: bool = False

    @property
    def facts(self) -> dict[str, str]:
        """What the file says about itself: `about`, with the one size of images that it takes."""
        if self.fixed is None or "image_size" not in self.about:
            return self.about
        _, height, width = self.fixed
        size = height if height == width else [height, width]
        return {**self.about, "image_size": json.dumps(size)}


def as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """What a module returns, as a list.

    Raises:
        TypeError: it is no tensor and no sequence of them, such as a mapping.
    """
    if isinstance(outputs, Tensor):
        return [outputs]
    if not isinstance(outputs, Sequence):
        raise TypeError(
            f"the model must return a tensor or a list of tensors, got a {type(outputs).__name__}"
        )
    return list(outputs)


def _reason(error: BaseException) -> str:
    """Return the first line of the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def trace(source: Source) -> ExportedProgram:
    """Record a module as a graph of `images`, of any batch, height and width unless it is built or
    meant for one size.

    Raises UserError where some part of it is not in evaluation mode or not float32, or depends on sizes
    in a way that a graph cannot follow.
    """
    for name, module in source.module.named_modules():
        if module.training:
            where = f" at {name!r}" if name else ""
            raise UserError(
                f"the model must be in evaluation mode, got training mode{where}: call eval() first"
            )
    kinds = {p.dtype for p in source.module.parameters() if p.is_floating_point()}
    if kinds != {torch.float32}:
        raise UserError(
            f"the model must be float32, got {', '.join(sorted(map(str, kinds))) or 'no parameters'}"
        )
    free: dict[int, Any] = {}
    if source.fixed:
        batch, height, width = source.fixed
    elif source.size:
        batch, height, width = EXAMPLE.batch, source.size, source.size
        free[0] = Dim("batch", min=1)
    else:
        batch, height, width = EXAMPLE
        free = {0: Dim("batch", min=1), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    images = torch.zeros(batch, 3, height, width, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad():
            return torch.export.export(source.module, (images,), dynamic_shapes=(free,))
    except Exception as error:  # of any kind: the module cannot be traced
        name = type(source.module).__name__
        size = (
            "batches of {} images of {} x {} pixels".format(*source.fixed)
            if source.fixed
            else SIZES
        )
        raise UserError(f"a {name} cannot be exported for {size}: {_reason(error)}") from error


def encode_program(source: Source) -> bytes:
    """Return the `.pt2` file of a module, a program of ``torch.export``.

    Args:
        source: what to export.

    Returns:
        The content of the file.

    Raises:
        UserError: as :func:`trace`.

    Example:
        >>> run = open_program(encode_program(Source(network)))
    """
    program = trace(source)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=source.facts)
    return buffer.getvalue()


def open_program(content: bytes) -> Runner:
    """Return a function that runs a `.pt2` file.

    Args:
        content: of the file.

    Returns:
        Maps (B, 3, H, W) images to the outputs.

    Raises:
        UserError: from the function, where images have sizes that the file does not take.

    Example:
        >>> outputs = open_program(Path("model.pt2").read_bytes())(torch.randn(1, 3, 224, 224))
    """
    module = torch.export.load(io.BytesIO(content)).module()
    return lambda images: as_list(module(images))


def check_libraries(
    what: str = "ONNX", libraries: Sequence[str] = LIBRARIES, extra: str = "export"
) -> None:
    """Raise UserError, with the remedy, unless all libraries are installed that something needs."""
    require(what, libraries, extra)


def encode_onnx(source: Source) -> bytes:
    """Return the ONNX file of a module: input `images`, outputs as the source names them.

    For fixed sizes all shapes are constants, and everything that depends on them alone is decided
    here: no `If` is left.

    Args:
        source: what to export.

    Returns:
        The content of the file.

    Raises:
        UserError: as :func:`trace`; for outputs without names, operators that ONNX lacks, and above 2 GiB.

    Example:
        >>> run = open_onnx(encode_onnx(Source(network)))
    """
    import onnx_ir
    from onnx_ir.passes.common import (
        ClearMetadataAndDocStringPass,
        InlinePass,
        LiftConstantsToInitializersPass,
        RemoveUnusedNodesPass,
    )
    from onnxscript.optimizer import optimize_ir

    from dgt.inference.onnx_operators import (
        DECOMPOSITIONS,
        FUNCTIONS,
        TRANSLATIONS,
        flatten_tokens,
        use_convolutions,
    )

    size = sum(tensor.nbytes for tensor in source.module.state_dict().values()) / 2**30
    if size > LARGEST:
        raise UserError(
            f"one ONNX file holds at most 2 GiB, but the weights alone take {size:.1f} GiB"
        )
    translations = dict(TRANSLATIONS)
    layers = [layer for layer in source.module.modules() if isinstance(layer, DGAttention)]
    most = max((layer.residual_keys for layer in layers), default=0)
    _check_residual_keys(most, has_clusters=source.extended and source.fixed is not None)
    program = trace(source)
    _check_outputs(source, program)
    if source.extended:
        _join_attention(source, program, translations)
    _check_standard(source, program)
    use_convolutions(program)
    program = program.run_decompositions(DECOMPOSITIONS)
    model = _translate(source, program, translations)
    bodies = [onnx_ir.serde.from_proto(function.to_function_proto()) for function in FUNCTIONS]
    model.functions.update({body.identifier(): body for body in bodies})
    InlinePass()(model)
    if source.fixed:
        optimize_ir(model)
        flatten_tokens(model.graph)
        RemoveUnusedNodesPass()(model)
    # onnxruntime's symbolic shapes, which its quantization begins with, know no other constants
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    ClearMetadataAndDocStringPass()(model)  # among it paths of this machine
    if not source.extended:
        model.opset_imports.pop("dgt", None)  # all functions are inlined
    model.metadata_props.update(source.facts)
    file = onnx_ir.to_proto(model)
    # whoever reads it infers shapes; those of weights confuse onnxruntime's quantization
    del file.graph.value_info[:]
    content: bytes = file.SerializeToString()
    return content


def _check_outputs(source: Source, program: ExportedProgram) -> None:
    """Raise UserError unless every output of a recorded graph has a name."""
    count = len(program.graph_signature.user_outputs)
    if len(source.outputs) != count:
        raise UserError(f"outputs must name the {count} outputs, got {source.outputs}")


def _join_attention(source: Source, program: ExportedProgram, translations: dict[Any, Any]) -> None:
    """Make one operator of every DG-Attention of a recorded graph, and translate it; UserError where there is none."""
    from dgt.inference import onnx_extension

    if not onnx_extension.join_steps(program):
        name = type(source.module).__name__
        raise UserError(
            f"a {name} has no attention supported by the OpenVINO extension: export it without the extension"
        )
    translations.update(onnx_extension.TRANSLATIONS)


def _check_residual_keys(most: int, has_clusters: bool) -> None:
    """Raise UserError for more residual keys a group than a file with or without clusters can have."""
    if most > 1 and not has_clusters:
        raise UserError(
            f"residual_keys must be 0 or 1 in standard ONNX operators and for any size, got {most}: "
            "a file of one size, with --size, for the OpenVINO extension, or a .pt2 file of one size can have more"
        )


def _check_standard(source: Source, program: ExportedProgram) -> None:
    """Raise UserError for an attention of a graph that standard operators do not have."""
    from dgt.inference.onnx_operators import named_argument

    clustered = torch.ops.dgt.attend_in_clusters.default
    attend = torch.ops.dgt.attend.default
    nodes = program.graph.nodes
    counts = [named_argument(node, "residual_keys") for node in nodes if node.target == attend]
    most = max(counts, default=0)
    _check_residual_keys(most, has_clusters=False)
    if any(node.target == clustered for node in nodes):
        name = type(source.module).__name__
        raise UserError(
            f"the clustered attention of a {name} cannot be expressed in standard ONNX operators: "
            "export it for the OpenVINO extension, Source(..., extended=True)"
        )


def _translate(source: Source, program: ExportedProgram, translations: dict[Any, Any]) -> Any:
    """Return a recorded module as a model of onnx_ir, in which the functions that translations call
    have no bodies yet.
    """
    free: dict[int, str] = {}
    if not source.fixed:
        free[0] = "batch"
        if not source.size:
            free[2] = "height"
            free[3] = "width"
    with warnings.catch_warnings():
        # about names and versions inside the exporter: nothing a user could mend
        warnings.simplefilter("ignore")
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                dynamic_shapes=(free,),
                opset_version=OPSET,
                custom_translation_table=translations,
                input_names=["images"],
                output_names=list(source.outputs),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UserError(
                f"a {type(source.module).__name__} cannot be written as ONNX: {_reason(error)}"
            ) from error
    return exported.model  # type: ignore[union-attr]


def open_onnx(content: bytes, threads: int | None = None) -> Runner:
    """Return a function that runs an ONNX file in onnxruntime, on the CPU.

    Args:
        content: of the file.
        threads: how many; None leaves it to onnxruntime.

    Returns:
        Maps (B, 3, H, W) images to the outputs.

    Raises:
        TypeError, UserError: from the function, where images are no floats, or have sizes that the file does not take.

    Example:
        >>> outputs = open_onnx(Path("model.onnx").read_bytes())(torch.randn(1, 3, 224, 224))
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: onnxruntime's choice
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape

    def run(images: Tensor) -> list[Tensor]:
        check_size(images, shape)
        return [
            torch.from_numpy(output)
            for output in session.run(None, {"images": images.float().numpy()})
        ]

    return run


def check_size(images: Tensor, shape: Sequence[Any]) -> None:
    """Raise UserError unless images (B, 3, H, W) have the sizes of a file, and TypeError unless they are floats.

    Sizes that it leaves free are no numbers.
    """
    if not images.is_floating_point():
        raise TypeError(f"images must be a floating point tensor, got {describe(images)}")
    if any(
        isinstance(side, int) and side != given
        for side, given in zip(shape, images.shape, strict=True)
    ):
        meant, came = (" x ".join(map(str, sizes)) for sizes in (shape, images.shape))
        hint = "export it again with --size and --batch"
        raise UserError(f"the file was exported for images of {meant}, got {came}: {hint}")
