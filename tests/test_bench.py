"""Benchmarks run on small cases, report what they must, and refuse to time what is wrong."""

from pathlib import Path

import pytest

from dgt import bench
from dgt.bench import Candidate, attention, models
from dgt.bench.measures import table
from dgt_command import main


def test_attention_rows_and_table() -> None:
    rows = bench.bench_attention(((1, 1, 300, 20),), rounds=1, groups=4, channels=8)
    assert rows[0]["ratio"] == pytest.approx(rows[0]["sdpa_ms"] / rows[0]["dgt_ms"])
    assert set(rows[0]["steps_ms"]) == {"group", "select", "attend"}
    assert "B1 H1 L300 k20 G4 D8 float32" in table(rows, attention.COLUMNS)


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention._inputs((1, 1, 64, 8), 4, "cpu")
    real = attention.dynamic_group_attention

    def wrong(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)  # type: ignore[arg-type]
        return result if options.get("backend") == "reference" else result._replace(output=result.output + 0.1)

    monkeypatch.setattr(attention, "dynamic_group_attention", wrong)
    with pytest.raises(RuntimeError, match="differs from the reference"):
        attention._check(inputs, 16)


def test_model_rows_and_table() -> None:
    rows = bench.bench_models(
        ("dgt_nano+inference", "test_resnet@64"), image_size=32, batch_size=1, rounds=1, memory=True
    )
    assert rows[0]["relative_time"] == 1.0
    assert [row["image_size"] for row in rows] == [32, 64]
    assert all(row["peak_mib"] > 1 for row in rows)
    text = table(rows, models.COLUMNS)
    assert "| dgt_nano+inference | 32 |" in text
    assert "peak MiB" in text
    assert "peak MiB" not in table([{**row, "peak_mib": None} for row in rows], models.COLUMNS)


def test_a_training_step_changes_weights_with_and_without_checkpointing() -> None:
    for text in ("dgt_nano", "dgt_nano+checkpointing"):
        candidate = Candidate.parse(text, 32)
        model = candidate.build(training=True)
        assert model.grad_checkpointing == ("checkpointing" in candidate.forms)
        candidate.step(2, training=True)()


def test_forms_of_a_model() -> None:
    assert Candidate.parse("dgt_nano@48+global", 32) == Candidate("dgt_nano@48+global", "dgt_nano", 48, ("global",))
    kinds = {type(module).__name__ for module in Candidate.parse("dgt_nano+global", 32).build().modules()}
    assert "GlobalAttention" in kinds
    assert "DGAttention" not in kinds
    assert not Candidate.parse("dgt_nano+inference", 32).build().training


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_model", "models must be timm models, got no_such_model"),
        ("dgt_nano@", r"models must look like NAME\[@PIXELS\]\[\+FORM...\], got 'dgt_nano@'"),
        ("dgt_nano@16", "image_size must be at least 32, got 16"),
        ("dgt_nano+quick", "one of inference, packed, global, checkpointing, got 'quick'"),
        ("resnet50+inference", "'inference' is one of DGT models, got 'resnet50"),
    ],
)
def test_what_is_no_candidate(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.bench_models(("dgt_nano", text))


def test_forms_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="'inference' is not one for training"):
        Candidate.parse("dgt_nano+inference", 32).build(training=True)
    with pytest.raises(ValueError, match="'checkpointing' is not one for inference"):
        Candidate.parse("dgt_nano+checkpointing", 32).build()


def test_a_model_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="process of dgt_nano\\+inference ended early: UserError: the form"):
        bench.bench_models(("dgt_nano+inference",), 32, 1, training=True, rounds=1)


def test_a_profile_tells_the_operators_of_a_model() -> None:
    rows = bench.profile_models(("dgt_nano", "test_vit@160"), 96, batch_size=1, rounds=1)
    for model in ("dgt_nano", "test_vit@160"):
        own = {row["operator"]: row for row in rows if row["model"] == model}
        assert sum(row["share"] for row in own.values()) == pytest.approx(1)
        assert ("dgt::group_queries" in own) == model.startswith("dgt")
        assert list(own.values()) == sorted(own.values(), key=lambda row: -row["ms_per_image"])
    assert "| dgt_nano | aten::" in table(rows, models.PROFILE)


def test_speed_against_accuracy(tmp_path: Path) -> None:
    row = {"image_size": 224, "images_per_second": 20.0, "batch_size": 8, "compiled": False}
    rows = [{**row, "model": name} for name in ("dgt_tiny+inference", "swin_tiny_patch4_window7_224", "test_vit")]
    bench.draw_accuracy(rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="rows must hold a model with a published accuracy"):
        bench.draw_accuracy([{**rows[0], "image_size": 512}], tmp_path / "none.png")


@pytest.mark.parametrize("words", ["attention", "models --profile", "models --train"])
def test_only_inference_is_plotted(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split(), "--plot", str(tmp_path / "speed.png")]) == 2
    assert "--plot draws models at inference" in capsys.readouterr().err


def test_the_command_profiles_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "models", "--size", "64", "--batch", "1", "--rounds", "1", "--models"]
    assert main([*words, "dgt_nano", "--profile"]) == 0
    assert "aten::" in capsys.readouterr().out
    assert main([*words, "resnet50@224", "--plot", str(tmp_path / "speed.svg")]) == 0
    assert "ResNet-50" in (tmp_path / "speed.svg").read_text() or (tmp_path / "speed.svg").stat().st_size > 5_000


def test_the_machine_is_described() -> None:
    assert {"date", "processor", "threads", "torch", "command"} <= set(bench.machine())
