"""The notebook docs/first_run.ipynb runs with a tiny model, in order, and so do the blocks of docs/python.md."""

import importlib.util
import json
import re
from pathlib import Path
from unittest.mock import create_autospec

import jaxdt
from jaxdt.api.launch import Run, launch

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "first_run.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_notebook():
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "docs" / "run_notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_trains_and_shows_the_report(tmp_path):
    """With one pipeline instead of two, which spares half of the processes. These are executed, as those of users are,
    and the run is predicted; fleets of other tests are forks, without a prediction."""
    notebook = json.loads(NOTEBOOK.read_text())
    parameters = {"N_STEPS": 2, "D_MODEL": 32, "N_PIPELINES": 1, "RUN_DIR": tmp_path / "run"}
    cells = list(run_notebook().run_cells(notebook, parameters))
    outputs = [cell_outputs for _, cell_outputs in cells]
    assert outputs[-1][0]["data"]["image/png"].startswith("iVBOR")
    code = next(found for cell, found in cells if "jaxdt.launch(" in "".join(cell["source"]))[-1]
    assert code["data"]["text/plain"] == ["0"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(list((tmp_path / "run" / "logs").glob("peer_*.log"))) == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step_s_predicted"] > 0


def test_the_notebook_is_committed_with_the_outputs_of_one_session():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [sorted(output["data"]) for cell in cells for output in cell["outputs"] if "data" in output]
    assert ["image/png", "text/plain"] in kinds
    assert NOTEBOOK.stat().st_size < 200_000
    assert "/tmp/" not in NOTEBOOK.read_text() and "/home/" not in NOTEBOOK.read_text()


def test_the_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    """A run is replaced by one that only has the methods of a run, with their parameters."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    finished = create_autospec(Run, instance=True)
    started = create_autospec(launch, return_value=finished)
    monkeypatch.setattr(jaxdt, "launch", started, raising=False)
    monkeypatch.setattr(jaxdt, "load_plan", lambda path: None, raising=False)
    first, second, third = BLOCK.findall((ROOT / "docs" / "python.md").read_text())
    session = {}
    exec(compile(first, "python.md", "exec"), session)
    assert started.call_args.args[0].train.steps == 50 and finished.stop.called
    (tmp_path / "runs" / "python").mkdir()
    (tmp_path / "runs" / "python" / "config.py").symlink_to(ROOT / "configs" / "baseline.py")
    exec(compile(second, "python.md", "exec"), session)
    assert started.call_args.args[2].resume
    exec(compile(third, "python.md", "exec"), session)
    assert session["step"].step_s > session["step"].parts.compute_s > 0
