"""The notebooks run, in a reduced form, and their sources and their outputs belong together."""

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from qkvshare_agents.model.engine import Engine

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs(source: Path, demo_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKVSHARE_REDUCED", "1")
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures, "it draws nothing"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_beside_it_is_the_source_with_outputs(source: Path) -> None:
    ours, shown = jupytext.read(source), nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert [c.source for c in ours.cells] == [c.source for c in shown.cells], "run `make notebooks`"
    outputs = [output for cell in shown.cells for output in cell.get("outputs", [])]
    assert outputs and not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"], "warnings, with paths of the machine that made it"
