"""Ranks that have built something else than the others are named, before a hang or a wrong result."""

from __future__ import annotations

import pytest

from tests.multiprocess.programs.differing import CASES

SAME_DATA = "every rank must build the same dataset: sort lists of files, and don't split samples by rank"
WORDS = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.differing.Differing",
        "logger.tensorboard=false",
        "checkpoint.every_steps=2",
    ),
    *("trainer.global_batch_size=8", "trainer.max_steps=4", "trainer.max_epochs=null"),
)


@pytest.mark.parametrize("odd_rank", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_the_first_difference_is_named_on_every_rank_and_what_may_differ_is_not(ranks, odd_rank):
    # a rank that needs seconds for a sample
    kinds = [case for case in CASES if case != ("samples", "slow") or not odd_rank]
    done = ranks("differing:be_rank", odd_rank, kinds, world_size=3)
    assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
    errors = done[0].result
    assert all(process.result == errors for process in done)
    tolerated = {
        "dataset class",
        *("dataset ", "model ", "metrics ", "samples ", "stream ", "model ignored", "stream unseeded"),
        *(f"samples {kind}" for kind in ("missing", "slow", "digits", "unseeded", "seldom", "seeded")),
        *(f"samples {kind}" for kind in ("paths", "nan", "objects")),
    }
    assert {f"{what} {kind}" for what, kind in CASES} - errors.keys() == tolerated
    if odd_rank:
        assert errors["dataset length"] == (
            f"rank 1 differs from rank 0 in the number of training samples: it has 1,000, rank 0 has 1,200; {SAME_DATA}"
        )
        assert errors["dataset none"].startswith("rank 1 differs from rank 0 in the training data: it has none")
        assert "the parameter 0.weight: it has [3, 5] of float32, rank 0 has [3, 4] of fl" in errors["model shape"]
        assert "in the buffer 1.seen, which rank 0 doesn't have; every rank must build the" in errors["model buffer"]
        assert "in the metric b, which only rank 0 has; Task.build_metrics must" in errors["metrics fewer"]
        assert "in the order: it has the metric b in the place of the metric a" in errors["metrics order"]
        assert (
            errors["samples label"] == f"rank 1 differs from rank 0 in the content of training sample 49; {SAME_DATA}"
        )
    else:
        assert errors["dataset length"].startswith("ranks 1, 2 differ from rank 0 in the number of training samples:")
        assert errors["samples reversed"].startswith("ranks 1, 2 differ from rank 0 in the content of training")


KINDS = {
    "train_length": "in the number of training samples: it has 39, rank 0 has 40",
    "no_train": "in the training data: it has none",
    "train_order": "in the content of training sample 0",
    "order": "in the order of the training samples: it has 39, 38",
    "no_eval": "in the held-out data: it has none",
    "eval_length": "in the number of held-out samples: it has 6, rank 0 has 7",
    "eval_order": "in the content of held-out sample 0",
    "model": "in the parameter 0.bias, which only rank 0 has",
    "metrics": "in the metric total, which only rank 0 has",
    "evaluate": "in the metrics of Differing.evaluate: it has own_",
    "metric_state": "in the metric total: Total.total: it has [2] of float32",
}


@pytest.mark.parametrize("kind", ["train_length", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS)])
def test_a_run_whose_ranks_differ_fails_at_its_start(train, kind):
    code, run, output = train("run", *WORDS, f"+task.kind={kind}", world_size=2)
    assert (code, run.attempts) == (1, [(0, "failed", 0)]), output
    assert f"rank 1 differs from rank 0 {KINDS[kind]}" in output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, ["parallel=mesh"]),
        (2, ["parallel=mesh", "parallel.pipeline_degree=2", "parallel.shard_degree=1"]),
        (2, ["precision=fp16_master"]),
        (3, ["trainer.global_batch_size=9"]),
    ],
)
def test_however_ranks_share_the_model_and_in_a_resume(train, world_size, words):
    words = [*WORDS, *words]
    code, run, output = train("run", *words, "trainer.max_steps=2", world_size=world_size)
    assert code == 0, output
    code, run, output = train("run", *words, world_size=world_size, DIFFERING="model")
    assert (code, run.attempts[-1][1]) == (1, "failed"), output
    assert f"rank 1 differs from rank 0 {KINDS['model']}" in output
