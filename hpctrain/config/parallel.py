"""``conf/parallel``: how the ranks share the work. Owner: hpctrain.parallel."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated
from urllib.parse import urlsplit

from hpctrain.config import require
from hpctrain.errors import ConfigError

OF_DDP = ("find_unused_parameters", "bucket_cap_mb", "static_graph", "gradient_as_bucket_view", "gradient_compression")
"""Keys that only DDP uses."""
DIVISION_BY_MESH = (
    *("replicate_degree", "shard_degree", "tensor_degree", "pipeline_degree"),
    *("stages_per_rank", "stages", "blocks", "keep_gradients_whole", "cpu_offload"),
)
"""Keys of a mesh that decide the weights."""
OF_MESH = (*DIVISION_BY_MESH, "reshard_after_forward", "prefetch_blocks")
"""Keys that only a mesh uses."""


def _is_address(init_method: str) -> bool:
    if not init_method.startswith("tcp://"):
        return init_method.startswith(("env://", "file:///"))
    try:
        url = urlsplit(init_method)
        return url.hostname is not None and url.port is not None
    except ValueError:
        return False


DEGREE = require.that(lambda degree: degree == -1 or degree >= 1, "is not a number of ranks", "use 1 or more, or -1")
RENDEZVOUS = require.that(_is_address, "is not a rendezvous address", "use env://, tcp://HOST:PORT or file:///PATH")


@dataclass(kw_only=True, slots=True)
class Parallel(require.Checked):
    """DistributedDataParallel with a replica per rank, a mesh of ranks that shard the model, or DataParallel."""

    kind: Annotated[str, require.one_of("ddp", "data_parallel", "mesh")] = "ddp"
    """`ddp`: a replica of the model per rank; `mesh`: the ranks shard the model; `data_parallel`: nn.DataParallel over
    all GPUs of one process, which is slower. Set by the option."""
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
    replicate_degree: Annotated[int, DEGREE] = 1
    """With `mesh`: number of replicas of the model; `shard_degree` ranks hold one together. -1: as many as the number
    of ranks allows."""
    shard_degree: Annotated[int | None, DEGREE] = -1
    """With `mesh`: number of ranks, or of groups of `tensor_degree` ranks, that hold a replica together, each a shard
    of its parameters, gradients and optimizer states. null: the ranks of a node, divided by `tensor_degree`; -1: all
    ranks, divided by the other degrees. The product of the four degrees must be the number of ranks."""
    tensor_degree: Annotated[int | None, DEGREE] = 1
    """With `mesh`: number of ranks that compute each layer together, on the same samples (tensor parallelism). The
    model or the task must have a plan for it, as hpctrain's GPT has. Must divide the ranks of a node. null: the ranks
    of a node; -1: all ranks, divided by the other degrees."""
    pipeline_degree: Annotated[int, DEGREE] = 1
    """With `mesh`: number of groups of ranks among which the layers are divided; each sends its activations to the next
    (pipeline parallelism). -1: all ranks, divided by the other degrees."""
    stages_per_rank: Annotated[int, require.at_least(1, at_most=1000)] = 1
    """With a pipeline: number of stages of each rank, which don't follow each other. 1: the schedule 1F1B; more:
    interleaved 1F1B (Narayanan et al. 2021), in which ranks wait less and send more. The model is cut into
    `pipeline_degree` x `stages_per_rank` stages."""
    stages: list[str] = field(default_factory=list)
    """With a pipeline: names of the modules with which the second stage and each further one begins, such as
    [blocks.4, blocks.8]. []: stages with about equal numbers of parameters."""
    blocks: list[str] = field(default_factory=list)
    """With `mesh`: names of the modules whose weights are gathered one module at a time, such as blocks.*; * and ?
    match within one part of the name, between dots. []: the task's `blocks`, or else the modules that the model
    repeats."""
    reshard_after_forward: bool = True
    """With `mesh`: free the gathered weights of a block after its forward pass, and gather them again for the backward
    pass. false: keep them until then, which saves communication and takes memory for the weights of all blocks."""
    keep_gradients_whole: bool = False
    """With `mesh` and accumulation: reduce gradients only in the last micro-batch of a step. This saves communication,
    and each rank holds the gradients of the whole model until then."""
    prefetch_blocks: Annotated[int, require.at_least(0, at_most=1000)] = 0
    """With `mesh`: number of blocks that are gathered ahead of the one that computes. This hides communication if
    sending a block's weights takes longer than computing with them, and takes memory for the weights of these blocks.
    0: FSDP2 decides."""
    cpu_offload: bool = False
    """With `mesh`, on GPUs: keep shards of parameters, gradients and optimizer states in host memory, and update them
    there. A GPU holds the weights that it gathers, and activations. Needs several ranks."""

    def __post_init__(self) -> None:
        """Also refuse keys of another kind, which would have no effect, and degrees that leave each other open."""
        require.Checked.__post_init__(self)
        unused = OF_DDP if self.kind == "mesh" else OF_MESH
        for key in fields(self):
            value = getattr(self, key.name)
            default = key.default_factory() if key.default_factory is not MISSING else key.default
            if key.name in unused and value != default:
                remedy = f"leave it out, or use parallel={'ddp' if self.kind == 'mesh' else 'mesh'}"
                raise ConfigError(f"parallel.{key.name}", value, f"has no effect with parallel={self.kind}", remedy)
        names = ("pipeline_degree", "tensor_degree", "shard_degree", "replicate_degree")
        derived = [name for name in names if getattr(self, name) == -1]
        if len(derived) > 1:
            remedy = f"set parallel.{derived[1]}=1, or this one to a number of ranks"
            problem = "only one degree may be -1, what the others leave"
            raise ConfigError(f"parallel.{derived[0]}", -1, problem, remedy)
