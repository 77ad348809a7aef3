from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from torch import nn

from hpctrain.config.mesh import MeshShape
from hpctrain.config.parallel import Parallel
from hpctrain.parallel.fsdp import FsdpReplica, ShardedLossModule
from hpctrain.parallel.mesh import Mesh
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.train.start_table import log_start
from hpctrain.train.training import build


@pytest.fixture
def table(compose_small, lone_world, directory, caplog):
    """Logs the table of a run; its rows by name."""

    def rows(*words, world=lone_world, **options):
        caplog.clear()
        given = {"step": 5, "hosts": ["here"], "flops_per_sample": None, **options}
        with caplog.at_level(logging.INFO, "hpctrain.train"):
            log_start(build(compose_small(*words), world), Claim(Ledger(directory), 2), **given)
        return {line[:12].strip(): line[12:] for line in caplog.messages}

    return rows


def test_it_has_what_runs_where_and_how_it_is_divided(table, directory):
    found = table()
    assert found["run"] == f"{directory.as_typed}, attempt 2, steps 5 to 10"
    assert found["task"] == "tests.unit.train.small_task.Small"
    assert found["model"].endswith("Sequential: 67 parameters, 67 of them trained")
    assert found["where"] == "1 rank on here: CPU, 1 CPU core each"
    assert found["batch"] == "6 samples per step = 3 per forward x 2 accumulated x 1 rank"
    assert found["data"] == "24 samples, 4 steps per epoch, 2.5 epochs; fetched by the ranks"
    times = "every 5 steps, every 15 min, after each evaluation that is the best so far (2 to come) and at the end"
    assert found["checkpoints"].startswith(f"{times}, written in the background")
    assert found["disk"].startswith("at most 4 x 804 B = 3.22 kB, 804 B of it for the best; ")
    assert "flops" not in found
    assert "eval mode" not in found


def test_it_draws_the_mesh(lone_world):
    shared = dataclasses.replace(lone_world, size=4, mesh=Mesh(MeshShape(1, 2, 2), None, None))
    replica = FsdpReplica(ShardedLossModule(nn.Identity()), shared, Parallel())
    assert replica.describe(["n1"] * 4) == (
        "1 replica of the model, each shared by 4 ranks, 2 of which compute each layer together: "
        "replica 0: ranks 0-3 on n1"
    )


def test_variables_of_nccl_that_the_user_set_are_named(table, lone_world, monkeypatch):
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1")
    assert "nccl" not in table()
    assert table(world=dataclasses.replace(lone_world, backend="nccl"))["nccl"] == (
        "kept from your environment: NCCL_ASYNC_ERROR_HANDLING=3 (hpctrain's default: 0), "
        "TORCH_NCCL_RETHROW_CUDA_ERRORS=1 (hpctrain's default: 0)"
    )
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    assert "nccl" not in table(world=dataclasses.replace(lone_world, backend="nccl"))


class Undecayed(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=None):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self):
        pass


def test_named_optimizers_show_their_loss_and_when_they_step(table):
    entry = "_target_: torch.optim.SGD, lr: 0.1"
    last = f"{entry}, loss: second_loss, every_steps: 2, schedule: {{kind: cosine, warmup_steps: 1}}"
    named = f'optimizer.named={{first: {{{entry}, match: "0.*"}}, last: {{{last}}}}}'
    found = table("task._target_=tests.unit.train.small_task.TwoLosses", "optimizer=named", named, "schedule=constant")
    assert found["optimizer 0"] == "first: SGD minimises loss in every step, schedule constant"
    assert found["optimizer 1"] == "last: SGD minimises second_loss every 2 steps, schedule cosine of its own"


def test_a_weight_decay_need_not_be_a_number(table):
    words = ["optimizer=custom", f"optimizer._target_={__name__}.Undecayed", 'optimizer.groups=[{match: "2.*"}]']
    assert table(*words)["group 1"].endswith("lr 0.001")


def test_modules_in_evaluation_mode_are_listed(table):
    assert table("+task.frozen=true")["eval mode"] == "1 of 4 modules: 1"


def test_flops_that_an_earlier_attempt_counted_are_shown(table):
    assert "320 FLOP per sample" in table(flops_per_sample=320.0)["flops"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["checkpoint.auto=true", "checkpoint.every_steps=null", "checkpoint.keep_best=0"],
            "as often as it pays and at the end, ",
        ),
        (["checkpoint.asynchronous=false"], "written while training waits"),
        (["checkpoint.keep_every=20", "checkpoint.keep_best=1"], "those of every 20 steps and the best 1 are kept"),
    ],
)
def test_the_plan_of_saves(table, words, expected):
    assert expected in table(*words)["checkpoints"]
