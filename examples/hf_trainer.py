"""Fine-tune a DGT with the Trainer of transformers: `pip install '.[transformers]' 'accelerate>=1.1'`.

    python examples/hf_trainer.py [--epochs N] [--images N] [--out DIR]

transformers opens the folder of a DGT classifier by its own name; nothing of `dgt` is called, and
centroids move after each step of the optimizer. The folder that it saves is opened by transformers,
by timm and by every command of `dgt`.
"""

import argparse

import torch
from plain_loop import Classified
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

import dgt  # noqa: F401  # registers its models with timm
from dgt.data.scenes import KINDS
from dgt.weights import find_weights


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """A batch as models of transformers take it."""
    pixels, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(labels)}


def top1(evaluated: EvalPrediction) -> dict[str, float]:
    """The share of right answers."""
    right = evaluated.predictions.argmax(-1) == evaluated.label_ids
    return {"top1": float(right.mean())}


def train(epochs: int, images: int, out: str) -> tuple[torch.nn.Module, float]:
    """Train, save the model in `out`, and return it with its top-1 accuracy on held-out scenes."""
    model = AutoModelForImageClassification.from_pretrained(
        find_weights("dgt_nano.imagenette"),
        num_labels=len(KINDS),
        ignore_mismatched_sizes=True,  # it knows ten classes of photographs
    )
    model.config.label_names = list(KINDS)  # in the saved folder; the ten others stay without it
    arguments = TrainingArguments(
        output_dir=out,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        weight_decay=0.05,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=Classified("train", images),
        eval_dataset=Classified("val", max(32, images // 4)),
        compute_metrics=top1,
    )
    trainer.train()
    trainer.save_model(out)
    return model, float(trainer.evaluate()["eval_top1"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--out", default="runs/hf_trainer")
    options = parser.parse_args()
    _, accuracy = train(options.epochs, options.images, options.out)
    print(f"top-1 {100 * accuracy:.1f} %")
