"""Ranks that share the model train it as one device does, survive as DDP does, and resume on any mesh."""

from __future__ import annotations

import re

import pytest
import torch

from hpctrain import Run
from hpctrain.checkpoint.read import load
from hpctrain.launch.prepare import prepare
from tests.multiprocess.programs.compared_runs import losses, taken, weights

QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
)
TRAINING = (
    *QUIET,
    *("schedule=cosine", "optimizer.lr=0.01", "trainer.global_batch_size=12", "trainer.max_steps=14"),
    *("+task.num_samples=56", "+task.dropout=0.3", "+task.batchnorm=true", "+task.noise=true", "+task.width=18"),
    *("logger.every_steps=3", "trainer.ema_decay=0.9"),
)
"""Five steps an epoch, the last one partial; 18 is divided unevenly among 4 ranks."""
FSDP = ("parallel=fsdp",)
HSDP = ("parallel=mesh", "parallel.replicate_degree=2")


@pytest.fixture(scope="module")
def straight():
    """Uninterrupted runs, by world size and mesh: made once."""
    return {}


@pytest.fixture
def straight_run(straight, train):
    def run(world_size, words, training=TRAINING):
        if (key := (world_size, words, training)) not in straight:
            code, found, output = train(f"straight_{len(straight)}", *training, *words, world_size=world_size)
            assert code == 0, output
            straight[key] = (found.digest, found.metrics)
        return straight[key]

    return run


SMALL = (
    *QUIET,
    "task._target_=tests.multiprocess.programs.doubled.Doubled",
    "trainer.global_batch_size=16",
    "trainer.max_steps=20",
)
SMALL += ("logger.every_steps=1", "trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.8", "optimizer.lr=0.01")


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        nightly(2, (*FSDP, "trainer.activation_checkpointing=[blocks.*]", "parallel.blocks=[blocks.1]")),
        nightly(4, (*HSDP, "trainer.micro_batch_size=2", "parallel.prefetch_blocks=2")),
        nightly(4, (*HSDP, "trainer.micro_batch_size=2", "parallel.reshard_after_forward=false")),
        nightly(2, FSDP),
        nightly(4, HSDP),
        nightly(8, (*HSDP, "trainer.micro_batch_size=1")),
        nightly(8, FSDP),
        nightly(3, (*FSDP, "trainer.global_batch_size=48", "trainer.micro_batch_size=4")),
        nightly(2, (*FSDP, "parallel.keep_gradients_whole=true", "trainer.micro_batch_size=2")),
        nightly(2, (*FSDP, "optimizer=sgd", "optimizer.momentum=0.9")),
        nightly(2, (*FSDP, "trainer.clip_grad_norm=null", "trainer.clip_grad_value=0.001")),
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
    for found, expected in zip(weights(run, 20), weights(one, 20), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    evaluated = [[entry for entry in each.metrics if "eval/loss" in entry] for each in (run, one)]
    assert evaluated[0][-1]["eval/loss"] == pytest.approx(evaluated[1][-1]["eval/loss"], rel=1e-9)


STOPS = {
    (2, FSDP): ["1:1:SIGTERM", "0:3:SIGUSR2"],
    (4, HSDP): ["3:2:SIGTERM"],
    (4, FSDP): ["3:3:SIGTERM"],
    (8, HSDP): ["7:3:SIGTERM"],
    (2, (*FSDP, "precision=bf16")): ["1:2:SIGTERM"],
    (2, (*FSDP, "precision=bf16_pure")): ["1:2:SIGTERM"],
    (2, (*FSDP, "precision=fp16", "precision.loss_scale_growth_steps=3")): ["1:2:SIGTERM"],
    (2, (*FSDP, "optimizer=muon")): ["1:2:SIGTERM"],
}
GATE = [(2, FSDP)]


@pytest.mark.parametrize(("world_size", "words"), [key if key in GATE else nightly(*key) for key in STOPS], ids=str)
def test_an_interrupted_run_is_the_straight_run(train, straight_run, world_size, words):
    acts = STOPS[world_size, words]
    if world_size == 8:
        words = (*words, "trainer.global_batch_size=32")
    expected = straight_run(world_size, words)
    for number, act in enumerate([*acts, ""]):
        code, run, output = train("run", *TRAINING, *words, world_size=world_size, TRIAL_ACT=act)
        assert code == (4 if number < len(acts) else 0), output
    assert len(run.attempts) == len(acts) + 1
    assert (run.digest, run.metrics) == expected


@pytest.mark.nightly
def test_a_killed_run_continues_from_its_last_save(train, straight_run):
    expected = straight_run(2, FSDP)
    words = [*TRAINING, *FSDP, "checkpoint.every_steps=3", "checkpoint.asynchronous=false"]
    code, run, output = train("run", *words, world_size=2, TRIAL_ACT="0:8:SIGKILL,1:8:SIGKILL")
    assert code == -9, output
    assert run.steps == [3, 5, 6], "that of step 5 is the best"
    code, run, output = train("run", *words, world_size=2)
    assert code == 0, output
    assert (run.digest, run.metrics) == expected


MOVES = {
    "shrinks and grows": [(4, FSDP), (3, FSDP), (2, FSDP), (1, FSDP), (4, FSDP)],
    "changes its mesh": [(4, FSDP), (4, HSDP), (2, FSDP), (4, HSDP)],
    "from DDP and back": [(2, ()), (2, FSDP), (2, ()), (4, HSDP), (1, ())],
    "to one rank": [(2, ()), (2, FSDP), (1, ())],
}


@pytest.mark.parametrize("name", [name if name == "to one rank" else nightly(name) for name in MOVES])
def test_a_run_continues_on_any_mesh(train, name):
    """Each step has the same samples; a stop in every stage but the last one."""
    words = [*QUIET, "schedule=cosine", "optimizer.lr=0.01", "+task.num_samples=60", "+task.width=18"]
    words += ["trainer.global_batch_size=12", "trainer.micro_batch_size=1", "trainer.max_steps=20"]
    words += ["logger.samples=true", "logger.every_steps=1", "trainer.ema_decay=0.9"]
    code, straight, output = train("straight", *words)
    assert code == 0, output
    stages = MOVES[name]
    for number, (world_size, mesh) in enumerate(stages):
        last = number == len(stages) - 1
        act = "" if last else f"{world_size - 1}:{24 // world_size}:SIGTERM"
        more = [] if number == 0 else ["resume.allow_config_change=true"]
        code, run, output = train("run", *words, *mesh, *more, world_size=world_size, TRIAL_ACT=act)
        assert code == (0 if last else 4), output
    assert [start for start, _, _ in run.attempts] == [0, *(end for _, _, end in run.attempts[:-1])]
    assert taken(run) == taken(straight)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-3)
    for found, expected in zip(weights(run, 20), weights(straight, 20), strict=True):
        for tensor, value in expected.items():
            torch.testing.assert_close(found[tensor], value, rtol=1e-3, atol=1e-4, msg=tensor)


@pytest.mark.nightly
def test_weights_are_restored_bit_for_bit_on_every_mesh(train):
    """With a rate so small that no update changes a weight."""
    words = [*QUIET, "+task.width=18", "trainer.global_batch_size=12", "optimizer.lr=1e-30"]
    code, run, output = train("run", *words, "trainer.max_steps=1", world_size=2)
    assert code == 0, output
    expected, _ = weights(run, 1)
    for number, (world_size, mesh) in enumerate([(4, FSDP), (3, FSDP), (4, HSDP), (2, ()), (1, FSDP)]):
        more = ["resume.allow_config_change=true", f"trainer.max_steps={2 + number}"]
        code, run, output = train("run", *words, *mesh, *more, world_size=world_size)
        assert code == 0, output
        found, _ = weights(run, 2 + number)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("stream", "micro", "world_size"),
    [nightly(False, 1, 4), nightly(True, 2, 3), nightly(False, 4, 4)],
)
def test_an_evaluation_sees_every_sample_once_and_a_rank_without_one_leaves_no_trace(train, stream, micro, world_size):
    words = [
        *SMALL,
        "task._target_=tests.multiprocess.programs.counted.Counted",
        f"+task.stream={stream}",
        "trainer.max_steps=2",
    ]
    words += ["trainer.global_batch_size=48", f"trainer.micro_batch_size={micro}"]
    code, one, output = train("one", *words)
    assert code == 0, output
    code, run, output = train("run", *words, *FSDP, world_size=world_size)
    assert code == 0, output
    expected, found = ({**each.metrics[-1]} for each in (one, run))
    assert found.keys() == expected.keys() > {"eval/weighted", "eval/total/total", "eval/squares", "eval/seen"}
    assert found == pytest.approx(expected, rel=1e-9)
    states = [load(each.directory.checkpoint(2)).extra["task"] for each in (one, run)]
    assert sum(state["state"]["seen"] for state in states[1]) == states[0][0]["state"]["seen"]


@pytest.mark.nightly
def test_callbacks_that_call_the_model_do_so_on_every_rank(train):
    words = [
        *SMALL,
        "task._target_=tests.multiprocess.programs.doubled.Doubled",
        "trainer.max_steps=4",
        "trainer.eval_every_steps=2",
    ]
    words += [
        "callbacks=[log_text,log_weights]",
        "callbacks.log_text.new_tokens=3",
        "callbacks.log_text.prompt_tokens=4",
    ]
    words += [
        "callbacks.log_weights.every_steps=2",
        "callbacks.log_weights.histograms=false",
        "logger.tensorboard=true",
    ]
    code, one, output = train("one", *words)
    assert code == 0, output
    code, run, output = train("run", *words, *FSDP, world_size=2)
    assert code == 0, output
    norms = [[record for record in each.metrics if any("/norm" in name for name in record)] for each in (one, run)]
    assert len(norms[0]) > 1
    for expected, found in zip(*norms, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    texts = [sorted(path.read_text() for path in each.directory.path.glob("media/**/*.txt")) for each in (one, run)]
    assert texts[0] == texts[1]


@pytest.mark.nightly
def test_one_process_loads_the_model_and_its_average(train):
    code, run, output = train("run", *SMALL, *FSDP, "trainer.max_steps=4", world_size=2)
    assert code == 0, output
    tensors, averages = weights(run, 4)
    loaded = Run(run.directory.path)
    for averaged, expected in ((False, tensors), (True, averages)):
        model = loaded.load_model(ema=averaged)
        assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@pytest.mark.nightly
def test_a_diverged_run_names_the_last_checkpoint_with_finite_weights(train):
    words = [*TRAINING, *FSDP, "checkpoint.every_steps=2", "checkpoint.asynchronous=false", "logger.every_steps=100"]
    code, _, output = train("run", *words, world_size=2, TRIAL_ACT="0:6:poison,1:6:poison")
    assert code == 1, output
    assert "the last good checkpoint is of step 5" in output  # the best, after the evaluation of the epoch


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["task._target_=tests.multiprocess.programs.doubled.Teacher"], r"changed weights in place \(teacher\)"),
        nightly(["parallel.blocks=[tokens]"], "leave that module out of parallel.blocks"),
    ],
)
def test_what_a_shard_can_not_do_is_an_error_of_the_task(train, words, problem):
    code, _, output = train("run", *SMALL, *FSDP, *words, "trainer.max_steps=2", world_size=2)
    assert code == 1, output
    assert re.search(problem, output), output


@pytest.mark.parametrize(
    "words",
    [
        (*HSDP, "task._target_=tests.multiprocess.programs.building.Keeping"),
        nightly((*FSDP, "task._target_=tests.multiprocess.programs.building.Keeping", "+task.reads=true")),
        nightly((*FSDP, "task._target_=tests.multiprocess.programs.divided.Single", "precision=bf16_pure")),
        nightly((*FSDP, "task._target_=tests.multiprocess.programs.doubled.Doubled")),
        nightly(
            ("parallel=fsdp_tp", "parallel.tensor_degree=2", "task._target_=tests.multiprocess.programs.divided.Single")
        ),
        nightly(
            ("parallel=mesh", "parallel.pipeline_degree=2", "task._target_=tests.multiprocess.programs.divided.Single")
        ),
    ],
    ids=" ".join,
)
def test_initial_values_are_those_of_an_ordinary_build(ranks, composer, tmp_path, words):
    given = ["task=custom", "trainer.ema_decay=0.9", "trainer.global_batch_size=8", *words]
    config = composer.compose([f"run_dir={tmp_path / 'run'}", *given], world_size=4)
    prepare(config, given)
    parallel = config.parallel
    degrees = {key: getattr(parallel, key) for key in ("replicate_degree", "tensor_degree", "pipeline_degree")}
    for rank, done in enumerate(ranks("building:compare", str(tmp_path / "run"), degrees, world_size=4)):
        assert done.code == 0, done.output
        assert done.result["new"] == []
        assert done.result["resumed"], "nothing was left to the checkpoint"
        assert set(done.result["resumed"]) <= set(done.result["saved"])
        assert ("can't build it: RuntimeError" in done.output) == ("+task.reads=true" in words and rank > 0)
