"""Fine-tune a DGT in a plain PyTorch loop; with the package alone.

    python examples/plain_loop.py [--epochs N] [--images N]

Nothing of `dgt` is called in the loop: centroids are found in the first batch and move after each
step of the optimizer. Images are the built-in scenes; a `torchvision.datasets.ImageFolder` takes
their place.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import normalize

import dgt  # noqa: F401  # registers its models with timm
from dgt.data.scenes import KINDS, Scenes


class Classified(Dataset):
    """Scenes as (image, label): float32 (3, 128, 128), normalized as the model was trained; the
    number of a kind.
    """

    def __init__(self, split: str, length: int) -> None:
        self.scenes = Scenes(split, length, image_size=128)

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        scene = self.scenes[index]
        return normalize(
            scene.image / 255, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
        ), scene.label


def train(epochs: int, images: int) -> tuple[torch.nn.Module, float]:
    """Train, and return the model with its top-1 accuracy on held-out scenes."""
    model = timm.create_model("dgt_nano.imagenette", pretrained=True, num_classes=len(KINDS))
    # as timm decays: no biases, no norms
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    batches = DataLoader(Classified("train", images), batch_size=32, shuffle=True)
    for epoch in range(epochs):
        model.train()
        for pixels, labels in batches:
            loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
    model.eval()
    right = 0
    held_out = Classified("val", max(32, images // 4))
    with torch.inference_mode():
        for pixels, labels in DataLoader(held_out, batch_size=32):
            right += int((model(pixels).argmax(1) == labels).sum())
    return model, right / len(held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2048)
    options = parser.parse_args()
    _, accuracy = train(options.epochs, options.images)
    print(f"top-1 {100 * accuracy:.1f} %")
