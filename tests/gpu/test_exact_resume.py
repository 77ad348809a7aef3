"""Bit-equal resumes of what makes its own kernels, or draws in them: text, residual networks, compiled models.

Each case is killed, resumed, paused and resumed again. Each test makes runs of its own, so that several workers share
the file.
"""

from __future__ import annotations

import signal

import pytest

from hpctrain.checkpoint.compare_saves import compare_saves
from hpctrain.errors import ExitCode

pytestmark = [pytest.mark.gpu, pytest.mark.apart]
STEPS, PAUSE = 12, 8
WORDS = (
    "task=custom",
    "trainer.global_batch_size=16",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.eval_every_steps=4",
    "trainer.deterministic=true",
    "trainer.clip_grad_norm=1.0",
    "schedule=cosine",
    "optimizer.lr=0.003",
    "logger.every_steps=2",
    "checkpoint.every_steps=1",
    # a save that is skipped because the one before is being written would move the resume, and prove less
    "checkpoint.asynchronous=false",
)
TEXT = (
    "task._target_=tests.gpu.programs.gpu_tasks.KilledText",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.width=64",
    "model.dropout=0.2",
)
RESNET = (
    "task._target_=tests.gpu.programs.gpu_tasks.KilledDigits",
    "+task.augment=true",
    "model=resnet",
    "model.depth=18",
    "model.in_channels=1",
    "model.num_classes=10",
    "trainer.channels_last=true",
)
COMPILED = ("trainer.compile=true", "data.drop_last=true")
"""Without the shorter last batch of an epoch, for which everything would be compiled again."""
CUDA_GRAPHS = (*COMPILED, "trainer.compile_mode=reduce-overhead")
ACCUMULATED = ("trainer.micro_batch_size=8",)
CASES = {
    "text in fp32": (*TEXT, *ACCUMULATED),
    "text in bf16": (*TEXT, *ACCUMULATED, "precision=bf16", "optimizer.fused=true"),
    "text, activations recomputed": (*TEXT, *ACCUMULATED, "trainer.activation_checkpointing=[blocks.*]"),
    "ResNet, channels last": (*RESNET, *ACCUMULATED),
    "ResNet in bf16, channels last": (*RESNET, *ACCUMULATED, "precision=bf16"),
    "compiled": (*TEXT, *ACCUMULATED, *COMPILED),
    "CUDA graphs": (*TEXT, *CUDA_GRAPHS),
    "CUDA graphs without dropout": (*TEXT, *CUDA_GRAPHS, "model.dropout=0"),
}
MARKS = {
    "text in bf16": [pytest.mark.core],
    # seen with torch 2.13 and oneDNN, at random: some values of one convolution's weight gradient
    "ResNet in bf16, channels last": [pytest.mark.needs_cuda("on a CPU, gradients of bf16 convolutions may be NaN")],
    "compiled": [pytest.mark.slow],
    "CUDA graphs": [pytest.mark.slow],
    "CUDA graphs without dropout": [pytest.mark.slow],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_a_killed_and_paused_run_is_the_straight_run(name, shells, at_once):
    words = [*WORDS, *CASES[name]]

    def straight():
        shell = shells((name, "straight"))
        shell.train(*words)
        return shell

    def interrupted():
        shell = shells((name, "interrupted"))
        # a step calls the loss once or twice, and FLOPs of a compiled model are counted by one more call
        shell.train(*words, code=-signal.SIGKILL, KILLED_IN="5")
        shell.train(*words, f"trainer.pause_at_step={PAUSE}", code=ExitCode.INTERRUPTED)
        shell.type("resume", str(shell.run.path))
        return shell

    one, other = at_once(lambda train: train(), [straight, interrupted])
    ends = [(str(attempt.reason), attempt.end_step) for attempt in other.attempts]
    assert [reason for reason, _ in ends] == ["infrastructure", "paused", "completed"]
    assert ends[1:] == [("paused", PAUSE), ("completed", STEPS)]
    assert 0 < other.attempts[1].start_step < 5
    assert other.digest == one.digest
    assert other.metrics == one.metrics
    found = compare_saves(other.run.checkpoint(STEPS), one.run.checkpoint(STEPS))
    # only the training time is by the clock
    assert (found.differing, found.numbers, found.unreadable) == ([], ["state.pt:extra.ending.trained_s"], {})
