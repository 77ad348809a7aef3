"""A compiled model, on the CPU: it learns the same, under the same names, alone and in DDP."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from hpctrain.checkpoint.read import load

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
TRAINING = (
    *("task=custom", "task._target_=tests.multiprocess.programs.trial.Trial", "logger.tensorboard=false"),
    *("optimizer.lr=0.01", "trainer.global_batch_size=8", "trainer.max_steps=4", "cluster.gpus_per_node=0"),
)


RIVALS = (
    *("task._target_=tests.multiprocess.programs.rivals.Rivals", "optimizer=named", "+task.eval_samples=0"),
    "optimizer.named.critic={_target_: torch.optim.SGD, match: critic.*, loss: critic_loss}",
    "optimizer.named.generator={_target_: torch.optim.SGD, match: generator.*, loss: generator_loss, every_steps: 2}",
)


@pytest.fixture
def weights(tmp_path):
    """Trains where torch's own deprecation warnings aren't errors; returns the weights by name."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    variables["OMP_NUM_THREADS"] = "1"
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "kernels")
    variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise processes that import torch for two kernels

    def run(name, *words):
        command = [sys.executable, "-m", "hpctrain", f"run_dir={tmp_path / name}", *TRAINING, *words]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        saved = load(tmp_path / name / "checkpoints" / "step_00000004").model
        return {name: value if isinstance(value, torch.Tensor) else value.read() for name, value in saved.items()}

    return run


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        (["trainer.activation_checkpointing=['0']", "+task.eval_samples=0"], 1e-4),
        (["cluster.processes_per_node=2", "+task.eval_samples=0"], 1e-4),
        (["cluster.processes_per_node=2", "parallel=fsdp"], 1e-4),
        (["precision=fp16_master", "trainer.channels_last=true"], 1e-2),
        ([*RIVALS, "cluster.processes_per_node=2"], 1e-4),
    ],
    ids=["checkpointed", "two ranks", "two ranks that share the model", "master weights", "several losses"],
)
def test_a_compiled_model_learns_the_same_under_the_same_names(weights, words, tolerance, tmp_path):
    exact = weights("plain", *words)
    assert not list(tmp_path.glob("kernels/**/*.so"))
    found = weights("compiled", *words, "trainer.compile=true")
    assert found.keys() == exact.keys()
    assert list(tmp_path.glob("kernels/**/*.so"))
    for name in exact:
        assert torch.allclose(found[name].float(), exact[name].float(), atol=tolerance), name
