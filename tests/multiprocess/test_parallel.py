"""Options of the model and of its replicas: most change no bit of the weights, and none changes what is learned."""

from __future__ import annotations

import pytest
import torch

from hpctrain.run.ledger import Ledger

QUIET = ("task=custom", "task._target_=trial.Trial", "logger.tensorboard=false")
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
        (2, ["trainer.activation_checkpointing=['*']", "parallel.static_graph=true"]),
        (1, ["trainer.deterministic=true"]),
        (2, ["trainer.log_grad_norm=true"]),
        (1, ["optimizer.no_decay_norm_bias=false", "optimizer.lr_scaling=none"]),
        nightly(1, ["cluster.gpus_per_process=2", "task._target_=spread.Spread"]),
        (2, ["cluster.gpus_per_process=2", "task._target_=spread.Spread"]),
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
    words = [*QUIET, *TRAINING, "task._target_=unused.Unused"]
    code, run, output = train("run", *words, world_size=2)
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    problem = "Unused.loss gave no gradient to unused, which it trains: freeze them, or set parallel.find_unused_"
    assert problem in attempt.detail
    assert problem in output
    assert "Traceback" not in output
    code, _, output = train("again", *words, "parallel.find_unused_parameters=true", world_size=2)
    assert code == 0, output
