"""Save by all ranks, each its part, so that a checkpoint is complete or absent on all nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.sharded.chunk_file import WrittenFile, encode_metadata, write_chunks
from hpctrain.checkpoint.sharded.digest import MODULUS, combine_sums, partial_sums
from hpctrain.checkpoint.sharded.live_shards import LiveShards, PartCache, ShardedSnapshot
from hpctrain.checkpoint.state import NAMED
from hpctrain.checkpoint.stored_tensor import MODEL_PREFIX
from hpctrain.checkpoint.write import publish, unpublished, without_crc32, write_bytes, write_manifest, write_part
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import CheckpointError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.message import pack, unpack
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.checkpoint_manifest import (
    INDEX,
    METADATA,
    SHARDED_VERSION,
    STATE,
    ChunkPlace,
    IndexedTensor,
    encode_index,
)
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim

log = logging.getLogger("hpctrain.checkpoint")


class ShardedWriter:
    """Writes the snapshots of all ranks into one directory; each call is collective over the ranks' writing threads.

    Rank zero makes the directory, collects what the others wrote, and publishes it. Nothing is published unless all
    ranks have written their parts. No model is gathered on rank zero: memory and time would grow with it. DCP's own
    writer has no checksums, unpickles what other ranks send, and doesn't publish a save in one rename.

    Args:
        directory: of the run.
        claim: of this attempt, checked on rank zero before anything is written and before it is published.
        world: the ranks.
        num_files: files that each rank writes, side by side.
    """

    def __init__(self, directory: RunDirectory, claim: Claim, world: TrainingWorld, *, num_files: int = 1) -> None:
        assert world.mesh is not None
        self._directory = directory
        self._claim = claim
        self._mesh = world.mesh.shape.degrees
        # the training thread uses the control group meanwhile
        self._world = replace(world, control=world.mesh.saving)
        self._num_files = num_files

    def write(self, snapshot: ShardedSnapshot | Exception) -> Path | None:
        """Write the parts of this rank, make them durable, and on rank zero publish the checkpoint.

        Args:
            snapshot: of this rank; must not change until this returns. Or why this rank has none: then no rank
                publishes anything.

        Returns:
            The directory of the checkpoint on rank zero; None on the others.

        Raises:
            SupersededError: on rank zero, a later attempt owns the run; nothing was published.
            CheckpointError: a rank can't write its part; earlier checkpoints are unchanged.
        """
        if not self._world.is_rank_zero:
            self._write_part_of(snapshot)
            return None
        is_announced, problem = False, ""
        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            with unpublished(self._directory, self._claim, snapshot.step) as temporary:
                self._world.broadcast(str(temporary))
                is_announced = True
                gathered = self._world.gather(self._try_to_write(snapshot, temporary))
                assert gathered is not None
                problems = [f"rank {rank}: {part}" for rank, part in enumerate(gathered) if isinstance(part, str)]
                if problems:
                    raise CheckpointError("; ".join(problems))
                self._finish(snapshot, temporary, gathered)
                return publish(temporary, self._directory.checkpoint(snapshot.step), self._claim)
        except Exception as error:
            problem = str(error) or type(error).__name__
            raise
        finally:
            if not is_announced:
                self._world.broadcast(None)
            # the other ranks wait for it: their buffers belong to this save until it is over
            self._world.broadcast(problem)

    def size_of(self, snapshot: ShardedSnapshot | Exception) -> int:
        """Return about how many bytes the checkpoint takes, as if each rank wrote as much as this one."""
        if isinstance(snapshot, Exception):
            return 0
        return self._world.size * sum(chunk.tensor.nbytes for chunk in snapshot.chunks)

    def _write_part_of(self, snapshot: ShardedSnapshot | Exception) -> None:
        """Write this rank's part into rank zero's directory, and wait for the end of the save."""
        if (path := self._world.broadcast(None)) is not None:
            self._world.gather(self._try_to_write(snapshot, Path(path)))
        if problem := self._world.broadcast(None):
            raise CheckpointError(problem, elsewhere=True)

    def _try_to_write(self, snapshot: ShardedSnapshot | Exception, path: Path) -> dict[str, Any] | str:
        """Write the files of this rank; return their description for rank zero, or what went wrong."""
        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            return self._write_files(snapshot, path)
        except Exception as error:
            # every rank must take part in the exchange that follows
            reason = error.strerror if isinstance(error, OSError) else None
            return reason or str(error) or type(error).__name__

    def _write_files(self, snapshot: ShardedSnapshot, path: Path) -> dict[str, Any]:
        chunks = sorted(snapshot.chunks, key=lambda chunk: chunk.tensor.nbytes, reverse=True)
        weights = [chunk for chunk in chunks if chunk.name.startswith(MODEL_PREFIX)]
        # side by side: checksums, sums and writes all release the GIL
        with ThreadPoolExecutor(self._num_files + 1) as threads:
            sums = threads.submit(lambda: _add_up({chunk.name: partial_sums(chunk)} for chunk in weights))
            files = [
                threads.submit(write_chunks, path / f"__{self._world.rank}_{number}.distcp", share)
                for number in range(self._num_files)
                if (share := chunks[number :: self._num_files])
            ]
            return {
                "files": [future.result() for future in files],
                "shapes": {
                    chunk.name: [list(chunk.shape), str(chunk.tensor.dtype).removeprefix("torch.")] for chunk in chunks
                },
                "sums": {name: [str(lane) for lane in lanes] for name, lanes in sums.result().items()},
                "paths": {name: list(place) for name, place in snapshot.paths.items()},
                # rank zero has its own
                "states": pack(_states_in(snapshot.optimizer)) if snapshot.optimizer and self._world.rank else None,
            }

    def _finish(self, snapshot: ShardedSnapshot, path: Path, gathered: list[Any]) -> None:
        """Write on rank zero what describes the parts of all ranks."""
        data_files = [WrittenFile(*file) for part in gathered for file in part["files"]]
        shapes = {name: shape for part in gathered for name, shape in part["shapes"].items()}
        tensors = _index(shapes, data_files)
        paths = {name: tuple(place) for part in gathered for name, place in part["paths"].items()}
        lanes = _add_up(part["sums"] for part in gathered)
        for further, first in snapshot.ties.items():
            # written once, and found under both names
            name, written_as = ".".join(further), ".".join(first)
            if written_as in tensors:
                tensors[name], paths[name], lanes[name] = tensors[written_as], further, lanes[written_as]
        optimizer = snapshot.optimizer
        for part in gathered:
            if part["states"] is not None:
                optimizer = _add_states(optimizer, unpack(part["states"]))
        files = {file.name: {"bytes": file.bytes, "checksum": file.checksum} for file in data_files}
        with without_crc32():
            content = {"optimizer": optimizer, "state": snapshot.state, "model": dict(snapshot.extra_state)}
            files[STATE] = write_part(path / STATE, content)
        files[INDEX] = write_bytes(path / INDEX, encode_index(tensors))
        files[METADATA] = write_bytes(path / METADATA, encode_metadata(tensors, paths))
        digest = combine_sums(
            {
                name.removeprefix(MODEL_PREFIX): (tensor.shape, tensor.dtype, lanes.get(name, (0, 0)))
                for name, tensor in tensors.items()
                if name.startswith(MODEL_PREFIX)
            }
        )
        write_manifest(
            path, snapshot.state, files, version=SHARDED_VERSION, weights_digest=digest, mesh=dict(self._mesh)
        )


def _index(shapes: Mapping[str, Any], files: Sequence[WrittenFile]) -> dict[str, IndexedTensor]:
    """Return where all parts are; a tensor without elements has none."""
    places: dict[str, list[ChunkPlace]] = {name: [] for name in sorted(shapes)}
    for file in files:
        for name, place in file.places:
            places[name].append(ChunkPlace.from_list(place))
    return {
        name: IndexedTensor(
            tuple(shapes[name][0]), shapes[name][1], tuple(sorted(chunks, key=lambda place: place.region.offsets))
        )
        for name, chunks in places.items()
    }


def _states_in(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of parameters in a state dict, by the name of the optimizer."""
    return {name: state["state"] for name, state in optimizer.get(NAMED, {"": optimizer}).items()}


def _add_states(optimizer: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Add the states of parameters that other ranks have; the states that are there stay."""
    by_name = optimizer.get(NAMED, {"": optimizer})
    merged = {name: {**state, "state": {**states[name], **state["state"]}} for name, state in by_name.items()}
    return {NAMED: merged} if NAMED in optimizer else merged[""]


def _add_up(sums: Iterable[Mapping[str, Sequence[int | str]]]) -> dict[str, tuple[int, ...]]:
    """Add up the sums of chunks or ranks, by the tensor's name."""
    totals: dict[str, tuple[int, ...]] = {}
    for summand in sums:
        for name, lanes in summand.items():
            before = totals.get(name, (0,) * len(lanes))
            totals[name] = tuple((old + int(new)) % MODULUS for old, new in zip(before, lanes, strict=True))
    return totals


class ShardedSaver(CheckpointSaver):
    """Saves on every rank; `save` is collective, and must not be called where rank zero can't save.

    The errors of all ranks are raised on rank zero, as those of a whole checkpoint are. On the other ranks nothing is
    raised, so that all ranks reach the next exchange.

    Args:
        directory: of the run.
        claim: of this attempt.
        policy: conf/checkpoint.
        stop: see `CheckpointSaver`.
        world: the ranks, with a mesh.
        copies: names of parameters of this rank that another one writes.
        options: further ones of a `CheckpointSaver`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        claim: Claim,
        policy: Checkpoint,
        stop: StopRequest,
        *,
        world: TrainingWorld,
        copies: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        super().__init__(directory, claim, policy, stop, is_rank_zero=world.is_rank_zero, **options)
        self._writer = ShardedWriter(directory, claim, world, num_files=policy.writers)
        self._takes_part = True
        self._world = world
        self._copies = copies
        self._part_cache: PartCache = {}

    def live_state(self, **fields: Any) -> LiveShards:
        """See `CheckpointSaver`."""
        return LiveShards(**fields, world=self._world, copies=self._copies, part_cache=self._part_cache)

    def begin(self) -> tuple[bool, Exception | None]:
        """See `CheckpointSaver`: all ranks save, unless rank zero has an error of the save before."""
        failure: Exception | None = None
        if self._is_rank_zero:
            try:
                self.finish()
            except Exception as error:
                failure = error
        return bool(self._world.broadcast(failure is None)), failure

    def _snapshot(self, state: Any) -> Any:
        try:
            return super()._snapshot(state)
        except Exception as error:
            # every rank must take part in the exchange, in which rank zero learns of the error
            return error

    def _write(self, snapshot: Any, retain: bool) -> None:
        try:
            super()._write(snapshot, retain and self._is_rank_zero)
        except Exception as error:
            if self._is_rank_zero:
                raise
            log.debug("rank zero reports why the save failed: %s", error)
