"""Trainings on data of many kinds, each with 48 samples an epoch."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hpctrain.data import BucketOrder, ShardedStream, ShuffledStream, TarDataset, TensorBatches
from hpctrain.models.gpt import GPT
from hpctrain.tasks.tokens import Tokens
from tests.multiprocess.programs.trial import Trial, table

SAMPLES = 48
STREAMS = 4


class Plain(IterableDataset):
    """Its own order in each epoch; no state."""

    epoch = 0

    def __init__(self, numbers):
        self.numbers = numbers
        self.columns = table(SAMPLES)

    def __len__(self):
        return len(self.numbers)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for place in range(len(self.numbers)):
            yield self.sample(place)

    def sample(self, place):
        number = self.numbers[(place + 5 * self.epoch) % len(self.numbers)]
        return tuple(column[number] for column in self.columns)


class Stateful(Plain):
    place = 0

    def __iter__(self):
        while self.place < len(self.numbers):
            self.place += 1
            yield self.sample(self.place - 1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def noisy(sample):
    features, label, number = sample
    return features + 0.1 * torch.randn(features.shape), label, number


def encoded(row):
    content = io.BytesIO()
    np.save(content, row)
    return content.getvalue()


def write_shards(folder):
    folder.mkdir(exist_ok=True)
    features, labels, _ = (column.numpy() for column in table(SAMPLES))
    for first in range(0, SAMPLES, 20):
        with tarfile.open(folder / f"{first:02d}.tar", "w") as tar:
            for number in range(first, min(first + 20, SAMPLES)):
                files = {"npy": encoded(features[number]), "cls": b"%d" % labels[number], "id": b"%d" % number}
                for extension, content in files.items():
                    member = tarfile.TarInfo(f"{number:03d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


class Reading(Trial):
    def __init__(self, kind, folder=None, **options):
        super().__init__(num_samples=SAMPLES, **options)
        self.kind = kind
        self.folder = None if folder is None else Path(folder)

    def prepare(self):
        if self.kind == "tar":
            write_shards(self.folder)
            self.train_dataset()
        elif self.kind == "hf_map":
            self.hf_table().save_to_disk(str(self.folder))

    def train_dataset(self):
        return getattr(self, f"make_{self.kind}")()

    def make_plain(self):
        return Plain(range(SAMPLES))

    def make_stateful(self):
        return Stateful(range(SAMPLES))

    def make_sharded(self):
        parts = [range(first, SAMPLES, STREAMS) for first in range(STREAMS)]
        return ShardedStream([ShuffledStream(Stateful(part), 5, seed=1) for part in parts])

    def make_tar(self):
        return TarDataset(self.folder / "*.tar", fields=("npy", "cls", "id"), transform=noisy)

    def make_buckets(self):
        return TensorBatches(*table(SAMPLES))

    def order(self, num_samples, seed):
        if self.kind != "buckets":
            return None
        return BucketOrder(torch.arange(num_samples).remainder(13), seed, batch_size=8, pool_batches=3)

    def hf_table(self):
        import datasets

        names = ("features", "label", "number")
        columns = (column.tolist() for column in table(SAMPLES))
        return datasets.Dataset.from_dict(dict(zip(names, columns, strict=True)))

    def make_hf_map(self):
        import datasets

        return datasets.load_from_disk(str(self.folder)).with_format("torch")

    def make_hf_stream(self):
        stream = self.hf_table().to_iterable_dataset(num_shards=STREAMS).shuffle(seed=1, buffer_size=1)
        return stream.map(lambda rows: rows, batched=True, batch_size=5).with_format("torch")

    def make_hf_buffer(self):
        return self.hf_table().to_iterable_dataset(num_shards=STREAMS).shuffle(seed=1, buffer_size=9)

    def make_hf_sharded(self):
        stream = self.make_hf_stream()
        return ShardedStream([ShuffledStream(stream.shard(STREAMS, number), 5, seed=1) for number in range(STREAMS)])

    def collate_fn(self, samples):
        """Hugging Face's lists of numbers would become lists of columns."""
        rows = [
            tuple(map(torch.as_tensor, sample.values() if isinstance(sample, dict) else sample)) for sample in samples
        ]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def write_documents(folder):
    """Token files with documents of 1 to 30 tokens."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    for name in ("train", "eval"):
        documents = [[*draws.integers(1, 50, length), 0] for length in draws.integers(0, 30, 150)]
        (folder / f"{name}.bin").write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    (folder / "tokens.json").write_text('{"vocab_size": 50, "dtype": "uint16", "end_of_text": 0}')


class Packing(Tokens):
    def __init__(self, data):
        super().__init__(data, context_length=32, packed=True)
        self.trial = Trial()

    def build_model(self):
        return GPT(vocab_size=50, context_length=32, num_layers=1, num_heads=2, width=16, dropout=0.1)

    def loss(self, model, batch):
        self.trial.called()
        return super().loss(model, batch)
