"""`fit-batch` on a GPU: the size that it finds can be trained.

Each test searches for itself, so that several workers share the file.
"""

from __future__ import annotations

import json

import pytest

from hpctrain.errors import ExitCode

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.apart]
LENGTH = 1024
WORDS = ("task=text", f"task.context_length={LENGTH}", f"model.context_length={LENGTH}")
GB, LIMIT_GB = 1e9, 1
CASES = {
    "within 1 GB": (["trainer.global_batch_size=512"], ["--memory-gb", str(LIMIT_GB)]),
    "within the GPU's memory": (["trainer.global_batch_size=8"], []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_largest_size_can_be_trained(name, shell):
    words, options = CASES[name]
    found = json.loads(shell.type("fit-batch", *WORDS, *words, *options, "--json")[0])
    largest, trials = found["largest"], found["trials"]
    assert largest > 1
    assert all(trial["peak_bytes"] <= found["limit_bytes"] for trial in trials if trial["fits"])
    if name == "within 1 GB":
        assert found["limit_bytes"] == pytest.approx(0.9 * LIMIT_GB * GB)
        assert not all(trial["fits"] for trial in trials)
    sizes = [f"trainer.micro_batch_size={largest}", f"trainer.global_batch_size={largest}"]
    shell.train(*WORDS, *sizes, "trainer.max_steps=8", "trainer.max_epochs=null", "logger.every_steps=2")
    assert shell.inspected["step"] == 8
    assert max(shell.logged("memory/peak_gb")) * GB <= found["limit_bytes"] / 0.9


@pytest.mark.core
def test_where_the_allocator_has_no_more_the_largest_size_trains_and_the_next_one_does_not(shell):
    task = ["task=custom", "task._target_=tests.gpu.programs.gpu_tasks.Wide"]
    found = json.loads(shell.type("fit-batch", *task, "--largest", "8", "--json")[0])
    largest = found["largest"]
    assert {trial["micro_batch_size"]: trial["fits"] for trial in found["trials"]}[largest + 1] is False
    words = [*task, "trainer.max_steps=3", "trainer.max_epochs=null"]

    def train(size, code):
        sizes = [f"trainer.micro_batch_size={size}", f"trainer.global_batch_size={2 * size}"]
        return shell.train(*words, *sizes, f"run_dir={shell.folder / str(size)}", code=code)

    train(largest, ExitCode.FINISHED)
    _, errors = train(largest + 1, ExitCode.FAILED)
    assert f"out of GPU memory: set trainer.micro_batch_size below {largest + 1}" in errors


def test_fit_batch_leaves_nothing_behind(shell):
    shell.type("fit-batch", "task=text", "--memory-gb", "4", "--largest", "2", "--json")
    assert list(shell.folder.iterdir()) == []
