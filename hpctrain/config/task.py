"""``conf/task``: what is trained. Your own task needs no schema: any ``_target_`` works. Owner: hpctrain.tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require

EXTRAS = {
    "hpctrain.tasks.keras_digits": ("keras", "keras"),
}
"""By module of a task: the optional package that it imports, and the extra that installs it."""

RGB = require.that(lambda values: len(values) == 3, "must have one number per channel", "write three numbers")


@dataclass(kw_only=True, slots=True)
class Digits(require.Checked):
    """1,797 real handwritten digits, 8 x 8 pixels, ten classes."""

    _target_: str = "hpctrain.tasks.digits.Digits"
    """Class to instantiate."""
    held_out: Annotated[float, require.between(0.01, 0.9)] = 0.2
    """Fraction of the samples held out for evaluation."""
    augment: bool = False
    """Shift each training image by up to a pixel, drawn from seed, epoch and sample."""


@dataclass(kw_only=True, slots=True)
class Text(require.Checked):
    """Language modelling of bytes, on the English text in Python's own `pydoc_data.topics`."""

    _target_: str = "hpctrain.tasks.text.Text"
    """Class to instantiate."""
    context_length: Annotated[int, require.at_least(2)] = 128
    """Bytes per sample."""
    held_out: Annotated[float, require.between(0.01, 0.9)] = 0.1
    """Fraction of the text held out for evaluation."""


@dataclass(kw_only=True, slots=True)
class ImageFolder(require.Checked):
    """Images in DATA/train/CLASS and DATA/val/CLASS, the usual layout of ImageNet."""

    _target_: str = "hpctrain.tasks.image_folder.ImageFolder"
    """Class to instantiate."""
    data: str = "???"
    """Folder of the data set."""
    train: str = "train"
    """Subfolder of the training images, with a folder per class."""
    eval: str | None = "val"
    """Subfolder of the held-out images; null: no evaluation."""
    num_classes: Annotated[int | None, require.at_least(2)] = None
    """Number of classes of the model, for a check; conf/task takes it from the model."""
    image_size: Annotated[int, require.at_least(1)] = 224
    """Pixels per side of the model's input."""
    min_crop: Annotated[float, require.between(0.001, 1)] = 0.08
    """Smallest fraction of a training image's area that a random crop keeps."""
    crop_share: Annotated[float, require.between(0.1, 1)] = 0.875
    """Fraction of the resized image's shorter side that the centre crop of evaluation keeps."""
    flip: Annotated[float, require.between(0, 1)] = 0.5
    """Probability of mirroring a training image."""
    label_smoothing: Annotated[float, require.between(0, 1)] = 0.0
    """Fraction of the training target spread over all classes."""
    # this and the next are ImageNet's, which torchvision's weights were trained with
    mean: Annotated[list[float], RGB] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Subtracted per channel; a fraction of full brightness."""
    deviation: Annotated[list[float], RGB, require.each(require.above(0))] = field(
        default_factory=lambda: [0.229, 0.224, 0.225]
    )
    """Divisor per channel; a fraction of full brightness."""


@dataclass(kw_only=True, slots=True)
class Tokens(require.Checked):
    """Language modelling on token files, at any size; `hpctrain.tasks.make_tokens` creates them."""

    _target_: str = "hpctrain.tasks.tokens.Tokens"
    """Class to instantiate."""
    data: str = "???"
    """Folder of the token files."""
    train: str = "train*"
    """Name of the training files, or a pattern with * and ?: .bin (raw numbers) or .npy."""
    eval: str | None = "eval*"
    """The same for the held-out files; null: no evaluation."""
    dtype: Annotated[str | None, require.one_of("uint16", "uint32")] = None
    """Numbers in .bin files: `uint16` or `uint32`, little-endian; null: as in tokens.json next to them."""
    context_length: Annotated[int, require.at_least(1)] = 1024
    """Tokens per sample."""
    vocab_size: Annotated[int | None, require.at_least(1)] = None
    """Vocabulary size of the model, for a check; conf/task takes it from the model."""
    packed: bool = False
    """Fill each sample with whole documents, which don't see each other, and padding; false: cut the text into windows,
    across the borders of documents."""
    end_of_text: Annotated[int | None, require.at_least(0)] = None
    """With packed: the token that ends a document; null: as in tokens.json."""


@dataclass(kw_only=True, slots=True)
class Keras(require.Checked):
    """A Keras 3 model on the torch backend: the convnet of Keras's guide, on the digits. Needs `hpctrain[keras]`."""

    _target_: str = "hpctrain.tasks.keras_digits.KerasDigits"
    """Class to instantiate."""
    held_out: Annotated[float, require.between(0.01, 0.9)] = 0.2
    """Fraction of the samples held out for evaluation."""
    augment: bool = False
    """Shift each training image by up to a pixel, drawn from seed, epoch and sample."""
    dropout: Annotated[float, require.between(0, 1)] = 0.5
    """Dropout probability before the last layer."""
    weight_penalty: Annotated[float, require.at_least(0)] = 0.0
    """Strength of the L2 penalty on the kernels of the convolutions; Keras adds it to the loss."""
