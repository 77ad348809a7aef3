"""All ranks resume from the checkpoint that rank zero chose."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hpctrain.status.run_status import read_statuses
from tests.multiprocess.programs.compared_runs import taken

QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "logger.tensorboard=false",
    "checkpoint.every_steps=4",
    "checkpoint.keep=9",
    "trainer.max_steps=12",
    "trainer.global_batch_size=12",
    "checkpoint.asynchronous=false",
)


LARGE_WIDTH = 240_000
"""Width of the network with which each tensor of the optimizer's state is large enough for huge pages."""


def damage(run, step):
    file = run.directory.checkpoint(step) / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def as_if_interrupted(run):
    """A completed run would be left alone."""
    ledger = run.directory.attempts
    ledger.write_text(ledger.read_text().replace('"completed"', '"interrupted"'))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_the_newest_intact_checkpoint_or_the_same_error_on_every_rank(train, world_size):
    code, run, output = train("run", *QUIET, world_size=world_size)
    assert (code, run.steps) == (0, [4, 8, 12]), output
    digest = run.digest
    damage(run, 12)
    as_if_interrupted(run)
    code, run, output = train("run", *QUIET, world_size=world_size)
    assert code == 0, output
    assert run.attempts[-1] == (8, "completed", 12)
    assert run.digest == digest
    assert "what is newer is not intact" in output
    assert [path.name[:21] for path in run.directory.set_aside()] == ["damaged-step_00000012"]
    for step in run.steps:
        damage(run, step)
    as_if_interrupted(run)
    code, run, output = train("run", *QUIET, world_size=world_size)
    assert code == 1, output
    assert "no checkpoint of the run is intact" in output
    if world_size > 1:
        # each rank reports it; none of them waits for a collective that never comes
        logs = [run.directory.rank_log(rank).read_text() for rank in range(1, world_size)]
        assert all("lost another rank" not in log for log in logs)


@pytest.mark.nightly
def test_ranks_are_refused_alike_once_all_checkpoints_are_gone_and_start_over_together(train):
    code, run, output = train("run", *QUIET, world_size=2, TRIAL_ACT="0:7:SIGKILL,1:7:SIGKILL")
    assert (code, run.steps) == (-9, [4]), output
    shutil.rmtree(run.directory.checkpoints)
    logged = run.directory.metrics.read_bytes()
    code, run, output = train("run", *QUIET, world_size=2)
    assert code == 1, output
    assert "expected the checkpoint of step 4, which the run saved" in output
    assert run.directory.metrics.read_bytes() == logged
    assert "lost another rank" not in run.directory.rank_log(1).read_text()
    code, run, output = train("run", *QUIET, "resume.from_scratch=true", world_size=2)
    assert code == 0, output
    assert (run.attempts[-1], run.steps) == ((0, "completed", 12), [4, 8, 12])
    assert (run.directory.earlier / "0003" / "metrics.jsonl").read_bytes() == logged
    code, straight, output = train("straight", *QUIET, world_size=2)
    assert (code, straight.digest) == (0, run.digest), output


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_large_optimizer_resumes_exactly(train, world_size):
    words = (*QUIET, f"+task.width={LARGE_WIDTH}", "trainer.micro_batch_size=6")
    code, run, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    straight = run.digest
    call = 6 * (2 if world_size == 1 else 1)  # in the middle of the sixth step
    acts = ",".join(f"{rank}:{call}:SIGKILL" for rank in range(world_size))
    code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=acts)
    assert (code, run.steps) == (-9, [4]), output
    code, run, output = train("run", *words, world_size=world_size)
    assert code == 0, output
    assert run.attempts[-1] == (4, "completed", 12)
    assert run.digest == straight


def test_samples_of_steps_that_fewer_ranks_repeat_are_recorded_once(train):
    words = (*QUIET, "logger.samples=true")
    code, straight, output = train("straight", *words)
    assert code == 0, output
    code, run, output = train("run", *words, world_size=2, TRIAL_ACT="0:7:SIGKILL,1:7:SIGKILL")
    assert (code, run.steps) == (-9, [4]), output
    code, run, output = train("run", *words)
    assert code == 0, output
    assert run.attempts[-1] == (4, "completed", 12)
    assert taken(run) == taken(straight)


def test_another_torch_than_before_is_a_warning(train):
    code, run, output = train("run", *QUIET)
    assert code == 0, output
    assert "this attempt has torch" not in output
    ledger, manifest = run.directory.attempts, run.directory.manifest
    installed = json.loads(manifest.read_text())["versions"]["torch"]
    assert f'"torch": "{installed}"' in ledger.read_text()
    ledger.write_text(ledger.read_text().replace(f'"torch": "{installed}"', '"torch": "1.2.3"'))
    damage(run, 12)  # so that the next attempt trains four steps
    as_if_interrupted(run)
    code, run, output = train("run", *QUIET)
    assert code == 0, output
    assert f"this attempt has torch {installed}, and attempt 1 had torch 1.2.3" in output
    (status,) = read_statuses([run.directory])
    differ = "the weights may differ from those of a run with one version"
    assert status.not_exact == (f"torch 1.2.3 in attempt 1; torch {installed} in attempt 2: {differ}",)
    manifest.write_text(manifest.read_text().replace(f'"torch": "{installed}"', '"torch": "1.2.3"'))
    ledger.write_text(ledger.read_text().replace('"torch": ', '"other": '))
    as_if_interrupted(run)
    code, run, output = train("run", *QUIET)
    assert code == 0, output
    assert f"this attempt has torch {installed}, and the Python that submitted the run has torch 1.2.3" in output


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("words", [[], ["precision=bf16_pure"], ["trainer.ema_decay=0.9"]])
def test_buffers_that_change_their_shape_are_as_they_were(train, world_size, words):
    words = [*QUIET, *words, "task._target_=tests.multiprocess.programs.memories.Remembering"]
    code, straight, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    for act in ("0:2", "0:7", "0:6"):
        code, run, output = train("run", *words, world_size=world_size, alike=False, TRIAL_ACT=f"{act}:raise")
        assert code == 1, output
    code, run, output = train("run", *words, world_size=world_size)
    assert code == 0, output
    assert [start for start, _, _ in run.attempts] == [0, 0, 4, 8]
    assert run.digest == straight.digest
    saved = torch.load(run.directory.checkpoint(12) / "model.pt", weights_only=True)
    assert (saved["seen"].shape, saved["pending"].shape, "first" in saved) == ((6, 3), (8,), False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["parallel=fsdp", "parallel.shard_degree=2"], "of a model on several ranks"),
        (["precision=fp16_master"], "with precision=fp16_master"),
    ],
)
def test_buffers_that_change_their_shape_are_refused_where_checkpoints_cant_hold_them(train, words, where):
    words = [*QUIET, *words, "task._target_=tests.multiprocess.programs.memories.Remembering"]
    code, run, output = train("run", *words, world_size=2)
    assert (code, run.steps) == (1, [])
    assert (
        f"training changes the shape or dtype of count, last, pending, seen, which checkpoints {where} can't" in output
    )
