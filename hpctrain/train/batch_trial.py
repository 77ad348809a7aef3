"""The process that tries one micro-batch size for `fit-batch`: `main([CONFIG, SIZE])`.

It prints one JSON object: `fits`, `device`, `limit_bytes` (null if unknown), `peak_bytes`, and, if the steps finished,
`num_samples`, `samples_per_s` and `model_bytes` (`ModelMemory`); otherwise `message`, the allocator's. For an invalid
configuration it prints `error` and `exit_code` instead.

With parallel=mesh, whose degrees are all given, it is one rank of the mesh, and the others don't exist: what they would
send is made up, and losses and gradients are wrong.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hpctrain.attempt.lost_gpu import (
    GPU_OUT_OF_MEMORY,
    closing_unless_lost,
    has_lost_gpu,
    retain_if_gpu_lost,
    with_cuda_message,
)
from hpctrain.checkpoint.host_memory import available_memory_bytes
from hpctrain.cluster.environment import ClusterEnvironment, cpu_threads
from hpctrain.config.checks import refuse_without_gpu
from hpctrain.config.mesh import MeshShape
from hpctrain.config.optimizer import named_optimizers
from hpctrain.config.resources import uses_cuda_graphs
from hpctrain.config.root import Config
from hpctrain.config.stored import load
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.metrics.memory import Memory
from hpctrain.parallel.local_part import local_part
from hpctrain.parallel.mesh import TrainingWorld, fake_world
from hpctrain.rank.compiler import spare_compiler
from hpctrain.rank.determinism import set_determinism
from hpctrain.rank.devices import choose_devices
from hpctrain.rank.world import World
from hpctrain.run.process import open_files_raised
from hpctrain.startup import with_working_directory
from hpctrain.streams import flush_output
from hpctrain.train.training import build
from hpctrain.train.update import JointUpdate, parameters_of

STEPS = 3
"""The first step allocates the optimizer's state, the second has everything in place, the third is timed."""
OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "std::bad_alloc")
"""In the messages of allocators, in lower case; those of libraries on a GPU are in `GPU_OUT_OF_MEMORY`."""


def main(arguments: list[str]) -> int:
    """Try one size, and print the result."""
    path, size = arguments
    config = load(Path(path))
    # as in a job: such a variable may change the allocator, or the memory that a library takes
    os.environ.update(config.cluster.env)
    spare_compiler()
    sys.path[:] = with_working_directory()
    with (
        open_files_raised(),
        contextlib.redirect_stdout(sys.stderr),
    ):  # the task's own output must not mix with the result
        try:
            report = _trial(config, int(size))
        except HpctrainError as error:
            report = {"error": str(error), "exit_code": int(error.exit_code)}
        except Exception as error:
            if retain_if_gpu_lost(error):
                # Python's own exit would free what the GPU has used, and die of a signal, as if memory were short
                traceback.print_exception(with_cuda_message(error))
                flush_output()
                os._exit(ExitCode.FAILED)
            raise
    print(json.dumps(report), flush=True)  # noqa: T201 - to the command that started this process
    if has_lost_gpu():
        os._exit(0)
    return 0


def _trial(config: Config, size: int) -> dict[str, Any]:
    environment = ClusterEnvironment.from_environment({})
    threads = cpu_threads(environment, config.cluster.cpus_per_process, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    set_determinism(config.trainer.deterministic, cudnn_benchmark=config.trainer.cudnn_benchmark)
    cluster = config.cluster
    gpus_per_process = None if config.parallel.kind == "data_parallel" else cluster.gpus_per_process
    devices = choose_devices(environment, gpus_per_process, use_gpu=cluster.node_gpus != 0)
    if devices[0].type == "cpu":
        refuse_without_gpu(config, "run fit-batch where the GPUs are")
    world = _world(config, devices)
    report: dict[str, Any] = {"device": str(devices[0]), "limit_bytes": _limit_bytes(world), "fits": False}
    try:
        report |= _steps(config, world, size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        report["message"] = str(error).strip().splitlines()[0] if str(error) else "out of memory"
    else:
        report["fits"] = True
    report["peak_bytes"] = _peak_bytes(world)
    return report


def _world(config: Config, devices: tuple[torch.device, ...]) -> TrainingWorld:
    """One rank of a mesh; a world of one if the ranks don't share the model, or there is only one."""
    parallel = config.parallel
    degrees = [
        degree
        for degree in (parallel.replicate_degree, parallel.shard_degree, parallel.tensor_degree)
        if degree not in (None, -1)
    ]
    if parallel.kind != "mesh" or len(degrees) < 3:
        return TrainingWorld(rank=0, size=1, local_rank=0, devices=devices)
    return fake_world(MeshShape(*degrees), devices)


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an error means that the size is too large, on a CPU or a GPU."""
    text = str(error)
    if isinstance(error, MemoryError) or GPU_OUT_OF_MEMORY.search(text):
        return True
    return any(words in text.lower() for words in OUT_OF_MEMORY)


def trial_config(config: Config, size: int, steps: int) -> Config:
    """The configuration of a trial: a few steps with this micro-batch size.

    Args:
        config: of the run.
        size: samples per forward.
        steps: how many.
    """
    # two micro-batches: during the second forward pass, the gradients of the first take memory as well. With CUDA
    # graphs one, since such a run can't accumulate: the second would overwrite the gradients of the first.
    total = size if uses_cuda_graphs(config) else 2 * size
    trainer = replace(config.trainer, max_steps=steps, max_epochs=None, micro_batch_size=size, global_batch_size=total)
    # the weights need memory, whatever they are
    return replace(config, trainer=trainer, init_from=None)


def _steps(config: Config, world: TrainingWorld, size: int) -> dict[str, Any]:
    period = math.lcm(*(optimizer.every_steps for optimizer in named_optimizers(config.optimizer)))
    config = trial_config(config, size, STEPS * period)
    hook = None if world.mesh is None else _make_finite
    training = build(config, world, only_trains=True, after_backward=hook)
    # the most memory is needed once everything is unfrozen, in steps of all turns
    training.step.prepare(sys.maxsize)
    samples = training.data.plan.num_samples
    begin, position = time.perf_counter(), training.position
    with closing_unless_lost(training.data.loader(0).micro_batches(training.data.transfer)) as micro_batches:
        for step in range(period - 1, STEPS * period, period):
            begin = time.perf_counter()
            training.step(step, micro_batches)
            position.step = step + 1
        training.meter.means()
    rate = config.trainer.global_batch_size / (time.perf_counter() - begin)
    return {"num_samples": samples, "samples_per_s": rate, "model_bytes": asdict(training.model_memory())}


def _make_finite(update: JointUpdate) -> None:
    """Replace NaN in gradients, which the missing ranks cause: the update would be skipped, and allocate no state."""
    if update.scaler is None:
        return
    for parameter in (parameter for part in update.updates for parameter in parameters_of(part.optimizer)):
        if parameter.grad is not None:
            local_part(parameter.grad).nan_to_num_(0.0, 0.0, 0.0)


def _limit_bytes(world: World) -> int | None:
    """The memory that this process may use in total, including what it uses already."""
    if world.gpus:
        return min(torch.cuda.mem_get_info(device)[0] for device in world.gpus)
    available = available_memory_bytes()
    return None if available is None else available + _peak_bytes(world)


def _peak_bytes(world: World) -> int:
    if world.gpus:
        return max(torch.cuda.max_memory_reserved(device) for device in world.gpus)
    return Memory(world.device).peak()
