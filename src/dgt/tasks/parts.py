"""Parts of a network by name: those that are frozen, and those with learning rates of their own."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dgt.layers.centroids import CentroidState
from dgt.utils.errors import UserError

BACKBONE = "backbone.model."
"""Where the timm model is in a network with a head; names of parts may leave it out."""


def flat_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names with dots, which the command line has as mappings in mappings.

    Example:
        >>> flat_names({"stages": {"0": 0.5}, "stem": 0.1})
        {'stages.0': 0.5, 'stem': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{rest}": each for rest, each in flat_names(value).items()}
        else:
            flat[name] = value
    return flat


def find_parts(
    network: nn.Module, names: Sequence[str], key: str
) -> list[tuple[str, nn.Module | nn.Parameter]]:
    """The modules and parameters of these names, with their full names.

    Args:
        network: of any task.
        names: as of `named_modules` and `named_parameters`; those of a backbone also without
            `backbone.model.`.
        key: of the recipe, for messages.

    Raises:
        UserError: the network has no such part.
    """
    parts: dict[str, Any] = dict(network.named_modules())
    del parts[""]
    parts |= network.named_parameters()
    found = []
    for name in names:
        place = next((each for each in (name, BACKBONE + name) if each in parts), None)
        if place is None:
            short = [each.removeprefix(BACKBONE) for each in parts]
            near = difflib.get_close_matches(name, short, n=2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            top = dict.fromkeys(each.partition(".")[0] for each in short)
            raise UserError(
                f"{key} must name parts of the model, got {name!r}: {hint}the model consists of "
                f"{', '.join(top)}"
            )
        found.append((place, parts[place]))
    return found


def freeze(network: nn.Module, names: Sequence[str]) -> list[str]:
    """Let the parts of these names get no gradients, and hold them in evaluation mode.

    Returns:
        The full names of all modules in them, for `hold_still`.

    Raises:
        UserError: as `find_parts`.
    """
    modules = []
    for name, part in find_parts(network, names, "model.freeze"):
        part.requires_grad_(False)
        if isinstance(part, nn.Module):
            modules.append(name)
    hold_still(network, modules)
    return modules


def hold_still(network: nn.Module, modules: Sequence[str]) -> None:
    """Put frozen modules into evaluation mode, in which statistics of BatchNorm and centroids stay as
    they are; to be called whenever the network was put into training mode.
    """
    for name in modules:
        network.get_submodule(name).eval()


def trained_centroids(network: nn.Module, frozen: Sequence[str]) -> list[CentroidState]:
    """The layers whose centroids move: those that are in no frozen module."""
    within = tuple(f"{name}." for name in frozen)
    return [
        layer
        for name, layer in network.named_modules()
        if isinstance(layer, CentroidState) and not f"{name}.".startswith(within)
    ]
