"""Options of the model and of its replicas: most change no bit of the weights, and none changes what is learned."""

from __future__ import annotations

import pytest
import torch

from hpctrain.run.ledger import Ledger

QUIET = ("task=custom", "task._target_=tests.multiprocess.programs.trial.Trial", "logger.tensorboard=false")
TRAINING = (
    *("+task.dropout=0.3", "+task.batchnorm=true", "schedule=cosine", "optimizer.lr=0.01"),
    *("trainer.global_batch_size=8", "trainer.max_steps=12", "logger.every_steps=3"),
)


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def weights(run, step=12):
    saved = torch.load(run.directory.checkpoint(step) / "model.pt", weights_only=True)
    return {name: value.float() for name, value in saved.items()}


@pytest.fixture
def trained(train):
    def run(name, *words, world_size):
        code, found, output = train(name, *QUIET, *TRAINING, *words, world_size=world_size)
        assert code == 0, output
        return found, output

    return run


@pytest.fixture(scope="module")
def plain():
    """Weights of runs without these options, by world size and accumulation; each run is made once."""
    return {}


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (1, ["trainer.activation_checkpointing=[0,1,'?']"]),
        nightly(2, ["trainer.activation_checkpointing=['*']"]),
        nightly(2, ["parallel.static_graph=true"]),
        (2, ["parallel.static_graph=true", "trainer.micro_batch_size=2"]),
        (2, ["parallel.gradient_as_bucket_view=false", "parallel.bucket_cap_mb=1"]),
        nightly(2, ["trainer.activation_checkpointing=['*']", "parallel.static_graph=true"]),
        (1, ["trainer.deterministic=true"]),
        nightly(2, ["trainer.log_grad_norm=true"]),
        nightly(1, ["optimizer.no_decay_norm_bias=false", "optimizer.lr_scaling=none"]),
        nightly(1, ["cluster.gpus_per_process=2", "task._target_=tests.multiprocess.programs.spread.Spread"]),
        (2, ["cluster.gpus_per_process=2", "task._target_=tests.multiprocess.programs.spread.Spread"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_options_that_change_no_bit(trained, plain, world_size, words):
    arithmetic = [word for word in words if "micro_batch_size" in word]
    key = (world_size, *arithmetic)
    if key not in plain:
        plain[key] = list(weights(trained("plain", *arithmetic, world_size=world_size)[0]).values())
    found = list(weights(trained("run", *words, world_size=world_size)[0]).values())
    assert all(torch.equal(value, expected) for value, expected in zip(found, plain[key], strict=True))


def test_compressed_gradients_lose_digits_and_nothing_else(trained):
    exact = weights(trained("plain", world_size=2)[0])
    run, _ = trained("run", "parallel.gradient_compression=fp16", world_size=2)
    found = weights(run)
    assert any(not torch.equal(found[name], exact[name]) for name in exact)
    assert all(torch.allclose(found[name], exact[name], atol=0.05) for name in exact)


def test_a_task_that_does_not_spread_its_model(train):
    code, _, output = train("run", *QUIET, "cluster.gpus_per_process=2")
    assert code == 1
    assert "define Trial.place, or set cluster.gpus_per_process=1" in output


def test_a_parameter_without_a_gradient_is_named_with_the_key(train):
    words = [*QUIET, *TRAINING, "task._target_=tests.multiprocess.programs.unused.Unused"]
    code, run, output = train("run", *words, world_size=2)
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    problem = "Unused.loss gave no gradient to unused, which it trains: freeze them, or set parallel.find_unused_"
    assert problem in attempt.detail
    assert problem in output
    assert "Traceback" not in output
    code, _, output = train("again", *words, "parallel.find_unused_parameters=true", world_size=2)
    assert code == 0, output


UNTARGETED = (
    "task._target_=tests.multiprocess.programs.unused.Untargeted",
    "trainer.max_steps=8",
    "trainer.global_batch_size=8",
)
HALVES = "trainer.micro_batch_size=2"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "micro_batch", "alone"),
    [
        ([], 0, 1),
        (["parallel.find_unused_parameters=true"], 0, 1),
        (["parallel.static_graph=true"], 0, 1),
        (["parallel.gradient_as_bucket_view=false", HALVES], 1, 3),
        (["precision=bf16"], 0, 1),
        ([HALVES], 0, 1),
        ([HALVES], 1, 3),
    ],
)
def test_a_rank_with_nothing_to_learn_from_adds_zeros(train, words, micro_batch, alone):
    code, run, output = train("two", *QUIET, *UNTARGETED, *words, f"+task.micro_batch={micro_batch}", world_size=2)
    assert code == 0, output
    # one rank, in a micro-batch with the same samples
    words = ["trainer.micro_batch_size=4", *(word for word in words if not word.startswith("parallel."))]
    code, one, output = train("one", *QUIET, *UNTARGETED, *words, f"+task.micro_batch={alone}")
    assert code == 0, output
    found, expected = weights(run, 8), weights(one, 8)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["+task.kind=computed"], "to 0.weight, 0.bias, 3.weight, 3.bias, which it trains; other ranks wait for it"),
        (["+task.kind=computed", HALVES], "which it trains; other ranks wait for it"),
        (["+task.kind=computed", "parallel.static_graph=true"], "which it trains; other ranks wait for it"),
        (["+task.kind=computed", "parallel.find_unused_parameters=true"], "which it trains; other ranks wait for it"),
        (["+task.kind=part"], "to 3.weight, 3.bias, which it trains: freeze them, or set parallel.find_unused"),
        (["+task.kind=part", HALVES], "to 3.weight, 3.bias, which it trains: freeze them, or set parallel.find_unused"),
        (["parallel=fsdp", "parallel.shard_degree=2"], "which it trains; other ranks wait for it"),
        (["parallel=fsdp", "parallel.shard_degree=2", HALVES, "+task.micro_batch=0"], "other ranks wait for it"),
        (
            ["parallel=fsdp", "parallel.shard_degree=2", "+task.kind=computed"],
            "which it trains; other ranks wait for it",
        ),
    ],
)
def test_a_rank_whose_gradients_others_wait_for_in_vain_fails(train, words, problem):
    code, run, output = train("run", *QUIET, *UNTARGETED, *words, world_size=2, alike=False)
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    assert str(attempt.reason) == "failed"
    assert "rank 1 on" in attempt.detail
    assert f"Untargeted.loss gave no gradient {'' if problem.startswith('to') else 'to '}" in attempt.detail
    assert problem in attempt.detail
