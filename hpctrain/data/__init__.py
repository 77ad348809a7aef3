"""The data that ranks train on: order, batch arithmetic, datasets, loaders."""

from hpctrain.data.bookmark import StatefulStream
from hpctrain.data.fetch import BatchDataset, TensorBatches
from hpctrain.data.order import BucketOrder, Order, WeightedOrder
from hpctrain.data.stream import SeekableStream, ShardedStream, ShuffledStream
from hpctrain.data.tar_dataset import TarDataset

__all__ = [
    "BatchDataset",
    "BucketOrder",
    "Order",
    "SeekableStream",
    "ShardedStream",
    "ShuffledStream",
    "StatefulStream",
    "TarDataset",
    "TensorBatches",
    "WeightedOrder",
]
