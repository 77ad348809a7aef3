"""Ranks that compute each layer together train as one device does, survive, and resume on any mesh."""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint.read import load
from tests.multiprocess.programs.compared_runs import losses, taken, weights

QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.divided.Divided",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
)
SMALL = (*QUIET, "trainer.global_batch_size=16", "trainer.max_steps=20", "logger.every_steps=1", "optimizer.lr=0.01")
SMALL += ("trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.8")
TP = ("parallel=tp",)
FSDP_TP = ("parallel=fsdp_tp", "parallel.tensor_degree=2")


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


HSDP_TP = ("parallel=mesh", "parallel.replicate_degree=2", "parallel.tensor_degree=2")
OWN = "task._target_=tests.multiprocess.programs.divided.Own"


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (4, (*FSDP_TP, "trainer.micro_batch_size=4", "trainer.max_steps=8")),
        nightly(2, (*TP, OWN)),
        nightly(4, (*FSDP_TP, "trainer.micro_batch_size=2", "trainer.activation_checkpointing=[blocks.*]")),
        nightly(2, TP),
        nightly(4, TP),
        nightly(4, (*HSDP_TP, "parallel.shard_degree=1", "trainer.micro_batch_size=2")),
        nightly(8, (*HSDP_TP, "parallel.prefetch_blocks=1")),
        nightly(4, (*FSDP_TP, "parallel.keep_gradients_whole=true", "trainer.micro_batch_size=2")),
        nightly(4, (*FSDP_TP, "parallel.reshard_after_forward=false", "+task.length=11", "+task.packed=true")),
        nightly(4, (*TP, "+task.length=10")),
        nightly(4, (*FSDP_TP, OWN, "trainer.micro_batch_size=2")),
        nightly(2, (*TP, OWN, "trainer.clip_grad_norm=null", "trainer.clip_grad_value=0.001")),
        nightly(2, (*TP, "optimizer=sgd", "optimizer.momentum=0.9", "trainer.log_grad_norm=true")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_losses_of_one_device(train, world_size, words):
    """In fp64, so that only mistakes differ: the order of sums changes the last digits."""
    given = [word for word in words if not word.startswith(("parallel", "trainer.micro"))]
    code, one, output = train("one", *SMALL, *given)
    assert code == 0, output
    code, run, output = train("run", *SMALL, *words, world_size=world_size)
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(one), rel=1e-10, abs=1e-10)
    norms = [[entry["train/grad_norm"] for entry in each.metrics if "train/grad_norm" in entry] for each in (run, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    for found, expected in zip(weights(run, run.steps[-1]), weights(one, run.steps[-1]), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    evaluated = [[entry for entry in each.metrics if "eval/loss" in entry] for each in (run, one)]
    assert evaluated[0][-1]["eval/loss"] == pytest.approx(evaluated[1][-1]["eval/loss"], rel=1e-9)


STOPS = {
    (2, TP): ["1:3:SIGTERM"],
    (4, FSDP_TP): ["3:2:SIGTERM", "0:1:SIGUSR2"],
    (8, HSDP_TP): ["5:3:SIGTERM"],
    (4, (*FSDP_TP, "precision=bf16", "task._target_=tests.multiprocess.programs.divided.Single")): ["1:2:SIGTERM"],
    (2, (*TP, "precision=bf16_pure", "task._target_=tests.multiprocess.programs.divided.Single")): ["1:2:SIGTERM"],
    (
        4,
        (*FSDP_TP, "precision=fp16", "task._target_=tests.multiprocess.programs.divided.Single", "+task.partial=true"),
    ): ["1:2:SIGTERM"],
    (2, (*TP, "+task.dropout=0.3")): ["0:2:SIGTERM"],
}
GATE = [(2, TP)]


@pytest.mark.parametrize(("world_size", "words"), [key if key in GATE else nightly(*key) for key in STOPS], ids=str)
def test_an_interrupted_run_is_the_straight_run(train, world_size, words):
    words = [*SMALL, "trainer.max_steps=6", "trainer.eval_every_steps=4", *words]
    code, straight, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    acts = STOPS[world_size, tuple(words[len(SMALL) + 2 :])]
    for number, act in enumerate([*acts, ""]):
        code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
        assert code == (4 if number < len(acts) else 0), output
    assert len(run.attempts) == len(acts) + 1
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)


@pytest.mark.nightly
def test_a_killed_run_continues_from_its_last_save(train):
    words = [*SMALL, *FSDP_TP, "trainer.max_steps=8"]
    code, straight, output = train("straight", *words, world_size=4)
    assert code == 0, output
    words += ["checkpoint.every_steps=3", "checkpoint.asynchronous=false"]
    kills = ",".join(f"{rank}:8:SIGKILL" for rank in range(4))
    code, run, output = train("run", *words, world_size=4, TRIAL_ACT=kills)
    assert code == -9, output
    assert run.steps == [3, 6]
    code, run, output = train("run", *words, world_size=4)
    assert code == 0, output
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)


FSDP = ("parallel=fsdp",)
MOVES = {
    "through every kind": [(2, FSDP), (2, TP), (4, FSDP_TP), (2, ()), (4, FSDP_TP), (2, FSDP)],
    "from one device and back": [(1, ()), (2, TP), (1, ()), (4, FSDP_TP), (4, TP)],
    "with weights that no plan names": [(4, FSDP_TP), (4, TP), (2, FSDP), (4, FSDP_TP)],
    "short": [(2, FSDP), (2, TP), (1, ())],
}


@pytest.mark.parametrize("name", [nightly(name) for name in MOVES])
def test_a_run_continues_on_any_mesh(train, name):
    """Each step has the same samples, and in fp64 the same loss; a stop in every stage but the last one."""
    stages = MOVES[name]
    words = [*SMALL, "logger.samples=true", f"trainer.max_steps={3 * len(stages)}"]
    words += [OWN] if name == "with weights that no plan names" else []
    code, straight, output = train("straight", *words)
    assert code == 0, output
    for number, (world_size, mesh) in enumerate(stages):
        last = number == len(stages) - 1
        act = "" if last else f"{world_size - 1}:2:SIGTERM"
        more = [] if number == 0 else ["resume.allow_config_change=true"]
        code, run, output = train("run", *words, *mesh, *more, world_size=world_size, TRIAL_ACT=act)
        assert code == (0 if last else 4), output
    assert len(run.attempts) == len(stages)
    assert taken(run) == taken(straight)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-9)
    for found, expected in zip(weights(run, run.steps[-1]), weights(straight, run.steps[-1]), strict=True):
        for tensor, value in expected.items():
            torch.testing.assert_close(found[tensor], value, rtol=1e-8, atol=1e-9, msg=tensor)


@pytest.mark.nightly
def test_weights_are_restored_bit_for_bit_on_every_mesh(train):
    """With a rate so small that no update changes a weight; the first checkpoint has the initial ones."""
    words = [*SMALL, "optimizer.lr=1e-30"]
    code, one, output = train("one", *words, "trainer.max_steps=1")
    assert code == 0, output
    expected, _ = weights(one, 1)
    for number, (world_size, mesh) in enumerate([(4, FSDP_TP), (2, TP), (3, FSDP), (4, TP), (2, ()), (4, FSDP_TP)]):
        more = ["resume.allow_config_change=true", f"trainer.max_steps={1 + number}"]
        more += ["trainer.global_batch_size=12"] if world_size == 3 else []
        code, run, output = train("run", *words, *mesh, *more, world_size=world_size)
        assert code == 0, output
        found, _ = weights(run, 1 + number)
        # biases are zeros at first, and move by the rate
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-25) for name, value in expected.items())


@pytest.mark.parametrize(
    ("stream", "world_size", "mesh"), [nightly(False, 2, TP), nightly(False, 4, FSDP_TP), nightly(True, 2, TP)]
)
def test_an_evaluation_sees_every_sample_once(train, stream, world_size, mesh):
    words = [
        *SMALL,
        "task._target_=tests.multiprocess.programs.counted.Counted",
        f"+task.stream={stream}",
        "trainer.max_steps=2",
    ]
    words += ["trainer.micro_batch_size=2"]
    code, one, output = train("one", *words)
    assert code == 0, output
    code, run, output = train("run", *words, *mesh, world_size=world_size)
    assert code == 0, output
    expected, found = ({**each.metrics[-1]} for each in (one, run))
    assert found.keys() == expected.keys() > {"eval/weighted", "eval/total/total", "eval/squares", "eval/seen"}
    assert found == pytest.approx(expected, rel=1e-9)
    states = [load(each.directory.checkpoint(2)).extra["task"] for each in (one, run)]
    assert sum(state["state"]["seen"] for state in states[1]) == states[0][0]["state"]["seen"]


@pytest.mark.nightly
def test_a_run_starts_from_the_weights_of_another(train):
    code, one, output = train("one", *SMALL, "trainer.max_steps=3")
    assert code == 0, output
    start = [*SMALL, f"init_from={one.directory.path}", "optimizer.lr=1e-30", "trainer.max_steps=1"]
    code, run, output = train("run", *start, *FSDP_TP, world_size=4)
    assert code == 0, output
    (expected, _), (found, _) = weights(one, 3), weights(run, 1)
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-25) for name, value in expected.items())


@pytest.mark.nightly
def test_callbacks_generate_text_and_read_whole_weights(train):
    words = [*SMALL, "trainer.max_steps=2", "callbacks=[log_text,log_weights]", "callbacks.log_text.prompt_tokens=4"]
    words += ["callbacks.log_text.new_tokens=3", "callbacks.log_weights.every_steps=2", "logger.tensorboard=true"]
    code, one, output = train("one", *words)
    assert code == 0, output
    code, run, output = train("run", *words, *FSDP_TP, world_size=4)
    assert code == 0, output
    norms = [[record for record in each.metrics if any("/norm" in name for name in record)] for each in (one, run)]
    for expected, found in zip(*norms, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    texts = [sorted(path.read_text() for path in each.directory.path.glob("media/**/*.txt")) for each in (one, run)]
    assert texts[0] == texts[1]
    assert texts[0]


def test_a_model_without_a_plan_is_refused(train):
    words = [
        "task=custom",
        "task._target_=tests.multiprocess.programs.trial.Trial",
        "logger.tensorboard=false",
        "trainer.max_steps=1",
    ]
    code, _, output = train("run", *words, *TP, world_size=2)
    assert code == 1, output
    assert "parallel.tensor_degree=2: neither Sequential nor Trial has a plan" in output
