"""What `dgt.accelerate` promises, on images that it has not seen: the bound of their error together, and
the errors of single ones, in many draws of inputs.

    python benchmarks/error_bound_campaign.py --weights dinov2_small.safetensors \
        --photographs camvid=CAMVID/images imagenette-train=IMAGENETTE/train \
        --sizes 518 1036 --errors 0.05 0.1 --draws 12 --out single_errors_campaign.json

The weights of DINOv2-S are those of `accelerate_dinov2.py`. A campaign has several cases, each a
size and a set of photographs, from which a pool is taken evenly. A draw takes a dozen inputs of the
pool for a search, and tests what it chose on all others.

Draws share what does not depend on them. Errors of settings and how far they reach are measured
once per case, on photographs outside of the pool. The number of products stands for the time: so
draws do not depend on the machine, and below 518 px, where images are cheap, they are grouped as
large ones are. With fewer settings and a coarser price than usual, draws often come to the same
choices, whose errors are measured once per photograph. Choosing, confirming and the guard are
`dgt.accelerate`'s own.

Draws of a case share its pool, so they are not independent of each other. A draw in which no groups
were within the error has a row, but says nothing about the bound. Whatever is measured is kept in
`--kept`, image by image: the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
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
from accelerate_dinov2 import find_photographs, open_model, read_photograph, tokens_before
from timm.models import VisionTransformer
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
    install,
    intercept,
    measure,
    pipeline,
)
from dgt.acceleration.bound import relative_error, squares_between
from dgt.acceleration.calls import Call
from dgt.acceleration.confirm import Trial, with_allowance
from dgt.acceleration.grouped import install_sites, take_counts
from dgt.acceleration.intercept import uninstall_processors
from dgt.acceleration.measure import measure_model
from dgt.acceleration.search import Search, read_search
from dgt.acceleration.sensitivity import measure_sensitivity
from dgt.acceleration.settings import GROUP_COST
from dgt.utils.records import write_record
from dgt_command.measures import machine

INPUTS = 12  # of a draw
SHARES = (0.05, 0.1, 0.2, 0.4)  # of pairs
BISECTIONS = 8  # of the price
POOL = 52  # photographs of a case: a draw's inputs, and what tests it
APART = 12  # photographs outside of it that settings are measured on
LARGE = 518  # pixels: smaller images are grouped as large ones are, to first order
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


class Measured(NamedTuple):
    """A photograph with a choice of settings, before any guard acts."""

    squares: list[float]
    """As :func:`squares_between`."""
    estimates: dict[str, float]
    """Of its error, by the guards of call sites."""


class Pool:
    """A case's model and photographs, and what was measured so far.

    Args:
        case: which it is.
        model: opened for it.
        folder: of its photographs.
        error: the least that will be asked for.
        kept: folder of what is measured.
    """

    def __init__(
        self, case: Case, model: VisionTransformer, folder: Path, error: float, kept: Path
    ) -> None:
        self.case = case
        self.model = model
        self.kept = kept / f"{case.photographs}-{case.size}"
        self.kept.mkdir(parents=True, exist_ok=True)
        paths = find_photographs(folder, POOL + APART)
        self.apart = paths[:: len(paths) // APART][:APART]
        self.paths = [path for path in paths if path not in self.apart]
        self.clock = Clock()
        self.known: dict[tuple[str, str], Measured] = {}
        """By the choice and the photograph's name."""
        self.known_file = self.kept / "photographs.jsonl"
        if self.known_file.exists():
            for line in self.known_file.read_text(encoding="utf-8").splitlines():
                choice, name, *values = json.loads(line)
                self.known[choice, name] = Measured(*values)
        sites = self.kept / "sites.pt"
        if not sites.exists():
            with counted_products(self.clock, always_first_order=case.size < LARGE):
                torch.save(self.measure(error), sites)
        self.sites: list[AttentionSite] = torch.load(sites, weights_only=False)

    def run(self, model: Any, item: Tensor) -> Tensor:
        """The output whose error counts."""
        self.clock.now += REST
        output: Tensor = model.forward_features(item)
        return output

    def measure(self, error: float) -> list[AttentionSite]:
        """The call sites, with what settings cost on the photographs that are apart."""
        images = torch.cat([read_photograph(path, self.case.size) for path in self.apart])
        search = read_search(self.model, images, error, forward=self.run)
        measure_model(search)
        measure_sensitivity(search)
        return search.sites

    def squares_now(self, path: Path) -> Tensor:
        """The error of the model as it is now for a photograph."""
        image = read_photograph(path, self.case.size)
        before = tokens_before(self.model, image, self.kept / f"{path.stem}.pt")
        return squares_between([self.run(self.model, image)], [before])

    def without_guard(self, path: Path, sites: Sequence[AttentionSite]) -> Measured:
        """What the model shows for a photograph with these call sites, whatever they allow; measured once."""
        choice = str([(site.title, replace(site.setting, allowed_error=None)) for site in sites])
        if (choice, path.stem) not in self.known:
            install_sites(self.model, [with_allowance(site, math.inf) for site in sites])
            squares = self.squares_now(path).tolist()
            estimates = {
                title: counts.largest_error for title, counts in take_counts(self.model).items()
            }
            self.known[choice, path.stem] = Measured(squares, estimates)
            with self.known_file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([choice, path.stem, squares, estimates]) + "\n")
        return self.known[choice, path.stem]

    def try_photograph(self, path: Path, sites: Sequence[AttentionSite]) -> Trial:
        """What the model with these call sites shows for a photograph, with the guards as they allow."""
        measured = self.without_guard(path, sites)
        allowed = {site.title: site.setting.allowed_error or math.inf for site in sites}
        squares = torch.tensor(measured.squares, dtype=torch.float64)
        counts = {
            title: GuardCounts(checked=1, largest_error=estimate)
            for title, estimate in measured.estimates.items()
        }
        if any(estimate > allowed[title] for title, estimate in measured.estimates.items()):
            install_sites(self.model, sites)
            take_counts(self.model)
            squares = self.squares_now(path)
            counts = take_counts(self.model)
        return Trial(squares, torch.ones(1), None, counts)


class Draw:
    """A search by a dozen photographs of a pool, and the test of what it chose by the others.

    Args:
        pool: of the case.
        number: of the draw, which says what photographs it takes.
        error: asked for.
    """

    def __init__(self, pool: Pool, number: int, error: float) -> None:
        self.pool = pool
        self.number = number
        self.error = error
        self.sites: list[AttentionSite] = []
        mixed = random.Random(f"{pool.case} {number}").sample(pool.paths, len(pool.paths))
        self.inputs = mixed[:INPUTS]
        self.others = mixed[INPUTS:]

    def measure_model(self, search: Search) -> None:
        """Set what is known of the case in a search."""
        search.sites = [copy.copy(site) for site in self.pool.sites]
        search.speedup_limit = math.inf

    def install_sites(self, _: nn.Module, sites: Sequence[AttentionSite]) -> None:
        """Remember what is installed: it is measured only where that is not known yet."""
        self.sites = list(sites)

    def run_input(self, search: Search, number: int, *_: str) -> Trial:
        """A trial of an input of the search."""
        return self.pool.try_photograph(self.inputs[int(search.items[number])], self.sites)

    def search(self) -> dgt.acceleration.Report:
        """`dgt.accelerate` for the inputs, which are given by their numbers."""
        with contextlib.ExitStack() as patches:
            patches.enter_context(patch.object(choose, "BISECTIONS", BISECTIONS))
            patches.enter_context(patch.object(pipeline, "measure_model", self.measure_model))
            patches.enter_context(patch.object(install, "measure_sensitivity", lambda *_: None))
            patches.enter_context(patch.object(confirm, "install_sites", self.install_sites))
            patches.enter_context(patch.object(confirm, "run_input", self.run_input))
            patches.enter_context(patch.object(install, "time_choice", always_faster))
            numbers = torch.arange(INPUTS)[:, None]
            return dgt.accelerate(self.pool.model, numbers, self.error, forward=self.pool.run)

    def measure(self) -> dict[str, Any]:
        """A row: what the report promises, and the errors of photographs that it has not seen."""
        report = self.search()
        trials = {}
        alone = {}
        if in_groups(report.layers):
            for path in self.others:
                trials[path.stem] = self.pool.try_photograph(path, report.layers)
                if any(count.acted for count in trials[path.stem].counts.values()):
                    squares = self.pool.without_guard(path, report.layers).squares
                    alone[path.stem] = (squares[0] / squares[1]) ** 0.5
        uninstall_processors(self.pool.model)
        together = torch.stack([trial.squares for trial in trials.values()] or [torch.zeros(2)])
        return {
            **self.pool.case._asdict(),
            "number": self.number,
            "asked_error": self.error,
            "inputs": INPUTS,
            "layers_in_groups": in_groups(report.layers),
            "layers": len(report.layers),
            "products": products_of(report.layers),
            "predicted": report.predicted_error,
            "held_out": report.measured_error,
            "bound": report.error_bound,
            "single_error_95": report.single_error_95,
            "single_error_999": report.single_error_999,
            "guard_acted": report.guard_acted,
            "unseen_error": relative_error(together),
            "unseen": {
                name: round(relative_error(trial.squares[None]), 6)
                for name, trial in trials.items()
            },
            "unseen_without_guard": alone,
        }


def in_groups(sites: Sequence[AttentionSite]) -> int:
    """How many call sites are in groups."""
    return sum(site.setting.choice == "groups" for site in sites)


def products_of(sites: Sequence[AttentionSite]) -> float:
    """The products of all attention over those of dense attention."""
    dense = [site.heads * site.tokens * site.key_tokens for site in sites]
    taken = [
        site.heads * pairs_of(site, site.setting) if in_groups([site]) else pairs
        for site, pairs in zip(sites, dense, strict=True)
    ]
    return sum(taken) / sum(dense)


def always_faster(*_: Any) -> Any:
    """The times of a model that is twice as fast."""
    before = SimpleNamespace(model_ms=2.0, attention_ms=1.0, site_ms=defaultdict(lambda: 1.0))
    after = SimpleNamespace(model_ms=1.0, attention_ms=0.5, site_ms=defaultdict(lambda: 0.5))
    return before, after


@torch.no_grad()
def measure_case(
    case: Case, folder: Path, options: argparse.Namespace, rows: list[dict[str, Any]]
) -> None:
    """Add the draws of a case that are still needed, and write all rows after each."""
    own = [row for row in rows if case._asdict().items() <= row.items()]
    done = {(row["number"], row["asked_error"]) for row in own}
    wanted = [(number, error) for number in range(options.draws) for error in options.errors]
    missing = [draw for draw in wanted if draw not in done]
    if not missing:
        return
    model = open_model(options.weights, case.size)
    pool = Pool(case, model, folder, min(options.errors), options.kept)
    for number, error in missing:
        row = Draw(pool, number, error).measure()
        rows.append(row)
        shown = {name: value for name, value in row.items() if name != "unseen"}
        print(json.dumps(shown), max(row["unseen"].values(), default=0.0), flush=True)
        write_record(options.out, {**machine(), "rows": rows})


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
    parser.add_argument("--sizes", type=int, nargs="+", default=[518, 1036])
    parser.add_argument("--errors", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--draws", type=int, default=12, help="of every case and error")
    parser.add_argument("--out", type=Path, default=Path("single_errors_campaign.json"))
    runs = Path("runs/error_bound_campaign")
    parser.add_argument("--kept", type=Path, default=runs, help="folder of what is measured")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Make the draws of every case that are not in the file yet, small sizes first."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    for size in options.sizes:
        for name, folder in options.photographs:
            measure_case(Case(MODEL, size, name), folder, options, rows)


if __name__ == "__main__":
    main()
