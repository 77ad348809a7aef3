"""The state of a training whose ranks share the model, as its checkpoints store it."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor

from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.checkpoint.sharded.chunk_file import Chunk
from hpctrain.checkpoint.state import (
    NAMED,
    LiveState,
    PlainNames,
    Snapshot,
    parameter_names,
    placed_tensors,
    tensors_in,
)
from hpctrain.checkpoint.stored_tensor import marker
from hpctrain.errors import CheckpointError
from hpctrain.parallel.local_part import is_dtensor, local_part
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.sharded_tensor import layout, local_pieces, replicas
from hpctrain.run.checkpoint_manifest import Region

Path = tuple[str, ...]
"""Where a tensor is in the nested dicts of a checkpoint, such as ``("model", "blocks.0.norm.weight")``."""


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part of a tensor that this rank writes.

    Attributes:
        path: of the tensor in the checkpoint.
        shape: of the whole tensor.
        region: of the part.
        number: of the part, among those of this tensor that this rank writes.
    """

    path: Path
    shape: tuple[int, ...]
    region: Region
    number: int = 0

    @property
    def name(self) -> str:
        """The name of the tensor in the checkpoint's index."""
        return ".".join(self.path)

    @property
    def key(self) -> str:
        """A name of the part that no other one of this rank has; that of the tensor for the first."""
        return f"{self.name}#{self.number}" if self.number else self.name


PartCache: TypeAlias = dict[tuple[Path, tuple[int, ...], Hashable], tuple[tuple[WrittenPart, Region], ...]]
"""For a tensor with this path, shape and layout: the parts that this rank writes, and their places in its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSnapshot(Snapshot):
    """One rank's part of a checkpoint, in host memory.

    Attributes:
        model: of each part that this rank writes, by its key, its elements; also of optimizer states and averages.
        optimizer: on rank zero, its state dict, in which a marker stands for each sharded tensor; also on the first
            ranks of other positions in a pipeline. Empty on the others.
        state: on rank zero, as of a `Snapshot`, with such markers; elsewhere only the fields of `Head`.
        parts: shape, region and path of each part, by its key.
        ties: of the model's tensors that have several names, the path of each further one, with that of the first.
        extra_state: on rank zero, entries of the model that aren't tensors, by plain name.
    """

    parts: Mapping[str, WrittenPart]
    ties: Mapping[Path, Path] = field(default_factory=dict)
    extra_state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chunks(self) -> list[Chunk]:
        """The parts, as they are written."""
        return [
            Chunk(name=part.name, shape=part.shape, region=part.region, tensor=self.model[key])
            for key, part in self.parts.items()
        ]

    @property
    def paths(self) -> dict[str, Path]:
        """The path of each tensor of which this rank writes a part."""
        return {part.name: part.path for part in self.parts.values()}


@dataclass(frozen=True)
class LiveShards(LiveState):
    """The state of training between two steps; each rank captures the parts that it writes.

    Attributes:
        world: the ranks.
        copies: names of parameters of this rank that ranks at another position of its pipeline write.
        part_cache: parts computed by earlier saves; each save adds to it. All saves of a training share one dict.
    """

    _: KW_ONLY
    world: TrainingWorld
    copies: frozenset[str] = frozenset()
    part_cache: PartCache = field(default_factory=dict, repr=False, compare=False)

    def _snapshot(self, copy: HostCopy, buffers: Snapshot) -> ShardedSnapshot:
        parts, tensors = {}, {}
        for part, tensor in self._parts():
            key = part.key
            parts[key], tensors[key] = part, copy.of(tensor, buffers.model.get(key), key)
        optimizer, state, extra_state = self._trees()
        return ShardedSnapshot(
            model=tensors,
            optimizer=copy.of(optimizer, buffers.optimizer, "optimizer"),
            state=copy.of(state, buffers.state, "state"),
            parts=parts,
            ties=self._ties,
            extra_state=copy.of(extra_state, None, "model"),
        )

    def _tensors(self) -> Iterator[Tensor]:
        yield from (tensor for _, tensor in self._parts())
        yield from tensors_in(self._trees())

    def _parts(self) -> Iterator[tuple[WrittenPart, Tensor]]:
        """The parts that this rank writes, and their elements, on the device."""
        for name, value in self._weights.items():
            path: Path = ("model", self._plain(name))
            if isinstance(value, Tensor) and path not in self._ties and name not in self.copies:
                yield from self._written_parts(path, value)
        copies = {self._plain(name) for name in self.copies}
        for path, state in self._states:
            if path[-1] not in copies:
                for where, value in _sharded_in(state):
                    yield from self._written_parts((*path, *where), value)
        for where, value in _sharded_in(self.extra):
            if not self.copies.intersection(where):
                yield from self._written_parts(where, value)

    # training waits while these are looked up, so once for each save

    @cached_property
    def _plain(self) -> PlainNames:
        return PlainNames(self.model)

    @cached_property
    def _weights(self) -> Mapping[str, Any]:
        weights: Mapping[str, Any] = self.model.state_dict()
        return weights

    @cached_property
    def _ties(self) -> dict[Path, Path]:
        """Paths of the further names of tensors that have several, with that of the first."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        first: dict[int, Path] = {}
        ties: dict[Path, Path] = {}
        for name, tensor in chain(parameters, self.model.named_buffers(remove_duplicate=False)):
            path: Path = ("model", self._plain(name))
            if (shared := first.setdefault(id(tensor), path)) != path:
                ties[path] = shared
        return ties

    def _written_parts(self, path: Path, tensor: Tensor) -> Iterator[tuple[WrittenPart, Tensor]]:
        """Yield the parts of a tensor that this rank writes, with their elements; none if another rank does."""
        if tensor.is_meta:
            # in a pipeline: only other ranks have this parameter
            return
        shard, parts = local_part(tensor), self._parts_of(path, tensor)
        if len(parts) == 1:
            # slicing would return the same elements, and takes longer than the rest
            yield parts[0][0], shard
            return
        for part, place in parts:
            yield part, shard[place.slices()]

    def _parts_of(self, path: Path, tensor: Tensor) -> tuple[tuple[WrittenPart, Region], ...]:
        """Return the parts that this rank writes, with their places in its shard; computed once per training."""
        shape = tuple(tensor.shape)
        key = path, shape, layout(tensor)
        if (parts := self.part_cache.get(key)) is None:
            try:
                pieces = local_pieces(tensor)
            except ValueError as error:
                raise CheckpointError(f"{'.'.join(path)}: {error}") from error
            if self._writer_of(path, tensor) != self.world.rank:
                pieces = ()
            parts = tuple(
                (WrittenPart(path, shape, piece.region, number), piece.place) for number, piece in enumerate(pieces)
            )
            self.part_cache[key] = parts
        return parts

    def _writer_of(self, path: Path, tensor: Tensor) -> int:
        """Return the rank that writes a part of this tensor, one of those that hold the same one."""
        if not is_dtensor(tensor):
            # buffers: what the ranks have differs, and that of the first one counts
            return self._stage_group * self._group_size
        assert self.world.mesh is not None
        holders = replicas(tensor, self.world.size, self.world.mesh.device_mesh)
        writers = [rank for rank in holders if rank // self._group_size == self._stage_group]
        # spread over the replicas, so that each of them writes about as much
        return writers[zlib.crc32(".".join(path).encode()) % len(writers)]

    @property
    def _stage_group(self) -> int:
        """Number of this rank's group among the groups of ranks with the same stages."""
        return self.world.rank // self._group_size

    @property
    def _group_size(self) -> int:
        assert self.world.mesh is not None
        return self.world.mesh.shape.ranks_per_stage

    @cached_property
    def _states(self) -> list[tuple[Path, Mapping[str, Any]]]:
        """The state of each parameter in each optimizer, and its path."""
        states: list[tuple[Path, Mapping[str, Any]]] = []
        for name, optimizer in self.optimizers.items():
            names = list(chain.from_iterable(parameter_names(self._names, optimizer)))
            for index, state in optimizer.state_dict()["state"].items():
                parameter = names[index] if isinstance(index, int) and index < len(names) else ""
                states.append((("optimizer", *([name] if name else []), "state", parameter or str(index)), state))
        return states

    def _trees(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return rank zero's part of `state.pt`: optimizer, state, and entries of the model that aren't tensors.

        The first rank of each further position in a pipeline sends rank zero the states of its parameters.
        """
        if not self.world.is_rank_zero:
            return self._marked_optimizers() if self.world.share.leads else {}, asdict(self.head), {}
        extras = {self._plain(name): value for name, value in self._weights.items() if not isinstance(value, Tensor)}
        return self._marked_optimizers(), _marked(self._other_state(), (), leave_out=("extra",)), extras

    def _marked_optimizers(self) -> dict[str, Any]:
        by_index = iter([path for path, _ in self._states])

        def marked(saved: Mapping[str, Any]) -> dict[str, Any]:
            states = {index: _marked(state, next(by_index)) for index, state in saved["state"].items()}
            return {**saved, "state": states}

        saved = self._optimizer_state()
        if NAMED in saved:
            return {NAMED: {name: marked(state_dict) for name, state_dict in saved[NAMED].items()}}
        return marked(saved)


def _sharded_in(value: object) -> Iterator[tuple[Path, Tensor]]:
    """Yield the DTensors in a tree, with their places."""
    return ((path, tensor) for path, tensor in placed_tensors(value) if is_dtensor(tensor))


def _marked(value: Any, path: Path, *, leave_out: Iterable[str] = ()) -> Any:
    """Return a tree with a marker in the place of each DTensor.

    Args:
        value: the tree.
        path: of the tree in the checkpoint.
        leave_out: keys that the paths don't have.
    """
    if isinstance(value, Tensor):
        return marker(".".join(path)) if is_dtensor(value) or value.is_meta else value
    if isinstance(value, Mapping):
        return {key: _marked(item, path if key in leave_out else (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        marked = [_marked(item, (*path, str(index))) for index, item in enumerate(value)]
        return tuple(marked) if isinstance(value, tuple) else marked
    return value
