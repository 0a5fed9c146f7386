"""The notebook runs from its first cell to its last, draws its figures, and is kept with small ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import install
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "attention_tour.ipynb"


def test_the_tour_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel with this interpreter, whatever else is installed.
    install(prefix=str(tmp_path), kernel_name="tour")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    tour = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        tour,
        timeout=600,
        startup_timeout=300,
        kernel_name="tour",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [output for cell in tour.cells for output in cell.get("outputs", [])]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 7
    assert sys.executable in (tmp_path / "share/jupyter/kernels/tour/kernel.json").read_text()


def test_its_outputs_are_saved_and_small() -> None:
    tour = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(tour)
    assert sum("image/png" in str(cell.get("outputs")) for cell in tour.cells) >= 6
    assert NOTEBOOK.stat().st_size < 500_000
