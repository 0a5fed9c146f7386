"""Centroids move once per optimizer step in the loops that people use, whatever happens between two steps."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from timm.utils.model import freeze
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dgt

STEPS, BATCH, CLASSES = 3, 4, 3


class Network(nn.Module):
    """An attention with its residual and a classifier, as every loop here trains it."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.attention = dgt.DGAttention(16, 2, num_groups=5, top_k=6)
        self.head = nn.Linear(16, CLASSES)
        self.recomputes = recomputes

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of (B, H, W, C) tokens and (B,) labels by name, as transformers does."""
        if self.recomputes and self.training:
            attended = checkpoint(self.attention, x, use_reentrant=False)
        else:
            attended = self.attention(x)
        return {"loss": F.cross_entropy(self.head((x + attended).mean((1, 2))), labels)}


class LightningNetwork(lightning.LightningModule):
    """The network as Lightning trains it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return self.network(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.network.parameters(), lr=0.1)


def make_data(steps: int, micro_batches: int = 1) -> TensorDataset:
    """Tokens and labels for some steps."""
    count = steps * BATCH * micro_batches
    tokens = torch.randn(count, 6, 5, 16, generator=torch.Generator().manual_seed(1)) + 0.3
    return TensorDataset(tokens, torch.arange(count) % CLASSES)


def train_plainly(network: Network, micro_batches: int) -> None:
    """A plain loop."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loader = DataLoader(make_data(STEPS, micro_batches), BATCH)
    for i, batch in enumerate(loader):
        (network(*batch)["loss"] / micro_batches).backward()
        if (i + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def train_with_fabric(network: Network, micro_batches: int) -> None:
    """A loop of Lightning Fabric."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loader = DataLoader(make_data(STEPS, micro_batches), BATCH)
    for i, batch in enumerate(loader):
        fabric.backward(model(*batch)["loss"] / micro_batches)
        if (i + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def train_with_lightning(network: Network, micro_batches: int) -> None:
    """Lightning's loop, which makes forward and backward inside of the optimizer's step."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=micro_batches, **quiet
    )
    loader = DataLoader(make_data(STEPS, micro_batches), BATCH)
    trainer.fit(LightningNetwork(network), loader)


LOOPS = {
    "plain": train_plainly,
    "Fabric": train_with_fabric,
    "Lightning": train_with_lightning,
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_updates_are_steps(loop, micro_batches, recomputes) -> None:
    """Each loop gives the centroids of the plain one."""
    plain, network = Network(), Network(recomputes)
    train_plainly(plain, micro_batches)
    LOOPS[loop](network, micro_batches)
    assert network.attention.num_updates == STEPS
    torch.testing.assert_close(
        network.attention.centroids, plain.attention.centroids, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_updates_are_steps_of_the_trainer_of_transformers(micro_batches, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"x": x, "labels": label} for x, label in make_data(STEPS, micro_batches)]
    network = Network()
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=micro_batches,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(network, settings, train_dataset=data).train()
    assert network.attention.num_updates == STEPS


@pytest.mark.parametrize("how", ["timm", "eval"])
def test_a_frozen_stage_holds_still(how) -> None:
    """Its weights, centroids and running statistics, while the other stages learn."""
    torch.manual_seed(0)
    model = dgt.DynamicGroupTransformer(
        num_classes=CLASSES,
        stem_width=8,
        dims=(16, 32),
        depths=(1, 1),
        num_heads=(1, 2),
        num_groups=4,
        top_k=8,
        head_width=32,
        parts=dgt.models.compared.ComparedParts(attention=("group",) * 2, extents=(0, 0)),
    ).train()
    if how == "eval":
        model.stages[0].eval().requires_grad_(False)
    else:
        freeze(model, "stages.0")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
        optimizer.step()
    after = model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert not [name for name in changed if name.startswith("stages.0.")]
    assert "stages.1.blocks.0.attn.centroids" in changed
