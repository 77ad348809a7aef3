"""Once rank zero has built a shared model, no rank holds more of it than its shards, and what is gathered at a time."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli import main
from hpctrain.files import read_json_lines

QUIET = ("task=custom", "task._target_=tests.multiprocess.programs.weighty.Weighty", "logger.tensorboard=false")
FSDP = ("parallel=fsdp",)
FSDP_TP = ("parallel=fsdp_tp", "parallel.tensor_degree=2")
WHOLE = "parallel.keep_gradients_whole=true"
TRAINING = ("trainer.global_batch_size=4", "checkpoint.every_steps=3", "checkpoint.asynchronous=false")
MB = 1e6


@pytest.fixture
def weigh(train, tmp_path):
    """Train five steps and resume for two more; returns each rank's records of both attempts."""

    def run(name, world_size, **sizes):
        folder = tmp_path / f"records of {name}"
        folder.mkdir()
        words = [*QUIET, *FSDP, *TRAINING, *(f"+task.{key}={value}" for key, value in sizes.items())]
        records = []
        for last in (5, 7):
            more = [f"trainer.max_steps={last}"]
            code, _, output = train(name, *words, *more, world_size=world_size, WEIGHTY_RECORD=str(folder))
            assert code == 0, output
            records.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)])
        return records

    return run


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "width", "layers"), [(2, 512, 6), (4, 768, 12)])
def test_a_rank_holds_its_shards_and_what_is_gathered(weigh, world_size, width, layers):
    small, large = (weigh(str(one), world_size, width=one, layers=layers) for one in (16, width))
    block, rest = 12 * width**2 * 4 / MB, (4096 + 8) * width * 4 / MB
    model = layers * block + rest
    for rank, (before, after) in enumerate(zip(small[0], large[0], strict=True)):
        more = {kind: {key: (after[kind][key] - before[kind][key]) / MB for key in after[kind]} for kind in after}
        shards = model / world_size
        print(f"model {model:.0f} MB, a shard {shards:.0f}, a block {block:.0f}, the rest {rest:.0f}:", more)
        assert more["peaks"]["build"] < (shards if rank else model) + 2 * rest + 20
        # between steps: the weights and AdamW's two moments
        assert more["ends"]["steps"] < 1.15 * 3 * shards + 2 * block + 20
        # the gradients, those of a block that is reduced, and two blocks and the rest with their gradients
        assert more["peaks"]["steps"] < 1.15 * 4 * shards + 4 * block + 3 * rest + 20
        assert more["peaks"]["after the save"] < 1.15 * 4 * shards + 4 * block + 3 * rest + 20
    for rank, (before, after) in enumerate(zip(small[1], large[1], strict=True)):
        loaded = (after["peaks"]["build"] - before["peaks"]["build"]) / MB
        print(f"resumed, rank {rank}: {loaded:.0f}")
        assert loaded < max(1.15 * 3 * model / world_size, model * (rank == 0)) + 2 * rest + 20


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world_size", "mesh"),
    [
        (4, FSDP),
        (4, FSDP_TP),
        (2, ("parallel=tp",)),
        (4, (*FSDP, WHOLE)),
        (4, (*FSDP_TP, WHOLE)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_fit_batch_foresees_the_memory_of_a_rank(train, tmp_path, monkeypatch, capfd, world_size, mesh):
    """Its process is one rank of a mesh without the others; those of a run are measured."""
    words = [*QUIET, *mesh, "+task.width=768", "+task.layers=8"]
    words += ["trainer.global_batch_size=8", "trainer.micro_batch_size=1"]
    monkeypatch.setenv("WEIGHTY_RECORD", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["fit-batch", *words, "--ranks", str(world_size), "--largest", "1", "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["trials"]
    words += ["trainer.max_steps=3", "trainer.max_epochs=null", "logger.every_steps=1"]
    code, run, output = train("run", *words, world_size=world_size, WEIGHTY_RECORD=str(tmp_path))
    assert code == 0, output
    records = read_json_lines(run.directory.metrics)
    measured = max(record.get("memory/peak_gb", 0) for record in records)
    print(f"foreseen {found['peak_bytes'] / 1e9:.3f} GB, measured {measured:.3f} GB")
    assert found["peak_bytes"] / 1e9 == pytest.approx(measured, rel=0.15)
