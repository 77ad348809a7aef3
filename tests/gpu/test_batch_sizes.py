"""`fit-batch` on a GPU: the size that it finds can be trained."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
LENGTH = 1024
WORDS = ("task=text", f"task.context_length={LENGTH}", f"model.context_length={LENGTH}")
GB, LIMIT_GB = 1e9, 4
CASES = {
    "within 4 GB": (["trainer.global_batch_size=512"], ["--memory-gb", str(LIMIT_GB)]),
    "within the GPU's memory": (["trainer.global_batch_size=8"], []),
}


@pytest.fixture(scope="module")
def found(shells, at_once):
    """The report of fit-batch in each case."""

    def fit(name):
        words, options = CASES[name]
        printed, _ = shells(name).type("fit-batch", *WORDS, *words, *options, "--json")
        return json.loads(printed)

    return dict(zip(CASES, at_once(fit, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_largest_size_can_be_trained(name, found, shells):
    largest = found[name]["largest"]
    assert largest > 1
    sizes = [f"trainer.micro_batch_size={largest}", f"trainer.global_batch_size={largest}"]
    shells(name).train(*WORDS, *sizes, "trainer.max_steps=20", "trainer.max_epochs=null", "logger.every_steps=5")
    assert shells(name).inspected["step"] == 20
    peaks_gb = shells(name).logged("memory/peak_gb")
    assert max(peaks_gb) * GB <= found[name]["limit_bytes"] / 0.9


@pytest.mark.parametrize("name", CASES)
def test_each_size_was_compared_with_the_limit(name, found):
    trials = found[name]["trials"]
    assert all(trial["peak_bytes"] <= found[name]["limit_bytes"] for trial in trials if trial["fits"])
    if name == "within 4 GB":
        assert found[name]["limit_bytes"] == pytest.approx(0.9 * LIMIT_GB * GB)
        assert not all(trial["fits"] for trial in trials)


def test_fit_batch_leaves_nothing_behind(shell):
    shell.type("fit-batch", "task=text", "--memory-gb", str(LIMIT_GB), "--largest", "2", "--json")
    assert list(shell.folder.iterdir()) == []
