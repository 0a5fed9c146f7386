"""What a benchmark of models runs: a timm model, in a form, at a size, for inference or for a training step."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import nn

from dgt.inference import optimize_for_inference
from dgt.ops.checks import check_count

FORMS = ("inference", "global", "checkpointing")


@dataclass(frozen=True)
class Candidate:
    """A model and the form in which it runs, read from ``NAME[@PIXELS][+FORM...]``."""

    text: str
    """As it was written; the name of its row."""
    name: str
    """timm's name."""
    size: int
    """Pixels a side."""
    forms: tuple[str, ...]
    """``inference``: :func:`dgt.optimize_for_inference`; ``global``: global attention in all stages of a DGT;
    ``checkpointing``: gradient checkpointing in a training step."""

    @classmethod
    def parse(cls, text: str, image_size: int) -> "Candidate":
        """Read a candidate; without ``@PIXELS`` it runs at ``image_size``.

        Raises:
            TypeError, ValueError: for a name timm does not know, an unknown form, or a size out of range.
        """
        match = re.fullmatch(r"([^@+]+)(?:@(\d+))?((?:\+\w+)*)", text)
        if match is None:
            raise ValueError(f"models must look like NAME[@PIXELS][+FORM...], got {text!r}")
        name, size, forms = match[1], int(match[2] or image_size), tuple(match[3].split("+")[1:])
        if not timm.is_model(name):
            raise ValueError(f"models must be timm models, got {name}")
        check_count("image_size", size, least=32)
        for form in forms:
            if form not in FORMS:
                raise ValueError(f"the form of a model must be one of {', '.join(FORMS)}, got {form!r} in {text!r}")
            if form in ("inference", "global") and not timm.model_entrypoint(name).__module__.startswith("dgt."):
                raise ValueError(f"the form {form!r} is one of DGT models, got {text!r}")
        return cls(text, name, size, forms)

    def build(self, device: str = "cpu", training: bool = False) -> nn.Module:
        """Create the model in its form, with random weights of seed 0, in training or evaluation mode.

        Raises:
            ValueError: for a form that does not go with the mode.
        """
        wrong = "inference" if training else "checkpointing"
        if wrong in self.forms:
            raise ValueError(
                f"the form {wrong!r} is not one for {'training' if training else 'inference'}: {self.text}"
            )
        options: dict[str, Any] = {}
        if timm.get_pretrained_cfg_value(self.name, "fixed_input_size"):
            options["img_size"] = self.size
        if "global" in self.forms:
            options["attention"] = ("global",) * 4
        torch.manual_seed(0)
        model: Any = timm.create_model(self.name, **options).to(device)
        if "checkpointing" in self.forms:
            model.set_grad_checkpointing()
        if "inference" in self.forms:
            return optimize_for_inference(model)
        return model.train(training)

    def step(
        self, batch_size: int, device: str = "cpu", training: bool = False, compiled: bool = False
    ) -> Callable[[], None]:
        """Return what is timed: one inference, or one training step (forward, backward, AdamW), on random images."""
        model = self.build(device, training)
        run: Any = torch.compile(model) if compiled else model
        images = torch.randn(batch_size, 3, self.size, self.size, device=device)
        if not training:
            return torch.inference_mode()(lambda: run(images))
        labels = torch.arange(batch_size, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def train() -> None:
            optimizer.zero_grad()
            F.cross_entropy(run(images), labels).backward()
            optimizer.step()

        return train
