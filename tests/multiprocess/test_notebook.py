"""A real Jupyter kernel trains, is interrupted, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fork_server import clean_environment

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "python.md"

INTERRUPTED = """
import os, signal

class Stopped(Line):
    stops = [30]

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if model.training and self.calls in self.stops:
            self.stops.clear()
            os.kill(os.getpid(), signal.SIGINT)  # as the stop button does
        return super().loss(model, batch)

words = {"trainer.max_steps": 50, "logger.tensorboard": False, "logger.every_steps": 10}
straight = hpctrain.fit(hpctrain.compose({**words, "run_dir": "straight"}, task=Line))
hpctrain.fit(hpctrain.compose({**words, "run_dir": "stopped"}, task=Stopped))
"""
RESUMED = """
run = hpctrain.Run("stopped").resume()
assert run.checkpoints()[-1].weights_digest == straight.checkpoints()[-1].weights_digest
assert [str(one.reason) for one in run.status().attempts] == ["interrupted", "completed"]
frame = run.metrics(as_frame=True)
assert frame["step"].max() == 50
run
"""


@pytest.mark.nightly
def test_a_notebook_trains_a_class_of_its_own_and_resumes_it_after_the_stop_button(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONWARNINGS")  # the kernel's own warnings
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    documented = PAGE.read_text().partition("```python notebook.py\n")[2].partition("```")[0]
    cells = [nbformat.v4.new_code_cell(text) for text in (documented, INTERRUPTED, RESUMED)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    trained, stopped, resumed = (cell.outputs for cell in notebook.cells)
    assert "train/loss" in texts(trained)
    assert [output.ename for output in trained + resumed if output.output_type == "error"] == [], texts(resumed)
    (error,) = [output for output in stopped if output.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    assert "to resume: hpctrain.Run(" in texts(stopped)
    (shown,) = [output.data["text/plain"] for output in resumed if output.output_type == "execute_result"]
    assert shown == f"Run('{tmp_path}/stopped'): completed, step 50/50"


def texts(outputs):
    return "".join(output.get("text", "") + "\n".join(output.get("traceback", [])) for output in outputs)
