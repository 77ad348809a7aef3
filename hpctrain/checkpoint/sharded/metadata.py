"""The description of a sharded checkpoint for `torch.distributed.checkpoint` (DCP); hpctrain never reads it.

As `FileSystemWriter.finish` of torch 2.13 writes it: a pickle of DCP's `Metadata`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpctrain.checkpoint.sharded.stored_tensor import DTYPES
from hpctrain.run.checkpoint_manifest import IndexedTensor, Region


def encode_metadata(tensors: Mapping[str, IndexedTensor], paths: Mapping[str, tuple[str, ...]]) -> bytes:
    """Return the bytes of the description.

    Args:
        tensors: by name.
        paths: where each tensor is in nested dicts: names have dots in them, so that DCP couldn't tell.
    """
    described: dict[str, STORAGE_TYPES] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        chunks = [_chunk(place.region) for place in tensor.chunks]
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        described[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, place in enumerate(tensor.chunks):
            index = MetadataIndex(name, place.region.offsets, number)
            stored[index] = _StorageInfo(place.file, place.offset, place.bytes)
    metadata = Metadata(
        state_dict_metadata=described, planner_data=dict(paths), storage_data=stored, version=CURRENT_DCP_VERSION
    )
    return pickle.dumps(metadata)


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=torch.Size(region.sizes))
