"""Fine-tune a DGT with Lightning: `pip install 'lightning>=2.6.4'`.

    python examples/lightning_module.py [--epochs N] [--images N]

Nothing of `dgt` is called: centroids are found in the first batch and move after each step of the
optimizer, on every device alike.
"""

import argparse

import lightning
import timm
import torch
import torch.nn.functional as F
from plain_loop import Classified
from torch.utils.data import DataLoader

import dgt  # noqa: F401  # registers its models with timm
from dgt.data.scenes import KINDS

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(lightning.LightningModule):
    """Any classifier of timm, trained by cross entropy."""

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, pretrained=True, num_classes=num_classes)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        pixels, labels = batch
        loss = F.cross_entropy(self.model(pixels), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        """Log the share of right answers."""
        pixels, labels = batch
        self.log("top1", (self.model(pixels).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Decay as timm does: no biases, no norms."""
        return timm.optim.create_optimizer_v2(self.model, "adamw", lr=1e-3, weight_decay=0.05)


def train(epochs: int, images: int, **options: object) -> tuple[torch.nn.Module, float]:
    """Train, and return the model with its top-1 accuracy on held-out scenes.

    Options are those of Lightning's trainer.
    """
    classifier = Classifier("dgt_nano.imagenette", len(KINDS))
    trainer = lightning.Trainer(max_epochs=epochs, gradient_clip_val=1.0, **options)
    held_out = Classified("val", max(32, images // 4))
    trainer.fit(
        classifier,
        DataLoader(Classified("train", images), batch_size=32, shuffle=True),
        DataLoader(held_out, batch_size=32),
    )
    return classifier.model, float(trainer.callback_metrics["top1"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2048)
    arguments = parser.parse_args()
    _, accuracy = train(arguments.epochs, arguments.images)
    print(f"top-1 {100 * accuracy:.1f} %")
