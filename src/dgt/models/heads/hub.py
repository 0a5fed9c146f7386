"""Segmenters and detectors as folders that rebuild them, on disk or on the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from huggingface_hub import PyTorchModelHubMixin
from torch import nn

from dgt.layers import DGAttention
from dgt.models.inspect import CHECKS
from dgt.utils.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

SETTINGS = tuple(name for name in CHECKS if name != "backend")
"""What `dgt.set_attention` may have changed since a network was built; a backend belongs to the
machine.
"""
OF_FIRST_WEIGHTS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
)
"""Arguments of timm's models that say which weights they begin with, which the saved ones replace."""


class HubModel(PyTorchModelHubMixin):
    """`save_pretrained`, `from_pretrained` and `push_to_hub` of a network.

    A folder has `model.safetensors`, a card, and `config.json`: `head`, the constructor's
    arguments, and `attention`, the settings of every DG-Attention layer in order. `from_pretrained`
    takes a folder or the name of a repository; weights must fit exactly.
    """

    head: ClassVar[str]
    """What `config.json` calls the network."""
    arguments: dict[str, Any]
    """What the constructor was called with."""

    def hub_config(self) -> dict[str, Any]:
        """What `config.json` says.

        Raises:
            UserError: an argument is no JSON value, such as a backbone that is a module and not the
                name of a timm model.
        """
        kept = {
            name: value for name, value in self.arguments.items() if name not in OF_FIRST_WEIGHTS
        }
        for name, value in kept.items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise UserError(
                    f"{name} must be a JSON value to save a network that can be rebuilt, "
                    f"got {type(value).__name__}"
                ) from error
        layers = _layers(cast(nn.Module, self))
        attention = {name: [getattr(layer, name) for layer in layers] for name in SETTINGS}
        return {"head": self.head, **kept, "attention": attention}

    def save_pretrained(
        self, save_directory: str | Path, *, config: Any = None, **options: Any
    ) -> str | None:
        """Write the folder; arguments as those of huggingface_hub's mixin.

        Raises:
            UserError: as `hub_config`; nothing is written then.
        """
        told = self.hub_config() if config is None else config
        pushed: str | None = super().save_pretrained(save_directory, config=told, **options)
        return pushed

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        head: str | None = None,
        attention: dict[str, list[Any]] | None = None,
        dgt: object = None,  # what `dgt train` adds
        strict: bool = True,
        **options: Any,
    ) -> Self:
        """Build the network and load its weights; entries of `config.json` are among the options."""
        if head != cls.head:
            raise UserError(
                f"{model_id} must hold a {cls.__name__}, whose config.json says "
                f"head: {cls.head!r}, got {head!r}"
            )
        try:
            network = super()._from_pretrained(model_id=model_id, strict=strict, **options)
        except RuntimeError as error:
            raise UserError(f"{model_id} has weights that do not fit: {error}") from error
        _restore(_layers(network), attention or {}, model_id)
        return cast("Self", network)


def _restore(layers: list[DGAttention], attention: dict[str, list[Any]], source: str) -> None:
    """Set the settings of each layer that a `config.json` lists."""
    for name, values in attention.items():
        if name not in SETTINGS or len(values) != len(layers):
            raise UserError(
                f"attention in config.json of {source} must have {len(layers)} values each of "
                f"{', '.join(SETTINGS)}, got {len(values)} of {name!r}"
            )
        for layer, value in zip(layers, values, strict=True):
            CHECKS[name](value)
            setattr(layer, name, value)


def _layers(network: nn.Module) -> list[DGAttention]:
    return [module for module in network.modules() if isinstance(module, DGAttention)]
