"""`benchmarks/models.py` runs on small cases and reports what it must."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import models
from dgt.utils.errors import LostProcess, UserError
from dgt.utils.records import DIGITS, processor
from dgt_command.measures import own_process, table
from models import Candidate, Settings, main

SMALL = Settings(image_size=32, batch_size=1, rounds=1)


@contextmanager
def this_process(name: str, environment: object = None) -> Iterator[Callable[..., Any]]:
    """Replaces a separate process, which takes seconds to start."""

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise LostProcess(name) from error

    yield ask


def test_model_rows_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "own_process", this_process)
    rows, refused = models.time_models(("dgt_nano+inference", "test_resnet@64"), settings=SMALL)
    assert refused == []
    assert rows[0]["relative_time"] == 1.0
    assert [row["image_size"] for row in rows] == [32, 64]
    assert [row["peak_mib"] for row in rows] == [None, None]
    assert all(row["processor"] == processor() for row in rows)
    text = table(rows, models.COLUMNS)
    assert "| dgt_nano+inference | eager | 32 |" in text
    assert "peak MiB" not in text


def test_processes_of_a_model_tell_its_time_and_memory() -> None:
    rows, _ = models.time_models(("dgt_nano+inference",), settings=replace(SMALL, memory=True))
    assert rows[0]["peak_mib"] > 1
    assert rows[0]["ms_per_image"] > 0
    assert "peak MiB" in table(rows, models.COLUMNS)


def test_runtimes_side_by_side_and_the_best_of_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="onnx, onnxscript and onnxruntime are not installed")
    monkeypatch.setattr(models, "own_process", this_process)
    # A file takes ten seconds to write, and has tests of its own.
    monkeypatch.setattr(models, "encode_onnx", lambda source: source.module)
    monkeypatch.setitem(
        models.OPENERS, "onnxruntime", lambda module, _: lambda images: [module(images)]
    )
    words = ["--size", "48", "--batch", "2", "--rounds", "1", "--json", "--models"]
    names = ["dgt_nano", "dgt_nano+global", "dgt_nano+inference"]
    assert main([*words, *names, "--runtime", "eager", "onnxruntime"]) == 0
    found = json.loads(capsys.readouterr().out)
    timed = [(row["model"], row["runtime"]) for row in found["rows"]]
    assert timed == [("dgt_nano", "eager"), ("dgt_nano", "onnxruntime"), ("dgt_nano+global", "eager"),
                     ("dgt_nano+global", "onnxruntime"), ("dgt_nano+inference", "eager")]  # fmt: skip
    of_plain = {row["runtime"]: row for row in found["rows"] if row["model"] == "dgt_nano"}
    for runtime in ("eager", "onnxruntime"):
        whole = next(
            r for r in found["rows"] if (r["model"], r["runtime"]) == ("dgt_nano+global", runtime)
        )
        ratio = of_plain[runtime]["ms_per_image"] / whole["ms_per_image"]
        half_a_digit = 5 * 10.0**-DIGITS  # of three numbers
        assert of_plain[runtime]["time_of_global"] == pytest.approx(ratio, rel=3 * half_a_digit)
        assert len(of_plain[runtime]["eq7_by_stage"]) == 3
        assert "time_of_global" not in whole
    assert any(
        note.startswith("onnxruntime does not take dgt_nano+inference: the form")
        for note in found["notes"]
    )
    assert len([note for note in found["notes"] if note.startswith("best of dgt_nano")]) == 3
    assert any("of its time with global attention" in note for note in found["notes"])


def test_the_best_runtime_comes_first() -> None:
    rows = [{"model": name, "image_size": 64, "runtime": where, "ms_per_image": ms}
            for name, where, ms in (("a", "eager", 9.0), ("a", "openvino", 3.0), ("b", "eager", 2.0))]  # fmt: skip
    assert models.summary(rows) == [
        "best of b at 64 px: eager, 2.0 ms",
        "best of a at 64 px: openvino, 3.0 ms",
    ]


def test_runtimes_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--models", "dgt_nano", "--runtime", "openvino"]
    assert main([*words, "--train"]) == 2
    assert (
        "openvino runs inference on a CPU: leave out --train and --device"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "openvino" else name
    )
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert (
        "OpenVINO needs openvino, which is not installed: pip install '.[openvino]' in the checkout"
        in error
    )
    assert "\n" not in error


def test_a_training_step_changes_weights_with_and_without_checkpointing() -> None:
    for text in ("dgt_nano", "dgt_nano+checkpointing"):
        candidate = Candidate.parse(text, 32)
        model = candidate.build(training=True)
        assert model.grad_checkpointing == ("checkpointing" in candidate.forms)
        candidate.step(2, training=True)()


def test_memory_is_kept_or_it_is_said_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with pytest.raises(UserError, match="an environment that does not set it up"):
        Candidate.parse("dgt_nano+kept", 32).step(1)


def test_forms_of_a_model() -> None:
    assert Candidate.parse("dgt_nano@48+global", 32) == Candidate(
        "dgt_nano@48+global", "dgt_nano", 48, ("global",)
    )
    kinds = {
        type(module).__name__ for module in Candidate.parse("dgt_nano+global", 32).build().modules()
    }
    assert "GlobalAttention" in kinds
    assert "DGAttention" not in kinds
    assert not Candidate.parse("dgt_nano+inference", 32).build().training


@pytest.mark.parametrize("form", ["", "+inference"])
def test_a_model_predicts_in_bfloat16(form: str) -> None:
    logits: Any = Candidate.parse(f"dgt_nano{form}+bfloat16", 32).step(1)()
    assert logits.dtype == torch.bfloat16


def test_a_training_step_in_bfloat16_keeps_weights_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate = Candidate.parse("dgt_nano+bfloat16", 32)
    model = candidate.build(training=True)
    logits: list[Any] = []
    model.register_forward_hook(lambda *call: logits.append(call[-1]))
    monkeypatch.setattr(Candidate, "build", lambda *_: model)
    candidate.step(2, training=True)()
    assert [found.dtype for found in logits] == [torch.bfloat16]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_model", "models must be timm models, got no_such_model"),
        ("dgt_nano@", r"models must look like NAME\[@PIXELS\]\[\+FORM...\], got 'dgt_nano@'"),
        ("dgt_nano@16", "image_size must be at least 32, got 16"),
        ("dgt_nano+quick", "must be one of inference, .*, got 'quick'"),
        ("resnet50+inference", "'inference' is one of DGT models, got 'resnet50"),
    ],
)
def test_what_is_no_candidate(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.time_models(("dgt_nano", text))


def test_forms_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="'inference' is not one for training"):
        Candidate.parse("dgt_nano+inference", 32).build(training=True)
    with pytest.raises(ValueError, match="'checkpointing' is not one for inference"):
        Candidate.parse("dgt_nano+checkpointing", 32).build()
    with pytest.raises(ValueError, match="'bfloat16' is for PyTorch, export dgt_nano itself"):
        Candidate.parse("dgt_nano+bfloat16", 32).step(1, runtime="onnxruntime")


def test_a_process_that_fails_is_named_with_its_last_words() -> None:
    with (
        own_process("dgt_nano in eager") as ask,
        pytest.raises(LostProcess, match="process of dgt_nano in eager ended early: ValueError: "),
    ):
        ask(math.sqrt, -1)
