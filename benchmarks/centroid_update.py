"""The two readings of Eq. 4, trained side by side: accuracy, balance of the groups, worth of the selection.

    python benchmarks/centroid_update.py --data-root CIFAR10 --seeds 3 --out benchmarks/results/centroid_update.json

Trains `dgt_nano` by the recipe `cifar10` on a subset, once per reading and seed, then measures on validation images:
top-1; perplexity of group sizes (G means perfectly balanced; over the whole sample, and image by image); and the share
of global attention's mass that the k selected keys of a query's group hold, against k random keys and the best k.
Rows that are in the output file already are kept, so an interrupted run goes on where it stopped.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgt
from dgt.bench import machine
from dgt.models import visit_blocks
from dgt.ops.diagnosis import attention_mass
from dgt.training import fit, load_recipe, load_run
from dgt.training.recipe import build_data

READINGS: dict[str, dict[str, Any]] = {
    "as printed: tau = 0.1 lr weighs the old centroid": {"tau_weighs": "old"},
    "as described: tau = 0.1 lr weighs the new mean": {"tau_weighs": "new"},
    "tau = 0.05 weighs the new mean": {"tau_weighs": "new", "tau": 0.05},
}


def main() -> None:
    """Train and measure every reading and seed that the output file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/centroid_update.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--train-size", type=int, default=4000)
    parser.add_argument("--val-size", type=int, default=2000)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    done = {(row["reading"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        for reading, settings in READINGS.items():
            if (reading, seed) not in done:
                rows.append({"reading": reading, "seed": seed, **train_and_measure(options, settings, seed)})
                options.out.write_text(
                    json.dumps(
                        {
                            "machine": machine(),
                            "options": vars(options) | {"out": None, "data_root": None},
                            "rows": rows,
                        },
                        indent=1,
                    )
                )
                print(json.dumps(rows[-1]), flush=True)


def train_and_measure(options: argparse.Namespace, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train one model and return its measures."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "data.root": options.data_root,
            "data.train_size": options.train_size,
            "data.val_size": options.val_size,
            "data.num_workers": 0,
            "data.cache": "true",
            "data.batch_size": 64,
            "optimizer.lr_batch": 64,
            "schedule.epochs": options.epochs,
            "schedule.warmup_epochs": 0.5,
            "seed": seed,
            "out": folder,
            "trainer.accelerator": "cpu",
            "ema.decay": "null",
            **{f"model.args.{key}": value for key, value in settings.items()},
        }
        words = [f"--{key}={value}" for key, value in overrides.items()]
        recipe = load_recipe("cifar10", words)
        result = fit(recipe)
        run = load_run(result.folder)
        data = build_data(recipe)
        data.setup("fit")
        images = torch.cat([batch[0] for batch in data.val_dataloader()])[:512]
        return {
            "top1": result.metrics["top1"],
            **measure(run.network, images),
            "seconds": round(time.perf_counter() - start),
        }


@torch.no_grad()
def measure(model: torch.nn.Module, images: Tensor) -> dict[str, Any]:
    """Measure groups and selection of every DG-Attention layer whose k is below its number of tokens."""
    layers: dict[str, tuple[Tensor, ...]] = {}
    generator = torch.Generator().manual_seed(0)
    for name, block, x, _ in visit_blocks(model, images):
        attention = block.attn
        if not isinstance(attention, dgt.DGAttention) or attention.top_k >= x.shape[1] * x.shape[2]:
            continue
        query, key, value = attention.split_heads(block.attention_input(x))
        centroids = attention.unit_centroids()
        seen = dgt.dynamic_group_attention(query, key, value, centroids, attention.top_k, attention.scale)
        random_ids = torch.rand(*seen.key_ids.shape[:3], key.shape[2], generator=generator).argsort(-1)
        random_ids = random_ids[..., : attention.top_k].sort(-1).values
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * attention.scale
        best = scores.softmax(-1).topk(attention.top_k).values.sum(-1)
        layers[name] = (
            attention_mass(query, key, seen.group_ids, seen.key_ids, attention.scale).mean(),
            attention_mass(query, key, seen.group_ids, random_ids, attention.scale).mean(),
            best.mean(),
            perplexity(seen.group_ids.transpose(0, 1).flatten(1), centroids.shape[1]),
            perplexity(seen.group_ids.flatten(0, 1), centroids.shape[1]),
        )
    names = ("mass_selected", "mass_random", "mass_best", "perplexity", "perplexity_per_image")
    table = {layer: dict(zip(names, map(float, values), strict=True)) for layer, values in layers.items()}
    means = {name: sum(row[name] for row in table.values()) / len(table) for name in names}
    return {**means, "layers": table}


def perplexity(ids: Tensor, groups: int) -> Tensor:
    """Mean over rows of exp(entropy) of the group sizes of (rows, N) ids."""
    counts = torch.nn.functional.one_hot(ids, groups).sum(1).double()
    share = counts / counts.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp().mean()


if __name__ == "__main__":
    main()
