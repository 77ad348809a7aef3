"""``conf/parallel``: how the ranks work together. Owner: hpctrain.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hpctrain.config import require
from hpctrain.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Parallel:
    """DistributedDataParallel with a replica per rank, or DataParallel in a single process."""

    kind: str = "ddp"
    """`ddp`; `data_parallel`: nn.DataParallel over all GPUs of one process, which is slower; set by the file that is
    chosen."""
    backend: str = "auto"
    """`nccl`, `gloo`, or `auto`: nccl with GPUs, gloo without."""
    init_method: str = "env://"
    """Where the ranks meet: `env://`, `tcp://HOST:PORT`, or `file:///PATH` on a shared file system."""
    find_unused_parameters: bool = False
    """For models that leave parameters out of some forward passes; costs a walk of the graph per step."""
    bucket_cap_mb: int = 25
    """Gradients are reduced in buckets of this size in MB."""
    static_graph: bool = False
    """Promise DDP that every step uses the same parameters in the same way, which spares it searching."""
    gradient_as_bucket_view: bool = True
    """Gradients lie in the buckets, which saves one copy of them; false where a task detaches gradients in place."""
    gradient_compression: str = "none"
    """`none`; `fp16` or `bf16` (NCCL only): gradients travel in this format, in half the bytes, and lose digits."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("parallel.kind", self.kind, ("ddp", "data_parallel"))
        require.one_of("parallel.gradient_compression", self.gradient_compression, ("none", "fp16", "bf16"))
        require.one_of("parallel.backend", self.backend, ("auto", "nccl", "gloo"))
        require.at_least("parallel.bucket_cap_mb", self.bucket_cap_mb, 1)
        if not _is_a_place(self.init_method):
            raise ConfigError(
                "parallel.init_method",
                self.init_method,
                "is no place to meet",
                "use env://, tcp://HOST:PORT or file:///PATH",
            )


def _is_a_place(init_method: str) -> bool:
    if not init_method.startswith("tcp://"):
        return init_method.startswith(("env://", "file:///"))
    try:
        url = urlsplit(init_method)
        return url.hostname is not None and url.port is not None
    except ValueError:
        return False
