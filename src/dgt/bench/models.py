"""Whole models in turns, each in a process of its own: inference or a training step, time and peak memory.

The process of a model builds its candidate, says so, and times a step whenever it is asked to. Memory is measured in
further processes whose allocator gives everything back at once.
"""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

import torch

from dgt.bench.candidates import Candidate
from dgt.bench.measures import memory_peak, milliseconds, quiet_allocator
from dgt.ops.checks import check_count

MODELS = (
    "dgt_tiny+inference",
    "dgt_tiny",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
    "deit_small_patch16_224",
)
BASELINE = "swin_tiny_patch4_window7_224"


def bench_models(
    names: tuple[str, ...] = MODELS,
    image_size: int = 224,
    batch_size: int = 8,
    device: str = "cpu",
    rounds: int = 7,
    compiled: bool = False,
    training: bool = False,
    memory: bool = False,
) -> list[dict[str, Any]]:
    """Time the inference, or the training step, of whole models in turns.

    Args:
        names: ``NAME[@PIXELS][+FORM...]`` each, as :class:`Candidate` reads them; the times of all are compared to
            those of Swin-T at the same size if it is among them, else to those of the first.
        image_size: pixels a side, where a name does not tell.
        batch_size: images a batch.
        device: where to run.
        rounds: how often the candidates take turns; medians of two steps a turn are reported.
        compiled: run ``torch.compile``d models.
        training: time training steps (forward, backward, AdamW) instead of inference.
        memory: measure peaks of memory as well (Linux, CPU): weights, and whatever the step adds to them.

    Returns:
        One row a model: ``model``, milliseconds per image, images per second, time relative to the baseline, peak
        memory in MiB (None where not measured), and the settings.

    Raises:
        TypeError, ValueError: for a name that cannot be read, or a size or batch out of range.
        RuntimeError: where the process of a model ended early; with what it said last.
    """
    check_count("batch_size", batch_size)
    candidates = [Candidate.parse(name, image_size) for name in names]
    task = {"batch_size": batch_size, "device": device, "training": training, "compiled": compiled}
    times = _times_in_turns(candidates, task, rounds)
    baseline = next((c.text for c in candidates if c.name == BASELINE), names[0])
    return [
        {
            "model": c.text,
            "ms_per_image": times[c.text] / batch_size,
            "images_per_second": 1e3 * batch_size / times[c.text],
            "relative_time": times[c.text] / times[baseline],
            "peak_mib": _peak_of(c, task) if memory and device == "cpu" else None,
            "image_size": c.size,
            **{name: value for name, value in task.items() if name != "device"},
        }
        for c in candidates
    ]


def models_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows of :func:`bench_models` out as a Markdown table."""
    peaks = any(r["peak_mib"] is not None for r in rows)
    lines = [
        "| model | px | ms per image | images/s | relative time |" + (" peak MiB |" if peaks else ""),
        "| --- | ---: | ---: | ---: | ---: |" + (" ---: |" if peaks else ""),
    ]
    for r in rows:
        times = f"{r['ms_per_image']:.1f} | {r['images_per_second']:.1f} | **{r['relative_time']:.2f}**"
        peak = "" if not peaks else f" {r['peak_mib']:.0f} |" if r["peak_mib"] is not None else " |"
        lines.append(f"| {r['model']} | {r['image_size']} | {times} |{peak}")
    return "\n".join(lines)


def _times_in_turns(candidates: list[Candidate], task: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median milliseconds of a step of each candidate, all of them alive and taking turns."""
    processes: dict[str, subprocess.Popen[str]] = {}
    times: dict[str, list[float]] = {candidate.text: [] for candidate in candidates}
    try:
        for candidate in candidates:
            processes[candidate.text] = _start(candidate, "time", task, dict(os.environ))
            _answer(processes[candidate.text], candidate)
        for _ in range(rounds):
            for candidate in candidates:
                process = processes[candidate.text]
                assert process.stdin is not None  # opened by _start
                print(file=process.stdin, flush=True)
                times[candidate.text] += _answer(process, candidate)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return {name: statistics.median(taken) for name, taken in times.items()}


def _peak_of(candidate: Candidate, task: dict[str, Any]) -> float | None:
    """Peak memory in MiB of a fresh process that builds the model and makes two steps; None where nothing can tell."""
    process = _start(candidate, "peak", task, quiet_allocator())
    with process:
        peak: float | None = _answer(process, candidate)
    return peak


def _start(
    candidate: Candidate, what: str, task: dict[str, Any], environment: dict[str, str]
) -> "subprocess.Popen[str]":
    """Start the process of a candidate; it answers lines of JSON."""
    job = {"what": what, "text": candidate.text, "size": candidate.size, "threads": torch.get_num_threads(), **task}
    script = "import sys; from dgt.bench.models import run_candidate; run_candidate(sys.argv[1])"
    command = [sys.executable, "-c", script, json.dumps(job)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def _answer(process: "subprocess.Popen[str]", candidate: Candidate) -> Any:
    """The next answer of a process."""
    assert process.stdout is not None  # opened by _start
    line = process.stdout.readline()
    if not line:
        last = process.communicate()[1].strip().splitlines()[-1:]
        raise RuntimeError(f"the process of {candidate.text} ended early: {' '.join(last) or 'it said nothing'}")
    return json.loads(line)


def run_candidate(text: str) -> None:
    """What the process of a candidate does: measure its peak, or time two steps for every line it reads.

    Args:
        text: the job as JSON, from this module.
    """
    job = json.loads(text)
    torch.set_num_threads(job["threads"])
    candidate, device = Candidate.parse(job["text"], job["size"]), torch.device(job["device"])
    options = {name: job[name] for name in ("batch_size", "device", "training", "compiled")}
    if job["what"] == "peak":
        Candidate.parse("test_resnet", 64).step(1, training=job["training"])()  # loads code and starts threads
        try:
            with memory_peak() as peak:
                step = candidate.step(**options)
                step()
                step()
        except OSError:
            print("null")
        else:
            print(json.dumps(peak.mib))
        return
    step = candidate.step(**options)
    for _ in range(2):
        step()
    print(json.dumps([]), flush=True)
    for _ in sys.stdin:
        step()  # brings the model back into the caches, which the others have used since
        print(json.dumps([milliseconds(step, device) for _ in range(2)]), flush=True)
