"""Whether `report.error_bound` holds: many draws of inputs with which `dgt.accelerate` confirms a
choice, and as many photographs that it has not seen.

    python benchmarks/error_bound_campaign.py --weights dinov2_small.safetensors \
        --photographs coco=COCO/val2017 imagenette=IMAGENETTE/val \
        --out error_bound_campaign.json

The weights of DINOv2-S are those of `accelerate_dinov2.py`. A campaign has several cases, each a
size and a set of photographs, from which a pool is taken evenly. A draw takes inputs and as many
others from the pool, and a target error.

Draws share what does not depend on them. Errors of settings and how far they reach are measured
once per case, on four photographs outside of the pool. The number of products stands for the time:
so draws do not depend on the machine, and small images, which are cheap, are grouped as large ones
are. With fewer settings and a coarser price than usual, draws come to the same choices, whose
outputs are computed once per photograph. Choosing, running and confirming is `dgt.accelerate`'s own.

Draws of a case share its pool, so they are not independent of each other. A draw in which no groups
were within the error has a row, but says nothing about the bound. Rows are written as they are done
and are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import operator
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.utils.benchmark
from accelerate_dinov2 import find_photographs, open_model, read_photograph
from torch import Tensor, nn

import dgt
from dgt.acceleration import (
    AttentionSite,
    GuardCounts,
    Setting,
    calls,
    choose,
    confirm,
    grouped,
    intercept,
    measure,
    pipeline,
)
from dgt.acceleration.bound import relative_error, squares_between
from dgt.acceleration.calls import Call
from dgt.acceleration.confirm import measure_sensitivity
from dgt.acceleration.grouped import GroupedAttention, take_counts
from dgt.acceleration.intercept import installed_processors, uninstall_processors
from dgt.acceleration.measure import measure_model
from dgt.acceleration.search import Search, read_search
from dgt.acceleration.settings import GROUP_COST
from dgt.utils.atomic_write import write_json
from dgt_command.measures import machine

SIZES = {"coco": (224, 336), "imagenette": (224, 336)}  # in pixels
COUNTS = (12,)  # of inputs
ERRORS = (0.05, 0.1, 0.2)
SHARES = (0.05, 0.1, 0.2, 0.4)  # of pairs
BISECTIONS = 6  # of the price
POOL = 36  # photographs of a case
APART = 4  # photographs outside of it that settings are measured on
PAIRS = 1e9  # of a query and a key in a second, by the clock
REST = 1e-5  # seconds of a model without its attention, by the clock
MODEL = "DINOv2-S"


class Clock:
    """Seconds that pass only with work that is counted, and a little whenever they are read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


def pairs_of(site: AttentionSite, setting: Setting) -> float:
    """What a head of a call costs with a setting, in pairs of a query and a key."""
    tokens, keys = site.tokens, site.key_tokens
    if setting.choice == "exact":
        return tokens * keys
    listed = setting.keys + 2 * setting.residual_keys
    return GROUP_COST * setting.groups * keys + tokens * (site.num_prefix_tokens + listed)


@contextlib.contextmanager
def counted_products(clock: Clock, always_first_order: bool = False) -> Iterator[None]:
    """A context in which time is the time of counted products; if asked for, every length is to first order."""
    read = calls.read_call
    compute = grouped.compute_call

    def read_counted(*arguments: Any, **options: Any) -> Call:
        call = read(*arguments, **options)

        def run() -> Any:
            clock.now += call.query.shape[2] * call.key.shape[2] / PAIRS
            return call.run()

        return call._replace(run=run)

    def compute_counted(call: Call, site: AttentionSite, setting: Setting) -> Tensor:
        clock.now += pairs_of(site, setting) / PAIRS
        return compute(call, site, setting)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(torch.utils.benchmark, "timer", clock))
        for module in (calls, intercept, measure):
            patches.enter_context(patch.object(module, "read_call", read_counted))
        for module in (grouped, measure):
            patches.enter_context(patch.object(module, "compute_call", compute_counted))
        patches.enter_context(patch.object(measure, "LONG", 0.0))  # nothing is timed twice
        patches.enter_context(patch.object(measure, "SHARES", SHARES))
        if always_first_order:
            patches.enter_context(patch.object(measure, "FIRST_ORDER_TRIED", 0))
            patches.enter_context(patch.object(measure, "FIRST_ORDER_ADDED", 0))
        patches.enter_context(patch.object(measure, "add_between", lambda _: None))
        yield


class Case(NamedTuple):
    """A model, a size, and photographs."""

    model: str
    size: int
    photographs: str


class Pool:
    """A case's model and photographs, and the outputs that were computed so far.

    Args:
        case: which it is.
        model: opened for it.
        folder: of its photographs.
    """

    def __init__(self, case: Case, model: nn.Module, folder: Path) -> None:
        self.case = case
        self.model = model
        paths = find_photographs(folder, POOL + APART)
        images = [read_photograph(path, case.size) for path in paths]
        self.apart = images[:: len(images) // APART][:APART]
        chosen = {id(image) for image in self.apart}
        self.images = [image for image in images if id(image) not in chosen][:POOL]
        self.clock = Clock()
        self.originals: dict[int, Tensor] = {}
        self.outputs: dict[tuple[str, int], tuple[Tensor, list[GuardCounts]]] = {}
        with counted_products(self.clock, always_first_order=True):
            self.sites = self.measure()

    def run(self, model: Any, item: Tensor) -> Tensor:
        """The output whose error counts."""
        self.clock.now += REST
        output: Tensor = model.forward_features(item)
        return output

    def measure(self) -> list[AttentionSite]:
        """The call sites, with what settings cost on the photographs that are apart."""
        search = read_search(
            self.model, torch.cat(self.apart), 0.1, self.run, None, None, True, True
        )
        measure_model(search)
        measure_sensitivity(search)
        return search.sites

    def run_once(self, model: Any, item: Tensor) -> Tensor:
        """The output of the model as it is now for a photograph of the pool, computed once for every
        choice of settings with which no guard acts.
        """
        number = next(at for at, image in enumerate(self.images) if image.equal(item))
        processors = installed_processors(model)
        grouped = [part for part in processors.values() if isinstance(part, GroupedAttention)]
        if all(part.num_exact > 0 for part in grouped):
            if number not in self.originals:
                self.originals[number] = self.run(model, item)
            return self.originals[number]
        sites = [(part, site) for part in grouped for site in part.sites.values()]
        choice = str([replace(site.setting, allowed_error=None) for _, site in sites])
        output, counts = self.outputs.get((choice, number), (None, []))
        allowed = [site.setting.allowed_error or math.inf for _, site in sites]
        errors = [count.largest_error for count in counts]
        if output is None or any(map(operator.gt, errors, allowed)):
            output, counts = self.run_alone(model, item, sites)
        if not any(count.acted for count in counts):
            self.outputs[choice, number] = (output, counts)
        for (part, site), count in zip(sites, counts, strict=True):
            part.counts.setdefault(site.call, GuardCounts()).add(count)
        return output

    def run_alone(
        self, model: Any, item: Tensor, sites: Sequence[tuple[GroupedAttention, AttentionSite]]
    ) -> tuple[Tensor, list[GuardCounts]]:
        """The output, and what the guards of these call sites estimated and did meanwhile."""
        before = [part.counts for part, _ in sites]
        for part, _ in sites:
            part.counts = {}
        output = self.run(model, item)
        counts = [part.counts.get(site.call, GuardCounts()) for part, site in sites]
        for (part, _), earlier in zip(sites, before, strict=True):
            part.counts = earlier
        return output, counts

    def measure_draw(self, search: Search) -> None:
        """Set what is known of the case in a search, with the outputs for the inputs of a draw."""
        search.sites = [copy.copy(site) for site in self.sites]
        search.outputs = [[self.run_once(self.model, item)] for item in search.items]
        search.paddings = [{} for _ in search.items]


def always_faster(*_: Any) -> Any:
    """The times of a model that is twice as fast."""
    before = SimpleNamespace(ms=2.0, attention_ms=1.0, site_ms=defaultdict(lambda: 1.0))
    after = SimpleNamespace(ms=1.0, attention_ms=0.5, site_ms=defaultdict(lambda: 0.5))
    return before, after


@torch.no_grad()
def measure_draw(pool: Pool, number: int) -> dict[str, Any]:
    """A row: what the report promises, and the error on as many photographs it has not seen."""
    chance = random.Random(f"{pool.case} {number}")
    count = chance.choice(COUNTS)
    error = chance.choice(ERRORS)
    images = chance.sample(pool.images, 2 * count)
    model = pool.model
    with (
        patch.object(choose, "BISECTIONS", BISECTIONS),
        patch.object(pipeline, "measure_model", pool.measure_draw),
        patch.object(confirm, "measure_sensitivity", lambda *_: None),
        patch.object(confirm, "time_choice", always_faster),
    ):
        inputs = torch.cat(images[:count])
        report = dgt.accelerate(model, inputs, error, forward=pool.run_once)
    squares = []
    take_counts(model)
    for image in images[count:]:
        after = pool.run_once(model, image)
        with dgt.exact_attention(model):
            squares.append(squares_between([after], [pool.run_once(model, image)]))
    together = torch.stack(squares)
    acted = sum(done.acted for done in take_counts(model).values())
    uninstall_processors(model)
    return {
        **pool.case._asdict(),
        "number": number,
        "inputs": count,
        "asked_error": error,
        "layers_in_groups": sum(layer.setting.choice == "groups" for layer in report.layers),
        "layers": len(report.layers),
        "predicted": report.predicted_error,
        "held_out": report.measured_error,
        "bound": report.error_bound,
        "guard_acted": report.guard_acted,
        "unseen_error": relative_error(together),
        "unseen_most": float((together[:, 0] / together[:, 1]).sqrt().max()),
        "unseen_guard_acted": acted,
    }


def cases_of(options: argparse.Namespace) -> dict[Case, Path]:
    """The cases of a campaign, and the folders of their photographs."""
    return {
        Case(MODEL, size, name): folder
        for name, folder in options.photographs
        for size in options.sizes or SIZES.get(name, (224,))
    }


@torch.no_grad()
def measure_case(
    case: Case, folder: Path, options: argparse.Namespace, rows: list[dict[str, Any]]
) -> None:
    """Add the draws of a case that are still needed, and write all rows after each."""
    own = [row for row in rows if case._asdict().items() <= row.items()]
    done = {row["number"] for row in own}
    needed = options.draws - sum(map(has_groups, own))
    missing = [number for number in range(options.most) if number not in done]
    if needed <= 0 or not missing:
        return
    pool = Pool(case, open_model(options.weights, case.size), folder)
    for number in missing:
        row = measure_draw(pool, number)
        rows.append(row)
        print(json.dumps(row), len(pool.outputs), flush=True)
        write_json(options.out, {**machine(), "rows": rows})
        needed -= has_groups(row)
        if needed == 0:
            return


def has_groups(row: dict[str, Any]) -> bool:
    """Whether a draw says something about the bound: it has layers in groups."""
    return bool(row["layers_in_groups"] > 0)


def named_folder(text: str) -> tuple[str, Path]:
    """The type of an argument NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not folder:
        raise argparse.ArgumentTypeError(f"must look like NAME=FOLDER, got {text!r}")
    return name, Path(folder)


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="of DINOv2-S")
    parser.add_argument(
        "--photographs", type=named_folder, nargs="+", required=True, metavar="NAME=FOLDER"
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="in place of those of the set")
    parser.add_argument("--draws", type=int, default=50, help="with groups, of every case")
    parser.add_argument("--most", type=int, default=75, help="draws of a case at most")
    parser.add_argument("--out", type=Path, default=Path("error_bound_campaign.json"))
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Make draws in every case until enough of them have groups."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    for case, folder in cases_of(options).items():
        measure_case(case, folder, options, rows)


if __name__ == "__main__":
    main()
