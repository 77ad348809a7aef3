"""The data that ranks train on: order, batch arithmetic, datasets, loaders."""

from hpctrain.data.bookmark import StatefulStream
from hpctrain.data.bucket_order import BucketOrder
from hpctrain.data.dataset import BatchDataset
from hpctrain.data.order import Order, WeightedOrder
from hpctrain.data.sharded_stream import ShardedStream
from hpctrain.data.shuffled_stream import ShuffledStream
from hpctrain.data.stream import SeekableStream
from hpctrain.data.tar_dataset import TarDataset
from hpctrain.data.tensors import TensorBatches

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
