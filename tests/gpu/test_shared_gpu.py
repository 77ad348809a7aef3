"""FSDP with two ranks on one GPU, which gloo connects: NCCL wants a GPU for each."""

from __future__ import annotations

import pytest

from hpctrain.errors import ExitCode

pytestmark = pytest.mark.gpu
STEPS = 8
WORDS = (
    "task=text",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.width=64",
    "model.dropout=0",
    "trainer.global_batch_size=16",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every_steps=4",
    "trainer.deterministic=true",
    "logger.every_steps=1",
)
ALONE = ("cluster.processes_per_node=1",)
FSDP = ("parallel=fsdp", "parallel.backend=gloo", "cluster.processes_per_node=2")
BF16 = ("precision=bf16",)
CASES = {
    ("alone", "fp32"): [(*WORDS, *ALONE)],
    ("alone", "bf16"): [(*WORDS, *ALONE, *BF16)],
    ("shared", "fp32"): [(*WORDS, *FSDP)],
    ("shared", "bf16"): [(*WORDS, *FSDP, *BF16)],
    ("paused", "bf16"): [(*WORDS, *FSDP, *BF16, "trainer.pause_at_step=4"), (*WORDS, *FSDP, *BF16)],
}


@pytest.fixture(scope="module")
def trained(shells, at_once):
    """A run for each case, in one attempt or two."""

    def train(case):
        *paused, last = CASES[case]
        for words in paused:
            shells(case).train(*words, code=ExitCode.INTERRUPTED)
        shells(case).train(*last)
        return shells(case)

    return dict(zip(CASES, at_once(train, CASES), strict=True))


@pytest.mark.core
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_the_losses_are_those_of_one_rank(trained, precision, tolerance):
    alone, shared = trained["alone", precision], trained["shared", precision]
    for name in ("train/loss", "eval/loss"):
        assert shared.logged(name) == pytest.approx(alone.logged(name), rel=tolerance)
    assert len(shared.logged("train/loss")) == STEPS


@pytest.mark.core
def test_a_paused_run_ends_with_the_same_bits(trained):
    paused, straight = trained["paused", "bf16"], trained["shared", "bf16"]
    assert [attempt.start_step for attempt in paused.attempts] == [0, 4]
    assert paused.digest == straight.digest
    assert paused.metrics == straight.metrics
