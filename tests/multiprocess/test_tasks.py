"""Every task that hpctrain ships, through the command, at toy size."""

from __future__ import annotations

import importlib.util
import shutil
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.tasks.keras_digits import KerasDigits
from hpctrain.tasks.make_tokens import main as make_tokens

SHORT = ("logger.tensorboard=false", "logger.every_steps=1")
keras = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason='pip install "hpctrain[keras]"')


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Two classes, told apart by their colour: 24 to train on, 6 held out."""
    folder = tmp_path_factory.mktemp("pictures")
    draws = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 3)):
        for channel, name in ((0, "red"), (2, "blue")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 90, (20, 24, 3), dtype=np.uint8)
                pixels[:, :, channel] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("\n".join(topics[name] for name in sorted(topics)[:12]))
    assert make_tokens([str(folder / "text.txt"), "--out", str(folder / "made"), "--held-out", "0.1"]) == 0
    return folder / "made"


def last(run, name):
    return [record[name] for record in run.metrics if name in record][-1]


def of_pictures(folder, model="convnet"):
    small = {"convnet": ("model.width=8", "model.in_channels=3"), "resnet": ("model.depth=18",)}[model]
    return (
        *("task=image_folder", f"task.data={folder}", "task.image_size=16", "task.min_crop=0.3"),
        *(f"model={model}", *small, "model.num_classes=2", "optimizer.lr=0.05", "schedule.warmup_epochs=0"),
        *("trainer.global_batch_size=8", "trainer.max_epochs=2", *SHORT),
    )


@pytest.mark.nightly
def test_pictures_in_folders(train, pictures):
    code, here, output = train("here", *of_pictures(pictures), "data.num_workers=0")
    assert code == 0, output
    assert last(here, "eval/accuracy") > 0.8
    code, loaded, output = train("loaded", *of_pictures(pictures), "data.num_workers=2")
    assert code == 0, output
    assert loaded.digest == here.digest
    code, two, output = train("two", *of_pictures(pictures), "data.num_workers=1", world_size=2)
    assert code == 0, output
    assert two.steps[-1] == 6


@pytest.mark.nightly
def test_a_resnet(train, pictures):
    words = of_pictures(pictures, "resnet")
    code, run, output = train("run", *words, "trainer.max_steps=2", "data.num_workers=0")
    assert code == 0, output
    assert run.steps == [2]


def test_a_picture_that_can_not_be_read_is_named(train, pictures, tmp_path):
    bad = tmp_path / "data" / "train" / "red" / "bad.png"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"no picture")
    words = of_pictures(tmp_path / "data")
    code, _, output = train("bad", *words, "task.eval=null", "data.num_workers=0")
    assert code == 1
    assert f"{bad} can't be read as an image" in output


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_tokens(train, tokens, world_size):
    code, run, output = train(
        "run",
        *("task=tokens", f"task.data={tokens}", "task.context_length=16", "optimizer.lr=0.01"),
        *("model=gpt", "model.width=32", "model.num_layers=1", "schedule.warmup_steps=0"),
        *("trainer.global_batch_size=16", "trainer.max_steps=30", *SHORT),
        world_size=world_size,
    )
    assert code == 0, output
    assert last(run, "eval/loss") < 3.5
    assert last(run, "eval/perplexity") == pytest.approx(np.exp(last(run, "eval/loss")))


KERAS = (
    *(
        "task=keras",
        "task.weight_penalty=1e-4",
        "trainer.global_batch_size=64",
        "trainer.max_steps=4",
        "trainer.max_epochs=null",
    ),
    *("trainer.eval_every_steps=2", "checkpoint.every_steps=2", "schedule=constant", *SHORT),
)


@keras
@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_keras_model(train, world_size):
    """Its statistics are saved, all ranks evaluate with the same ones, and a resume continues with them."""
    code, run, output = train("run", *KERAS, world_size=world_size)
    assert code == 0, output
    assert run.steps == [2, 4]
    saved = torch.load(run.directory.checkpoint(4) / "model.pt", weights_only=True)
    assert {"conv2d/kernel", "batch_normalization_2/moving_variance"} <= saved.keys()
    assert saved["batch_normalization/moving_mean"].any()
    model = KerasDigits(weight_penalty=1e-4).build_model()
    model.load_state_dict(saved)
    held_out = KerasDigits().eval_dataset()
    total, count = KerasDigits().evaluate(model.eval(), held_out.get_batch(torch.arange(len(held_out))))["loss"]
    assert total.item() / count == pytest.approx(last(run, "eval/loss"), rel=1e-5)
    if world_size == 1:
        return
    # as a run that was killed after step 2
    straight, metrics = run.digest, run.metrics
    shutil.rmtree(run.directory.checkpoint(4))
    code, resumed, output = train("run", *KERAS, world_size=world_size)
    assert code == 0, output
    assert "resuming at step 2" in output
    assert (resumed.digest, resumed.metrics) == (straight, metrics)
