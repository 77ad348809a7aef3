"""Each example of the gallery, killed at three random steps, ends as the straight run does."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from hpctrain.config.compose import Composer
from hpctrain.files import read_json_lines
from hpctrain.launch.prepare import prepare
from tests.support.fork_server import clean_environment
from tests.support.gallery import CONF, EXAMPLES, NAMES, PACKAGES, TINY, required
from tests.support.tensorboard_points import points

SEED = int(os.environ.get("HPCTRAIN_SOAK_SEED", "0"))
STEPS = 12
SHORT = (
    *("trainer.max_epochs=null", f"trainer.max_steps={STEPS}", "trainer.eval_every_steps=4"),
    *("trainer.global_batch_size=8", "trainer.micro_batch_size=2", "trainer.sanity_batches=1"),
    *("checkpoint.every_steps=1", "checkpoint.every_min=null", "checkpoint.asynchronous=false"),
    *("logger.every_steps=1", "precision=fp32", "schedule.warmup_steps=0"),
    *("schedule.warmup_epochs=null", "data.num_workers=0", "trainer.channels_last=false"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the examples read: images, tokens, a teacher and a backbone."""
    from PIL import Image

    from hpctrain.models.convnet import ConvNet

    folder = tmp_path_factory.mktemp("files")
    draws = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cats", "dogs"):
            (folder / "pictures" / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = draws.integers(0, 255, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "pictures" / split / name / f"{number}.jpg")
    (folder / "tokens").mkdir()
    for name in ("train", "eval"):
        draws.integers(0, 256, 4000, dtype=np.uint16).tofile(folder / "tokens" / f"{name}.bin")
    (folder / "tokens" / "tokens.json").write_text('{"vocab_size": 256, "dtype": "uint16"}')
    for name in ("teacher", "backbone"):
        torch.save(ConvNet().state_dict(), folder / f"{name}.pt")
    return folder


@pytest.fixture
def attempt(fork_server, ranks, files, tmp_path, monkeypatch):
    """Start or resume an example; every rank dies after so many updates of its optimizers, or none for 0."""
    monkeypatch.syspath_prepend(EXAMPLES)
    variables = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), clean_environment()["PYTHONPATH"]])}
    prepared = set()

    def start(example, name, world_size, updates=0):
        path = tmp_path / name
        if name not in prepared:
            words = [*required(example, files), *SHORT, *TINY.get(example, []), f"run_dir={path}"]
            prepare(Composer(str(CONF)).compose(words, world_size=world_size), words)
            prepared.add(name)
        if world_size == 1:
            return fork_server.wait(fork_server.start("struck:run", str(path), updates, folder=tmp_path, **variables))
        return ranks("struck:rank", str(path), updates, world_size=world_size, **variables)

    return start


def media(run):
    records = read_json_lines(run.directory.media_records)
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


def require_same_points(straight, struck):
    """No point twice, and none missing: TensorBoard gets all evaluations, but at most ten other records a second."""
    assert straight.keys() == struck.keys()
    for tag, found in struck.items():
        expected, values = dict(straight[tag]), dict(found)
        assert len(values) == len(found), tag
        shared = values.keys() & expected.keys()
        assert {step: values[step] for step in shared} == {step: expected[step] for step in shared}, tag
        assert values.keys() == expected.keys() or not tag.startswith("eval/"), tag


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("example", NAMES)
def test_killed_three_times(example, world_size, attempt, run_at, tmp_path):
    for package in PACKAGES.get(example, []):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    done = attempt(example, "straight", world_size)
    assert {process.code for process in done} == {0}, "\n".join(process.output for process in done)
    draws = random.Random(f"{SEED} {example} {world_size}")
    # several updates may make a step, and a run that never completes one has nothing to resume
    cuts = [4, draws.randint(2, 4), draws.randint(2, 4)]
    for cut in cuts:
        done = attempt(example, "struck", world_size, cut)
        assert 0 not in {process.code for process in done}, (cuts, done[0].output)
    done = attempt(example, "struck", world_size)
    assert {process.code for process in done} == {0}, "\n".join(process.output for process in done)
    straight, struck = run_at(tmp_path / "straight"), run_at(tmp_path / "struck")
    assert len(struck.attempts) == 4, cuts
    assert struck.attempts[-1][0] > 0, cuts
    assert struck.digest == straight.digest, cuts
    assert struck.metrics == straight.metrics, cuts
    assert media(struck) == media(straight), cuts
    require_same_points(points(straight.directory.tensorboard), points(struck.directory.tensorboard))
    assert [record["step"] for record in struck.metrics if "train/loss" in record] == list(range(1, STEPS + 1))
    if example == "lora":
        saved = torch.load(struck.directory.checkpoint(STEPS) / "model.pt", weights_only=True)
        assert saved
        assert all("lora_" in weight for weight in saved)
