"""How far the errors of single call sites reach: how much of them the model's output has."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dgt.acceleration.bound import relative_error, squares_between
from dgt.acceleration.calls import Call
from dgt.acceleration.choose import has_groups, usable
from dgt.acceleration.grouped import processors_of
from dgt.acceleration.guard import attend_densely
from dgt.acceleration.inputs import outputs_of
from dgt.acceleration.intercept import trace_sdpa
from dgt.acceleration.measure import NEGLIGIBLE
from dgt.acceleration.search import Search, probed_inputs
from dgt.acceleration.sites import AttentionSite, chosen

SAMPLED_QUERIES = 256  # of a head, that errors of probed calls are measured on


def measure_sensitivity(search: Search) -> None:
    """Measure, in a few runs, how much of each call site's error reaches the model's output.

    In each, some neighboring call sites are in groups; these get the same sensitivity, the output's
    error over theirs. All others are computed in the fastest way whose errors are small beside these.
    Inputs amplify errors differently, and mostly those of all layers alike: so all call sites are
    probed on the same inputs, whose squared errors count together.
    """
    sites = [site for site in search.sites if has_groups(site)]
    numbers, chunks = probed_inputs(len(search.items))
    chunks = min(chunks, len(sites))
    for at in range(chunks):
        chunk = sites[at * len(sites) // chunks : (at + 1) * len(sites) // chunks]
        ratios = [reach_of(search, chunk, number) for number in numbers]
        known = [ratio**2 for ratio in ratios if ratio is not None]
        if known:
            for site in chunk:
                site.sensitivity = math.sqrt(sum(known) / len(known))


def reach_of(search: Search, chunk: Sequence[AttentionSite], number: int) -> float | None:
    """The error of the model's output for one input over that of some neighboring call sites; None
    where these have none.
    """
    search.progress.step("error propagation", chunk[0].title)
    probing = Probe(
        [
            probed(site, search.error) if site in chunk else nearly_exact(site, search.error)
            for site in search.sites
        ],
        chunk,
    )
    with trace_sdpa(search.model, probing.answer):
        outputs = outputs_of(search.run(search.items[number]))
    error = relative_error(squares_between(outputs, search.outputs[number])[None])
    return error / probing.error if probing.error else None


def probed(site: AttentionSite, error: float) -> AttentionSite:
    """A call site with the grouped setting whose error is closest to the requested one."""
    grouped = [found for setting, found in usable(site).items() if setting.choice == "groups"]
    return chosen(site, min(grouped, key=lambda found: abs(found.error - error)))


def nearly_exact(site: AttentionSite, error: float) -> AttentionSite:
    """A call site with its fastest setting whose error is a small part of the requested one."""
    small = [found for found in usable(site).values() if found.error < NEGLIGIBLE * error]
    return chosen(site, min(small, key=lambda found: found.ratio)) if small else site


class Probe:
    """Computes call sites of a model in groups, and accumulates the errors of some.

    Args:
        sites: all call sites of the model.
        counted: those whose errors count.
    """

    def __init__(self, sites: Sequence[AttentionSite], counted: Sequence[AttentionSite]) -> None:
        self.processors = processors_of(sites)
        self.counted = {site.name for site in counted}
        self.squares: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros(2, dtype=torch.float64, device="cpu")
        )

    @property
    def error(self) -> float:
        """The root of the sum of the squared relative errors of the call sites."""
        return sum(relative_error(squares[None]) ** 2 for squares in self.squares.values()) ** 0.5

    def answer(self, name: str, _: int, call: Call) -> Tensor | None:
        """Compute a call, or leave it to the model."""
        output = None
        if name in self.processors:
            output = self.processors[name].process(call)
        if output is not None and name in self.counted:
            sampled = slice(None, None, math.ceil(call.query.shape[2] / SAMPLED_QUERIES))
            exact = attend_densely(call._replace(query=call.query[:, :, sampled]))
            rows = output.reshape(call.query.shape)[:, :, sampled]
            self.squares[name] += squares_between([rows.float()], [exact.float()])
        return output
