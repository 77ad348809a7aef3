"""``conf/parallel``: how the ranks share the work. Owner: hpctrain.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hpctrain.config import require
from hpctrain.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Parallel:
    """DistributedDataParallel with a replica per rank, or DataParallel in a single process."""

    kind: str = "ddp"
    """`ddp`; `data_parallel`: nn.DataParallel over all GPUs of one process, which is slower. Set by the option."""
    backend: str = "auto"
    """`nccl`, `gloo`, or `auto`: nccl with GPUs, gloo without."""
    init_method: str = "env://"
    """Where the ranks meet: `env://`, `tcp://HOST:PORT`, or `file:///PATH` on a shared file system."""
    find_unused_parameters: bool = False
    """For models that don't use all parameters in each forward pass; DDP then walks the graph in each step."""
    bucket_cap_mb: int = 25
    """Gradients are reduced in buckets of this size in MB."""
    static_graph: bool = False
    """Declare that every step uses the same parameters in the same way, so that DDP doesn't search."""
    gradient_as_bucket_view: bool = True
    """Store gradients in the buckets, which saves a copy; false for tasks that detach gradients in place."""
    gradient_compression: str = "none"
    """`none`; `fp16` or `bf16` (NCCL only): send gradients in this format, with half the bytes and lower precision."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("parallel.kind", self.kind, ("ddp", "data_parallel"))
        require.one_of("parallel.gradient_compression", self.gradient_compression, ("none", "fp16", "bf16"))
        require.one_of("parallel.backend", self.backend, ("auto", "nccl", "gloo"))
        require.at_least("parallel.bucket_cap_mb", self.bucket_cap_mb, 1)
        if not _is_address(self.init_method):
            raise ConfigError(
                "parallel.init_method",
                self.init_method,
                "is not a rendezvous address",
                "use env://, tcp://HOST:PORT or file:///PATH",
            )


def _is_address(init_method: str) -> bool:
    if not init_method.startswith("tcp://"):
        return init_method.startswith(("env://", "file:///"))
    try:
        url = urlsplit(init_method)
        return url.hostname is not None and url.port is not None
    except ValueError:
        return False
