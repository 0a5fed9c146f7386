"""The cycle model of the GPU kernels reads machine code whose inlined calls Triton 3.6 does not name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _modules_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules import each other by their plain names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_model"))


def test_callers_are_named_as_long_as_there_is_one() -> None:
    from callers import callers_of

    assert callers_of("find_threshold", "bound_and_place") == ["bound_row", "bound_and_place"]
    assert (
        callers_of("keep_best", "pick_best") == []
    )  # pick_best calls it, and so does list_in_turns
    assert callers_of("pick_all", "pick_all") == []


def test_functions_around_a_line() -> None:
    from sass import functions_around

    path = ROOT / "src" / "dgt" / "ops" / "triton" / "search.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    inside = 1 + next(
        nth for nth, text in enumerate(lines) if "while (most > count) & (step" in text
    )
    found = functions_around(str(path), inside, "bound_and_place")
    assert found == ["def find_threshold(", "def bound_row(", "def bound_and_place("]
    assert functions_around(str(path), 1, "bound_and_place") == []
    assert functions_around("absent.py", 1, "bound_and_place") == []


def test_a_branch_into_a_loop_is_taken() -> None:
    """Triton 3.6 places the way around a loop before the loop: a branch over that jump is the way in."""
    from paths import path
    from sass import Code, Instruction, Loop
    from trips import Part

    def instruction(text: str, target: int = -1) -> Instruction:
        name = "BRA" if "BRA" in text else text
        return Instruction(
            name, text, stall=1, writes=7, reads=7, waits=0, source=(), target=target
        )

    code = Code(
        [
            instruction("@P0 BRA", 2),
            instruction("BRA", 5),
            instruction("ADD"),
            instruction("@P1 BRA", 2),
            instruction("NOP"),
            instruction("EXIT"),
        ],
        [Loop(2, 3, ("kernel.py: for start in range(count):",))],
    )
    assert path(code, Part("", 1, {"for start in range(count)": 3})) == [0, 2, 3, 2, 3, 2, 3, 4]
    assert path(code, Part("", 1, {"for start in range(count)": 0})) == [0, 1]


KERNEL, CALLED = "def kernel(", "def called("  # a function of which nobody knows who called it


def test_what_an_avoided_loop_contains_never_runs() -> None:
    """Triton 3.6 does not tell which call an inner loop belongs to."""
    from paths import trips_of_loops
    from sass import Code, Loop
    from trips import Part

    loops = [
        Loop(2, 9, ("kernel.py: for turn in range(turns):", "def in_turns(", KERNEL)),
        Loop(3, 5, ("kernel.py: for first in range(begin, end):", CALLED)),
        Loop(12, 15, ("kernel.py: for first in range(begin, end):", CALLED)),
    ]
    part = Part("", 1, {"for first in range(begin, end)": 7}, ("in_turns(",))
    assert trips_of_loops(Code([], loops, "kernel"), part) == [0, 0, 7]


def test_code_of_unknown_callers_does_not_decide_a_branch() -> None:
    from paths import path
    from sass import Code, Instruction
    from trips import Part

    def instruction(text: str, source: tuple[str, ...], target: int = -1) -> Instruction:
        name = "BRA" if "BRA" in text else text
        return Instruction(
            name, text, stall=1, writes=7, reads=7, waits=0, source=source, target=target
        )

    code = Code(
        [
            instruction("@P0 BRA", (KERNEL,), 5),
            instruction("ADD", ("def one_way(", KERNEL)),
            *[instruction("ADD", (CALLED,))] * 2,
            instruction("EXIT", ("def one_way(", KERNEL)),
            instruction("ADD", ("def other_way(", KERNEL)),
            instruction("EXIT", (KERNEL,)),
        ],
        [],
        "kernel",
    )
    assert path(code, Part("", 1, {}, ("one_way(",))) == [0, 5]
    assert path(code, Part("", 1, {}, ("other_way(",))) == [0, 1, 2, 3]
