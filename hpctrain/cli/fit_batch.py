"""Find the largest micro-batch that fits into this machine's memory, by trying.

examples:
  python -m hpctrain fit-batch task=text
  python -m hpctrain fit-batch task=text parallel=fsdp --ranks 4
  srun --gpus=1 python -m hpctrain fit-batch model=resnet task=image_folder precision=bf16

Each size is tried for three steps of two micro-batches, in a separate process, so that no size inherits the memory of
the one before. With trainer.compile_mode=reduce-overhead or max-autotune, a step has one micro-batch, as in the run. A
trial uses the run's precision, optimizer, compiler and activation checkpointing, but only one process, without the
buffers of communication; the margin leaves memory for those. On a GPU, a size fits if torch's allocator can hold it. On
a CPU, the memory of the whole process is compared with what the machine and its control groups offer, divided by the
processes per node; a size that smaller ones predict to need more isn't tried. Nothing is written.

With parallel=mesh, a trial is one rank of the mesh, and the others don't exist: its memory is that of a rank, and its
speed that of a rank that never waits for the others. With parallel.tensor_degree, its losses are wrong, because the
others' parts of each layer are missing; its memory isn't. On a CPU, that memory includes the whole model, which rank
zero builds. With --ranks, a degree that is null needs cluster.processes_per_node.

Exit code 0; 1 if not even one sample fits or the task fails; 2 for overrides that can't work.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.cli.arguments import add_overrides, command_parser, number
from hpctrain.cluster.variables import without_job_variables
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.mesh import MeshShape, mesh_shape
from hpctrain.config.program import split_command
from hpctrain.config.resources import counted_shares, ranks_per_node, resources_of, uses_cuda_graphs
from hpctrain.config.root import Config
from hpctrain.config.stored import to_yaml
from hpctrain.errors import ConfigError, ExitCode, HpctrainError, RunFailedError
from hpctrain.files import write_atomic
from hpctrain.run.temporary_folder import temporary_folder

GB = 1e9
MARGIN = 0.1
TRIAL = """\
import sys
from hpctrain.startup import exclude_working_directory
exclude_working_directory()
from hpctrain.train.batch_trial import main
sys.exit(main(sys.argv[1:]))"""
"""The program of a trial: torch must not come from the working directory, and the task may."""
RESOLUTION = 16
"""The search ends when the largest size that fits and the smallest that doesn't differ by less than one part in 16."""
WORTHWHILE = 0.95
"""Share of the best throughput that is good enough: a micro-batch beyond it isn't worth its memory."""


class TrialRefusedError(HpctrainError):
    """The trial's process refused its configuration."""

    exit_code = ExitCode.BAD_CONFIGURATION


def main(arguments: list[str]) -> int:
    """Search; ``arguments`` are those after `fit-batch`."""
    parser = command_parser("fit-batch", __doc__)
    add_overrides(parser, "what to train; as for a run")
    meaning = "the largest size to try (default: a rank's share of the global batch)"
    parser.add_argument("--largest", type=number(1, 2**40, int), metavar="N", help=meaning)
    meaning = "number of ranks of the run (default: those that it would have on this machine)"
    parser.add_argument("--ranks", type=number(1, 2**24, int), metavar="N", help=meaning)
    meaning = "memory that one process may use (default: what is free on this machine)"
    parser.add_argument("--memory-gb", type=number(0.001, 1e9), metavar="GB", help=meaning)
    meaning = f"fraction of the memory to keep free (default: {MARGIN:g})"
    parser.add_argument("--margin", type=number(0, 0.99), default=MARGIN, metavar="SHARE", help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    if "--" in arguments:
        program = shlex.join(split_command(arguments)[1])
        problem = "fit-batch knows the batches of hpctrain's own trainings, not those of a program"
        raise ConfigError("run.command", program, problem, "write KEY=VALUE of a training")
    options = parser.parse_intermixed_args(arguments)
    composer = Composer(options.config_dir)
    composer.can_sweep = False
    config = composer.compose(options.overrides, world_size=options.ranks)
    if isinstance(config.cluster, Slurm):
        problem = "fit-batch tries on the machine where it is typed"
        raise ConfigError("cluster.kind", "slurm", problem, "write srun --gpus=1 python -m hpctrain fit-batch ...")
    if (degree := config.parallel.pipeline_degree) != 1:
        problem = "passes activations on to other ranks, which fit-batch doesn't have"
        remedy = "try parallel=fsdp with the ranks of one replica, which takes about as much memory"
        raise ConfigError("parallel.pipeline_degree", degree, problem, remedy)
    ranks = options.ranks = options.ranks or resources_of(config).world_size
    # a run of one rank has no mesh
    shape = None if ranks == 1 else mesh_shape(config.parallel, ranks, ranks_per_node(config, ranks))
    if shape is not None:
        degrees = {f"{name}_degree": getattr(shape, name) for name in ("replicate", "shard", "tensor")}
        config = replace(config, parallel=replace(config.parallel, **degrees))
    with temporary_folder("fit-batch") as folder:
        return _search(config, shape, Path(folder, "config.yaml"), options)


def _search(config: Config, shape: MeshShape | None, config_path: Path, options: argparse.Namespace) -> int:
    progress = sys.stderr if options.json else sys.stdout
    write_atomic(config_path, to_yaml(config), durable=False)
    # of the samples of a step
    num_shares = options.ranks if shape is None else shape.data_parallel_size
    # the first trial also reports the device and its memory
    first = _run_trial(config_path, 1)
    on_gpu = first["device"] != "cpu"
    available = _available_bytes(config, first, options.memory_gb)
    limit = int(available * (1 - options.margin))
    print(
        f"{limit / GB:.2f} GB for one process on {first['device']} ({available / GB:.2f} GB, {options.margin:.0%} of "
        "it kept free)\nmicro-batch       peak   samples/s",
        file=progress,
    )
    bound = options.largest or config.trainer.global_batch_size // num_shares
    # a trial's step takes two micro-batches, or one with CUDA graphs
    per_step = 1 if uses_cuda_graphs(config) else 2
    largest = min(bound, max(1, first.get("num_samples", per_step) // per_step))
    search = BatchSearch(limit_bytes=limit, largest=largest, careful=not on_gpu)
    while (size := search.next_size()) is not None:
        trial = search.prediction(size)
        if trial is None:
            trial = _as_trial(first if size == 1 else _run_trial(config_path, size), size, limit)
        search.record(trial)
        print(_row(trial), file=progress, flush=True)
    answer = _answer(config, search, num_shares)
    advised_trial = _advised_trial(search, answer)
    if advised_trial is not None and advised_trial.model_bytes is not None:
        print(_shares(advised_trial, shape, offloads=config.parallel.cpu_offload), file=progress)
    if options.json:
        trials = [asdict(trial) for trial in search.trials]
        print(json.dumps({**answer, "limit_bytes": limit, "trials": trials}))
    else:
        print(_advice(config, search, answer, options.ranks, num_shares))
    return ExitCode.FINISHED if search.fits else ExitCode.FAILED


def _advised_trial(search: BatchSearch, answer: Mapping[str, int | None]) -> BatchTrial | None:
    """The trial of the micro-batch that is advised, or of the next smaller one; None if none fits."""
    advised = answer["trainer.micro_batch_size"] or search.fits
    fitting = [trial for trial in search.trials if trial.fits and trial.micro_batch_size <= advised]
    return max(fitting, key=lambda trial: trial.micro_batch_size, default=None)


def _shares(trial: BatchTrial, shape: MeshShape | None, *, offloads: bool) -> str:
    """Say what takes the memory of a trial."""
    assert trial.model_bytes is not None
    sizes = {name: size for name, size in trial.model_bytes.items() if size}
    remaining = (trial.peak_bytes or 0) - sum(sizes.values())
    shares = ", ".join(f"{name} {size / GB:.2f}" for name, size in sizes.items())
    if offloads:
        on_gpu = f"on the GPU {(trial.peak_bytes or 0) / GB:.2f}"
        return f"with micro-batches of {trial.micro_batch_size}, in GB: {on_gpu}; in host memory {shares}"
    gathered = "" if shape is None else ", gathered weights"
    return (
        f"with micro-batches of {trial.micro_batch_size}, in GB: {shares}; activations{gathered} and the rest "
        f"{max(0, remaining) / GB:.2f}"
    )


def _available_bytes(config: Config, first: dict[str, Any], memory_gb: float | None) -> int:
    if memory_gb is not None:
        return int(memory_gb * GB)
    if not first["limit_bytes"]:
        raise HpctrainError("the memory of this machine is unknown: give --memory-gb")
    # the processes of a node share its memory, but not its GPUs
    shares = 1 if first["device"] != "cpu" else resources_of(config).processes_per_node
    return int(first["limit_bytes"]) // shares


def _run_trial(config_path: Path, size: int) -> dict[str, Any]:
    """Try a size; return the record that `hpctrain.train.batch_trial` describes, without `error`."""
    # without SLURM's variables: under `srun fit-batch` the trial would take itself for a rank
    command = [sys.executable, "-c", TRIAL, str(config_path), str(size)]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=without_job_variables(os.environ)
    )
    # by the kernel's out-of-memory killer; if it kills a trial with one sample, there is nothing to search
    if process.returncode < 0 and size > 1:
        return {"fits": False, "message": f"killed by signal {-process.returncode}"}
    if process.returncode:
        raise RunFailedError(f"three steps with micro-batches of {size} failed: see above")
    # the last line: libraries print to the descriptor below Python's standard output
    record: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if "error" in record:
        is_refused = record["exit_code"] == ExitCode.BAD_CONFIGURATION
        raise (TrialRefusedError if is_refused else RunFailedError)(record["error"])
    return record


def _as_trial(record: dict[str, Any], size: int, limit_bytes: int) -> BatchTrial:
    peak: int | None = record.get("peak_bytes")
    return BatchTrial(
        micro_batch_size=size,
        fits=bool(record["fits"]) and peak is not None and peak <= limit_bytes,
        peak_bytes=peak,
        samples_per_s=record.get("samples_per_s"),
        message=record.get("message", ""),
        model_bytes=record.get("model_bytes"),
    )


def _row(trial: BatchTrial) -> str:
    peak = "-" if trial.peak_bytes is None else f"{trial.peak_bytes / GB:.2f} GB"
    rate = "-" if trial.samples_per_s is None else f"{trial.samples_per_s:.4g}"
    note = "" if trial.fits else "  too large, predicted" if trial.predicted else "  too large"
    return f"{trial.micro_batch_size:>11} {peak:>10} {rate:>11}{note}{': ' * bool(trial.message)}{trial.message}"


def _answer(config: Config, search: BatchSearch, num_shares: int) -> dict[str, int | None]:
    # no micro-batch can be larger
    per_rank = config.trainer.global_batch_size // num_shares
    # the micro-batches of a step must be of one size; with CUDA graphs there can be only one of them
    smallest = per_rank if uses_cuda_graphs(config) else 1
    sizes = range(smallest, min(search.fits, per_rank) + 1)
    usable = max((size for size in sizes if per_rank % size == 0), default=None)
    trials = (trial for trial in search.trials if trial.fits and trial.micro_batch_size <= per_rank)
    rates = {trial.micro_batch_size: trial.samples_per_s for trial in trials if trial.samples_per_s}
    best = max(rates.values(), default=0.0)
    enough = min((size for size, rate in rates.items() if rate >= WORTHWHILE * best), default=None)
    return {"largest": search.fits, "trainer.micro_batch_size": usable, "worthwhile": enough}


def _advice(config: Config, search: BatchSearch, answer: dict[str, int | None], num_ranks: int, num_shares: int) -> str:
    if not search.fits:
        shards = "a larger parallel.shard_degree, " * (config.parallel.kind == "mesh")
        remedies = f"{shards}trainer.activation_checkpointing, precision=bf16, or a smaller model"
        return f"not even one sample fits: see {remedies}"
    per_rank, usable = config.trainer.global_batch_size // num_shares, answer["trainer.micro_batch_size"]
    ranks = counted_shares(num_shares, num_ranks // num_shares)
    owner = "a rank's" if num_shares == num_ranks else "a group's"
    split = f"with trainer.global_batch_size={config.trainer.global_batch_size} and {ranks}"
    note = ""
    if search.fits == per_rank:
        note = f", {owner} whole share of a step; to go higher, raise trainer.global_batch_size"
    elif search.fits == search.largest:
        note = ", and no larger one was tried (--largest, or the number of samples)"
    lines = [f"largest that fits: {search.fits}{note}"]
    if usable is None:
        mode = config.trainer.compile_mode
        lines.append(
            f"{split}: no micro-batch size works, because trainer.compile_mode={mode} doesn't allow accumulation, and "
            f"a rank's whole share ({per_rank}) doesn't fit; lower trainer.global_batch_size to at most "
            f"{search.fits * num_shares}, or set trainer.compile_mode=default"
        )
    else:
        is_current = usable == (config.trainer.micro_batch_size or per_rank)
        lines.append(f"{split}: trainer.micro_batch_size={usable}{', which the run already uses' * is_current}")
    if answer["worthwhile"] is not None and answer["worthwhile"] < (usable or 0):
        lines.append(f"sizes above {answer['worthwhile']} are less than {1 - WORTHWHILE:.0%} faster")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """A few steps with one micro-batch size, in a separate process.

    Attributes:
        micro_batch_size: samples per forward.
        fits: whether the steps stayed within the memory limit.
        peak_bytes: peak memory use; None if the process was killed.
        samples_per_s: throughput of the last step; None if no step finished.
        predicted: the size wasn't tried, because smaller sizes predict that it needs too much memory.
        message: the error that the allocator raised, if any.
        model_bytes: what the process holds of the model, by kind (`ModelMemory`); None if the trial didn't finish.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: int | None
    samples_per_s: float | None = None
    predicted: bool = False
    message: str = ""
    model_bytes: dict[str, int | None] | None = None


@dataclass(slots=True)
class BatchSearch:
    """Doubles the size until one doesn't fit, then halves the gap.

    Args:
        limit_bytes: the memory that a trial may use.
        largest: the largest size to try.
        careful: don't try a size that is predicted not to fit. On a CPU the kernel kills processes when memory runs
            out, and not always the one that took it.
    """

    limit_bytes: int
    largest: int
    careful: bool
    fits: int = field(default=0, init=False)
    """The largest size that fits so far; 0 before there is one."""
    too_large: int | None = field(default=None, init=False)
    """The smallest size that doesn't fit so far."""
    trials: list[BatchTrial] = field(default_factory=list, init=False)

    def next_size(self) -> int | None:
        """The size to try next; None when the search is over."""
        if self.too_large is None:
            return min(max(1, 2 * self.fits), self.largest) if self.fits < self.largest else None
        if self.too_large - self.fits > max(1, self.fits // RESOLUTION):
            return (self.fits + self.too_large) // 2
        return None

    def prediction(self, size: int) -> BatchTrial | None:
        """Return the result of a trial that can be skipped, because the size is predicted not to fit; else None."""
        expected = self.expected_bytes(size)
        if not self.careful or expected is None or expected <= self.limit_bytes:
            return None
        return BatchTrial(micro_batch_size=size, fits=False, peak_bytes=expected, predicted=True)

    def record(self, trial: BatchTrial) -> None:
        """Narrow the search by the result of a trial."""
        self.trials.append(trial)
        if trial.fits:
            self.fits = trial.micro_batch_size
        else:
            self.too_large = trial.micro_batch_size

    def expected_bytes(self, size: int) -> int | None:
        """Extrapolate a size's memory linearly from the two largest sizes that fit; None until two fit."""
        # beyond what the model and the optimizer take, memory grows linearly with the batch
        fitting = (trial for trial in self.trials if trial.fits)
        points = sorted((trial.micro_batch_size, trial.peak_bytes) for trial in fitting if trial.peak_bytes)
        if len(points) < 2:
            return None
        (smaller, smaller_bytes), (larger, larger_bytes) = points[-2:]
        return larger_bytes + max(0, larger_bytes - smaller_bytes) * (size - larger) // (larger - smaller)
