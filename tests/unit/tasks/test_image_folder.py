from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hpctrain.data.fetch import BatchFetcher
from hpctrain.errors import ConfigError, TaskError
from hpctrain.tasks.image_folder import ImageFolder, decode, random_box


def picture(path: Path, width: int = 40, height: int = 30, mode: str = "RGB") -> Path:
    """Red grows to the right and green to the bottom, so that each pixel names its place."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([columns * 255 // (width - 1), rows * 255 // (height - 1), np.full((height, width), 7)], axis=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("train/ant/0", "train/bee/0", "train/bee/1", "val/bee/0"):
        picture(tmp_path / f"{name}.png")
    return tmp_path


class Brightness(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


def test_a_training_sample_is_cropped_resized_and_sometimes_mirrored(data: Path) -> None:
    samples = ImageFolder(str(data), image_size=16).train_dataset()
    assert len(samples) == 3
    assert [samples[index][1] for index in range(3)] == [0, 1, 1]
    mirrored, widths = 0, set()
    for bits in range(40):
        random.seed(bits)
        image, _ = samples[0]
        assert (image.dtype, image.shape) == (torch.uint8, (3, 16, 16))
        red = image[0].float().mean(0)
        mirrored += int(red[0] > red[-1])
        widths.add(int(abs(red[0] - red[-1])))
    assert 10 < mirrored < 30
    assert len(widths) > 20


def test_draws_follow_from_seed_epoch_and_index(data: Path) -> None:
    samples = ImageFolder(str(data), image_size=16).train_dataset()
    several = BatchFetcher(samples, seed=3)[0, np.array([2, 0, 1])]
    alone = BatchFetcher(samples, seed=3)[0, np.array([1])]
    assert torch.equal(several[0][2], alone[0][0])
    assert not torch.equal(BatchFetcher(samples, seed=3)[1, np.array([1])][0], alone[0])


def test_evaluation_takes_the_centre_and_draws_nothing(data: Path) -> None:
    held_out = ImageFolder(str(data), image_size=24, crop_share=0.8).eval_dataset()
    state = random.getstate()
    image, label = held_out[0]
    assert random.getstate() == state
    assert label == 1
    # 40 x 30 pixels as they are, since 24 / 0.8 = 30, and of these the 24 x 24 in the middle
    whole = torch.from_numpy(np.array(Image.open(data / "val" / "bee" / "0.png"))).permute(2, 0, 1)
    assert torch.equal(image, whole[:, 3:27, 8:32])


def test_the_model_sees_normalised_images(data: Path) -> None:
    task = ImageFolder(str(data), mean=(0.5, 0.5, 0.0), deviation=(0.5, 0.25, 1.0))
    images = torch.tensor([255, 0, 51], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(2, 3, 4, 4)
    torch.testing.assert_close(task._normalise(images)[1, :, 2, 3], torch.tensor([1.0, -2.0, 0.2]))
    sums = task.evaluate(Brightness(), (images, torch.tensor([0, 2])))
    assert sums["accuracy"] == (1, 2)
    assert "top5_accuracy" not in sums


def test_labels_are_smoothed_in_training_alone(data: Path) -> None:
    batch = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    plain, smooth = ImageFolder(str(data)), ImageFolder(str(data), label_smoothing=0.3)
    assert plain.loss(Brightness(), batch) != smooth.loss(Brightness(), batch)
    assert plain.evaluate(Brightness(), batch) == smooth.evaluate(Brightness(), batch)


def test_top5_accuracy(data: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.arange(12.0).expand(len(images), 12)

    batch = torch.zeros(3, 3, 4, 4, dtype=torch.uint8), torch.tensor([11, 7, 6])
    sums = ImageFolder(str(data)).evaluate(Fixed(), batch)
    assert {name: (int(total), count) for name, (total, count) in sums.items() if name != "loss"} == {
        "accuracy": (1, 3),
        "top5_accuracy": (2, 3),
    }


def test_the_default_model_has_a_logit_per_class(data: Path) -> None:
    assert ImageFolder(str(data)).build_model().fc.out_features == 2
    assert ImageFolder(str(data), eval=None).eval_dataset() is None


def test_more_classes_than_logits_are_refused(data: Path) -> None:
    (data / "train" / "cow").mkdir()
    picture(data / "train" / "cow" / "0.png")
    with pytest.raises(ConfigError, match=r"model\.num_classes=2: .* has 3 classes; set model\.num_classes=3"):
        ImageFolder(str(data), num_classes=2).train_dataset()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_every_image_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = picture(tmp_path / f"a.{'tif' if mode == 'CMYK' else 'png'}", mode=mode)
    assert decode(str(path)).mode == "RGB"


def test_an_image_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    whole = picture(tmp_path / "whole.png").read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        path = tmp_path / "bad.png"
        path.write_bytes(content)
        with pytest.raises(TaskError, match=r"bad\.png can't be read as an image .*replace or remove it"):
            decode(str(path))


@pytest.mark.parametrize(("width", "height"), [(400, 300), (1000, 10), (10, 1000), (1, 1)])
def test_a_random_box_lies_within_the_image(width: int, height: int) -> None:
    random.seed(0)
    boxes = [random_box(width, height, 0.08) for _ in range(300)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert 0.7 < (right - left) / (bottom - top) < 1.4
    shares = [(right - left) * (bottom - top) / (width * height) for left, top, right, bottom in boxes]
    if width == 400:
        assert 0.07 < min(shares) < 0.15
        assert max(shares) > 0.9
        assert len(set(boxes)) > 290
    if width == 1000:
        assert set(boxes) == {(493, 0, 506, 10)}
