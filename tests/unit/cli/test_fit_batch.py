from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.cli.fit_batch import BatchSearch, BatchTrial, _advice, _answer
from hpctrain.config.compose import Composer
from tests.unit.greedy import WORDS

UNIT = Path(__file__).parents[1]
CUDA_GRAPHS = ("trainer.compile=true", "trainer.compile_mode=max-autotune")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly  # several processes that import torch
def test_the_largest_that_fits_into_what_is_given(folder, capfd):
    words = [*WORDS, "+task.mb=250", "trainer.global_batch_size=12", "--memory-gb", "1.2", "--margin", "0"]
    assert main(["fit-batch", *words, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    # what torch takes itself isn't the same everywhere
    assert answer["largest"] == answer["trainer.micro_batch_size"] in {2, 3}
    assert answer["limit_bytes"] == 1.2e9
    peaks = {one["micro_batch_size"]: one["peak_bytes"] for one in answer["trials"] if not one["predicted"]}
    assert peaks[2] - peaks[1] == pytest.approx(2.5e8, rel=0.2)
    assert max(peaks) <= 3
    assert list(folder.iterdir()) == []


@pytest.mark.nightly
def test_a_size_whose_process_is_killed_does_not_fit(folder, capfd):
    words = [*WORDS, "+task.mb=1", "+task.dies_at=2", "--largest", "2"]
    assert main(["fit-batch", *words]) == 0
    out = capfd.readouterr().out
    assert "2          -           -  too large: killed by signal 9" in out
    assert "largest that fits: 1\n" in out
    assert "with trainer.global_batch_size=64 and 1 rank: trainer.micro_batch_size=1" in out


@pytest.mark.parametrize(
    ("words", "fits", "lines"),
    [
        (
            ["trainer.global_batch_size=8"],
            8,
            [
                "largest that fits: 8, a rank's whole share of a step; to go higher, raise trainer.global_batch_size",
                "with trainer.global_batch_size=8 and 1 rank: trainer.micro_batch_size=8, which the run already uses",
                "sizes above 2 are less than 5% faster",
            ],
        ),
        (
            ["trainer.global_batch_size=8", "cluster.processes_per_node=2"],
            64,
            [
                "largest that fits: 64, and no larger one was tried (--largest, or the number of samples)",
                "with trainer.global_batch_size=8 and 2 ranks: trainer.micro_batch_size=4, which the run already uses",
                "sizes above 2 are less than 5% faster",
            ],
        ),
        (
            ["trainer.global_batch_size=128", "trainer.micro_batch_size=2"],
            64,
            [
                "largest that fits: 64, and no larger one was tried (--largest, or the number of samples)",
                "with trainer.global_batch_size=128 and 1 rank: trainer.micro_batch_size=64",
                "sizes above 16 are less than 5% faster",
            ],
        ),
        (
            [*CUDA_GRAPHS, "trainer.global_batch_size=96", "cluster.processes_per_node=3"],
            16,
            [
                "largest that fits: 16",
                (
                    "with trainer.global_batch_size=96 and 3 ranks: no micro-batch size works, because "
                    "trainer.compile_mode=max-autotune doesn't allow accumulation, and a rank's whole share (32) "
                    "doesn't fit; lower trainer.global_batch_size to at most 48, or set trainer.compile_mode=default"
                ),
            ],
        ),
        (
            [*CUDA_GRAPHS, "trainer.global_batch_size=16"],
            16,
            [
                "largest that fits: 16, a rank's whole share of a step; to go higher, raise trainer.global_batch_size",
                "with trainer.global_batch_size=16 and 1 rank: trainer.micro_batch_size=16, which the run already uses",
            ],
        ),
    ],
)
def test_the_advice_is_for_the_global_batch(words, fits, lines):
    config = Composer().compose(words)
    ranks = config.cluster.processes_per_node or 1
    search = BatchSearch(limit_bytes=1, largest=64, careful=True)
    rates = {1: 10.0, 2: 98.0, 4: 100.0, 8: 100.0, 16: 300.0, 32: 301.0, 64: 302.0}
    for size in (size for size in rates if size <= fits):
        search.record(BatchTrial(micro_batch_size=size, fits=True, peak_bytes=size, samples_per_s=rates[size]))
    assert _advice(config, search, _answer(config, search, ranks), ranks, ranks).splitlines() == lines


def test_not_even_one_sample(folder, capfd):
    assert main(["fit-batch", *WORDS, "--memory-gb", "0.01"]) == 1
    assert "not even one sample fits" in capfd.readouterr().out


@pytest.mark.nightly
def test_one_rank_of_a_mesh(folder, capfd):
    words = ["task=text", "parallel=fsdp", "--ranks", "4", "--largest", "2"]
    assert main(["fit-batch", *words, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["largest"], answer["trainer.micro_batch_size"]) == (2, 2)
    assert "degrees" not in answer
    assert main(["fit-batch", *words]) == 0
    out = capfd.readouterr().out
    assert "with micro-batches of 2, in GB: weights 0.00, gradients 0.00, optimizer 0.00; activations" in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["parallel=fsdp_tp", "parallel.tensor_degree=2", "--ranks", "4"], 2),
        (["parallel=fsdp_tp", "cluster.processes_per_node=2", "precision=fp16", "--ranks", "4"], 2),
        (["parallel=tp", "cluster.processes_per_node=2"], 4),
    ],
)
def test_one_rank_of_several_that_compute_layers_together(folder, capfd, words, samples):
    """What the layers compute is wrong without the others."""
    words = ["task=text", "trainer.global_batch_size=4", *words, "--memory-gb", "8"]
    assert main(["fit-batch", *words, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    # a group's share of a step
    assert answer["largest"] == answer["trainer.micro_batch_size"] == samples
    assert all(one["model_bytes"]["optimizer"] for one in answer["trials"])


@pytest.mark.nightly
def test_what_the_task_raises_is_shown(folder, capfd):
    assert main(["fit-batch", *WORDS, "+task.wrong=true"]) == 1
    err = capfd.readouterr().err
    assert "LookupError: the user's own" in err
    assert "micro-batches of 1 failed" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cluster=slurm"], "cluster.kind=slurm: fit-batch tries on the machine where it is typed"),
        (
            ["parallel=hsdp", "--ranks", "8"],
            "parallel.shard_degree=null: is the number of ranks of a node",
        ),
        (["parallel=mesh", "parallel.shard_degree=3", "--ranks", "8"], "parallel.shard_degree=3: with"),
        (["parallel=pp", "--ranks", "2"], "parallel.pipeline_degree=-1: passes activations on to other ranks"),
        (["parallel=fsdp_tp", "--ranks", "8"], "parallel.tensor_degree=null: is the number of ranks of a node"),
        (["parallel=tp", "cluster.processes_per_node=2", "--ranks", "4"], "parallel.tensor_degree=4: doesn't divide"),
        (["--ranks", "3"], "trainer.global_batch_size=64: cannot be divided among 3 ranks"),
        pytest.param(
            ["trainer.activation_checkpointing=[nowhere]"],
            "trainer.activation_checkpointing=nowhere: matches no module",
            marks=pytest.mark.nightly,  # a process that imports torch; the gate has its report in test_batch_trial.py
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_one_line(folder, words, named, capfd):
    assert main(["fit-batch", *words]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert named in err
