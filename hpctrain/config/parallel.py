"""``conf/parallel``: how the ranks share the work. Owner: hpctrain.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from hpctrain.config import require


def _is_address(init_method: str) -> bool:
    if not init_method.startswith("tcp://"):
        return init_method.startswith(("env://", "file:///"))
    try:
        url = urlsplit(init_method)
        return url.hostname is not None and url.port is not None
    except ValueError:
        return False


RENDEZVOUS = require.that(_is_address, "is not a rendezvous address", "use env://, tcp://HOST:PORT or file:///PATH")


@dataclass(kw_only=True, slots=True)
class Parallel(require.Checked):
    """DistributedDataParallel with a replica per rank, or DataParallel in a single process."""

    kind: Annotated[str, require.one_of("ddp", "data_parallel")] = "ddp"
    """`ddp`; `data_parallel`: nn.DataParallel over all GPUs of one process, which is slower. Set by the option."""
    backend: Annotated[str, require.one_of("auto", "nccl", "gloo")] = "auto"
    """`nccl`, `gloo`, or `auto`: nccl with GPUs, gloo without."""
    init_method: Annotated[str, RENDEZVOUS] = "env://"
    """Where the ranks meet; `env://`: at a private file on one node, at a port of rank zero on several. Otherwise
    `tcp://HOST:PORT`, or `file:///PATH` on a shared file system."""
    find_unused_parameters: bool = False
    """For models that don't use all parameters in each forward pass; DDP then walks the graph in each step."""
    # DDP's own default
    bucket_cap_mb: Annotated[int, require.at_least(1, at_most=1_000_000)] = 25
    """Gradients are reduced in buckets of this size in MB."""
    static_graph: bool = False
    """Declare that every step uses the same parameters in the same way, so that DDP doesn't search."""
    gradient_as_bucket_view: bool = True
    """Store gradients in the buckets, which saves a copy; false for tasks that detach gradients in place."""
    gradient_compression: Annotated[str, require.one_of("none", "fp16", "bf16")] = "none"
    """`none`; `fp16` or `bf16` (NCCL only): send gradients in this format, with half the bytes and lower precision."""
