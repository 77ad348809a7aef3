"""Ranks of which each has some of the layers train as one device does, survive, and resume on any mesh."""

from __future__ import annotations

import pytest
import torch

from tests.multiprocess.programs.compared_runs import losses, taken, weights

QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.piped.Piped",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
)
SMALL = (*QUIET, "trainer.global_batch_size=16", "trainer.max_steps=20", "logger.every_steps=1", "optimizer.lr=0.01")
SMALL += ("trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.8", "trainer.micro_batch_size=2")
PP = ("parallel=pp",)
INTERLEAVED = (*PP, "parallel.stages_per_rank=2")
PP_FSDP = ("parallel=mesh", "parallel.pipeline_degree=2")
PP_TP = ("parallel=mesh", "parallel.pipeline_degree=2", "parallel.shard_degree=1", "parallel.tensor_degree=2")
ALL = ("parallel=mesh", "parallel.pipeline_degree=2", "parallel.tensor_degree=2", "parallel.shard_degree=2")
HSDP = ("parallel=mesh", "parallel.pipeline_degree=2", "parallel.replicate_degree=2", "parallel.shard_degree=1")
CHAIN = "task._target_=tests.multiprocess.programs.piped.Chain"
NORMED = "task._target_=tests.multiprocess.programs.piped.Normed"
ADAGRAD = ("optimizer=custom", "optimizer._target_=torch.optim.Adagrad", "+optimizer.eps=0.001")


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, INTERLEAVED),
        nightly(2, PP),
        nightly(4, PP),
        nightly(3, (*PP, "trainer.micro_batch_size=8")),
        nightly(4, PP_FSDP),
        nightly(4, (*PP_FSDP, "parallel.stages_per_rank=2", "parallel.keep_gradients_whole=true")),
        nightly(4, HSDP),
        # groups of parameters that are in no block, of different stages
        nightly(4, (*HSDP, "parallel.stages_per_rank=2")),
        # a stage before the last one has a batch norm; two stages have no parameters
        nightly(2, (*PP, NORMED, "trainer.micro_batch_size=8", "parallel.stages=[4]")),
        nightly(4, (*PP, NORMED, "trainer.micro_batch_size=8", "parallel.stages=[1,2,5]", *ADAGRAD)),
        nightly(4, PP_TP),
        nightly(8, ALL),
        nightly(2, (*PP, "+task.packed=true", "trainer.activation_checkpointing=[blocks.*]")),
        nightly(2, (*PP, CHAIN)),
        nightly(2, (*INTERLEAVED, CHAIN, "trainer.global_batch_size=10", "trainer.micro_batch_size=5")),
        nightly(2, (*PP, "parallel.stages=[blocks.0]", "trainer.clip_grad_norm=null", "optimizer=sgd")),
        nightly(2, (*PP, "optimizer.groups=[{match:[blocks.*],lr_factor:0.5},{match:[places.*],frozen:true}]")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_losses_of_one_device(train, world_size, words):
    """In fp64, so that only mistakes differ: the order of sums changes the last digits."""
    given = [word for word in words if not word.startswith("parallel")]
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
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9, msg=name)
    evaluated = [[entry for entry in each.metrics if "eval/loss" in entry] for each in (run, one)]
    assert evaluated[0][-1]["eval/loss"] == pytest.approx(evaluated[1][-1]["eval/loss"], rel=1e-9)


HALF = "task._target_=tests.multiprocess.programs.piped.Half"
STOPS = {
    (2, PP): ["1:3:SIGTERM"],
    (2, (*INTERLEAVED, "+task.dropout=0.3", "+task.masked=true")): ["0:9:SIGTERM"],
    (4, (*PP, "+task.dropout=0.3")): ["3:2:SIGTERM", "0:1:SIGUSR2"],
    (4, (*PP_FSDP, "precision=bf16", HALF)): ["1:2:SIGTERM"],
    (4, (*PP_TP, "precision=bf16_pure", HALF)): ["1:2:SIGTERM"],
    (4, (*PP_FSDP, "precision=fp16", HALF)): ["1:2:SIGTERM"],
    (8, ALL): ["5:3:SIGTERM"],
    (4, (*HSDP, NORMED)): ["0:2:SIGTERM"],
}
GATE = [(2, PP)]


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
    words = [*SMALL, *PP_FSDP, "trainer.max_steps=8"]
    code, straight, output = train("straight", *words, world_size=4)
    assert code == 0, output
    words += ["checkpoint.every_steps=3", "checkpoint.asynchronous=false"]
    # in the eighth step, of four micro-batches; the first stage gets there first, and others may notice its end
    kills = ",".join(f"{rank}:30:SIGKILL" for rank in range(4))
    code, run, output = train("run", *words, world_size=4, alike=False, TRIAL_ACT=kills)
    assert code == -9, output
    assert run.steps == [3, 6]
    code, run, output = train("run", *words, world_size=4)
    assert code == 0, output
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)


FSDP = ("parallel=fsdp",)
MOVES = {
    "through every kind": [(2, FSDP), (2, PP), (4, PP_FSDP), (2, ()), (4, PP_TP), (2, INTERLEAVED)],
    "from one device and back": [(1, ()), (2, PP), (1, ()), (4, PP), (2, ("parallel=tp",))],
    "short": [(2, PP), (2, FSDP)],
}


@pytest.mark.parametrize("name", [nightly(name) for name in MOVES])
def test_a_run_continues_on_any_mesh(train, name):
    """Each step has the same samples, and in fp64 the same loss; a stop in every stage but the last one."""
    places = MOVES[name]
    words = [*SMALL, "logger.samples=true", f"trainer.max_steps={3 * len(places)}"]
    code, straight, output = train("straight", *words)
    assert code == 0, output
    for number, (world_size, mesh) in enumerate(places):
        last = number == len(places) - 1
        act = "" if last else f"{world_size - 1}:2:SIGTERM"
        more = [] if number == 0 else ["resume.allow_config_change=true"]
        code, run, output = train("run", *words, *mesh, *more, world_size=world_size, TRIAL_ACT=act)
        assert code == (0 if last else 4), output
    assert len(run.attempts) == len(places)
    assert taken(run) == taken(straight)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-9)
    for found, expected in zip(weights(run, run.steps[-1]), weights(straight, run.steps[-1]), strict=True):
        for tensor, value in expected.items():
            torch.testing.assert_close(found[tensor], value, rtol=1e-8, atol=1e-9, msg=tensor)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_of_a_pipeline_have_the_same_samples(train, tmp_path, workers):
    """What loading draws in a rank's own process is the same in all stages, and differs between steps."""
    words = [
        *SMALL,
        "task._target_=tests.multiprocess.programs.piped.Drawing",
        "trainer.max_steps=3",
        f"data.num_workers={workers}",
    ]
    code, _, output = train("run", *words, *INTERLEAVED, world_size=2, DRAWN=str(tmp_path / "drawn"))
    assert code == 0, output
    first, second = (set((tmp_path / f"drawn_{rank}").read_text().split()) for rank in range(2))
    assert first == second
    assert len(first) > 12


@pytest.mark.parametrize(("stream", "mesh"), [nightly(False, PP), nightly(True, INTERLEAVED)])
def test_an_evaluation_sees_every_sample_once(train, stream, mesh):
    words = [
        *SMALL,
        "task._target_=tests.multiprocess.programs.counted.Counted",
        f"+task.stream={stream}",
        "trainer.max_steps=2",
    ]
    code, one, output = train("one", *words)
    assert code == 0, output
    code, run, output = train("run", *words, *mesh, world_size=2)
    assert code == 0, output
    expected, found = ({**each.metrics[-1]} for each in (one, run))
    assert found.keys() == expected.keys() > {"eval/weighted", "eval/total/total", "eval/squares", "eval/seen"}
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.nightly
def test_a_run_starts_from_the_weights_of_another(train):
    code, one, output = train("one", *SMALL, "trainer.max_steps=3")
    assert code == 0, output
    start = [*SMALL, f"init_from={one.directory.path}", "optimizer.lr=1e-30", "trainer.max_steps=1"]
    code, run, output = train("run", *start, *PP_FSDP, world_size=4)
    assert code == 0, output
    (expected, _), (found, _) = weights(one, 3), weights(run, 1)
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-25) for name, value in expected.items())


@pytest.mark.nightly
def test_callbacks_generate_text(train):
    words = [*SMALL, "trainer.max_steps=2", "callbacks=[log_text]", "callbacks.log_text.prompt_tokens=4"]
    words += ["callbacks.log_text.new_tokens=3", "logger.tensorboard=true"]
    code, one, output = train("one", *words)
    assert code == 0, output
    code, run, output = train("run", *words, *INTERLEAVED, world_size=2)
    assert code == 0, output
    texts = [sorted(path.read_text() for path in each.directory.path.glob("media/**/*.txt")) for each in (one, run)]
    assert texts[0] == texts[1]
    assert texts[0]


REFUSED = {
    "task._target_=tests.multiprocess.programs.piped.Twice": "this task calls it twice",
    "task._target_=tests.multiprocess.programs.piped.Parts": "this task hasn't called it, or only its parts",
}


@pytest.mark.nightly
@pytest.mark.parametrize("target", REFUSED)
def test_what_a_pipeline_cannot_compute_is_refused(train, target):
    code, _, output = train("run", *SMALL, target, "trainer.max_steps=1", *PP, world_size=2)
    assert code == 1, output
    assert REFUSED[target] in output
