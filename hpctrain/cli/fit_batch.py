"""`python -m hpctrain fit-batch [KEY=VALUE ...]`: the largest micro-batch that fits into memory here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cluster.scrub import scrubbed
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.config.stored import to_yaml
from hpctrain.errors import ConfigError, ExitCode, HpctrainError, RunFailedError
from hpctrain.launch.batch_search import BatchSearch, Trial

GB = 1e9
MARGIN = 0.1
WORTHWHILE = 0.95
"""Share of the best throughput from which a larger micro-batch isn't worth its memory."""

_EPILOG = """\
examples:
  python -m hpctrain fit-batch task=text
  srun --gpus=1 python -m hpctrain fit-batch model=resnet task=image_folder precision=bf16

Each size is tried for three steps of two micro-batches, in a process of its own, so that nothing of one is left for the
next: as the run would be, with its precision, optimizer, compiler and activation checkpointing, by a single process
without the buffers of communication, for which the margin leaves room. On a GPU a size fits if its memory, as torch's
allocator holds it, does. On a CPU the memory is that of the whole process, against what the machine and its control
groups can give, shared by the processes of the node; a size that is expected to take more, by those before it, isn't
tried. Nothing is written.

Exit code 0; 1 where not even one sample fits or the task fails; 2 for overrides that can't work."""


class TrialRefusedError(HpctrainError):
    """What a trial's process raised on purpose, with its own exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code)  # type: ignore[misc]  # of this one error, not of its class


def main(arguments: list[str]) -> int:
    """Search; `arguments` are those after the word `fit-batch`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain fit-batch",
        description="Find the largest micro-batch that fits into this machine's memory, by trying.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to train; as for a run")
    parser.add_argument("--largest", type=int, default=65536, metavar="N", help="stop at this size (65536)")
    parser.add_argument("--memory-gb", type=float, metavar="GB", help="that one process may take; what is free here")
    parser.add_argument("--margin", type=float, default=MARGIN, help=f"share of it that stays free ({MARGIN:g})")
    parser.add_argument("--config-dir", help="a folder with more configuration")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_intermixed_args(arguments)
    config = Composer(options.config_dir).compose(options.overrides)
    if isinstance(config.cluster, Slurm):
        problem = "fit-batch tries on the machine where it is typed"
        raise ConfigError("cluster.kind", "slurm", problem, "write srun --gpus=1 python -m hpctrain fit-batch ...")
    with tempfile.TemporaryDirectory(prefix="hpctrain_fit_batch_") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(to_yaml(config))
        return _search(config, path, options)


def _search(config: Config, path: Path, options: argparse.Namespace) -> int:
    first = _attempt(path, 1)
    on_gpu = first["device"] != "cpu"
    shares = 1 if on_gpu else resources_of(config).processes_per_node
    known = first["limit_bytes"] // shares if first["limit_bytes"] else None
    whole = known if options.memory_gb is None else int(options.memory_gb * GB)
    if whole is None:
        raise HpctrainError("how much memory there is can't be told on this machine: give --memory-gb")
    limit = int(whole * (1 - options.margin))
    # two micro-batches are needed for one step
    largest = min(options.largest, max(1, first.get("num_samples", 2) // 2))
    said = sys.stderr if options.json else sys.stdout
    print(f"{limit / GB:.2f} GB for one process on {first['device']} ({whole / GB:.2f} GB, {options.margin:.0%} of it "
          "kept free)\nmicro-batch       peak   samples/s", file=said)  # fmt: skip
    search = BatchSearch(
        attempt=lambda size: _trial(first if size == 1 else _attempt(path, size), size, limit),
        limit_bytes=limit,
        largest=largest,
        careful=not on_gpu,
        said=lambda trial: print(_row(trial), file=said, flush=True),
    )
    fits = search.run()
    answer = _answer(config, search, fits)
    if options.json:
        print(json.dumps({**answer, "limit_bytes": limit, "trials": [asdict(trial) for trial in search.trials]}))
    else:
        print(_advice(config, search, answer))
    return ExitCode.FINISHED if fits else ExitCode.FAILED


def _attempt(path: Path, size: int) -> dict[str, Any]:
    """What the process of one trial says; what it prints otherwise goes where errors go."""
    command = [sys.executable, "-m", "hpctrain.train.batch_trial", str(path), str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=scrubbed(os.environ))
    if done.returncode < 0 and size > 1:
        return {"fits": False, "message": f"ended by signal {-done.returncode}"}
    if done.returncode:
        raise RunFailedError(f"three steps with micro-batches of {size} failed: see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise TrialRefusedError(found["error"], found["exit_code"])
    return found


def _trial(found: dict[str, Any], size: int, limit_bytes: int) -> Trial:
    peak: int | None = found.get("peak_bytes")
    return Trial(
        micro_batch_size=size,
        fits=bool(found["fits"]) and peak is not None and peak <= limit_bytes,
        peak_bytes=peak,
        samples_per_s=found.get("samples_per_s"),
        message=found.get("message", ""),
    )


def _row(trial: Trial) -> str:
    peak = "-" if trial.peak_bytes is None else f"{trial.peak_bytes / GB:.2f} GB"
    rate = "-" if trial.samples_per_s is None else f"{trial.samples_per_s:.4g}"
    note = "" if trial.fits else "  too large, as the sizes before let expect" if trial.predicted else "  too large"
    return f"{trial.micro_batch_size:>11} {peak:>10} {rate:>11}{note}{': ' * bool(trial.message)}{trial.message}"


def _answer(config: Config, search: BatchSearch, fits: int) -> dict[str, int | None]:
    ranks = resources_of(config).world_size
    per_rank = config.trainer.global_batch_size // ranks
    usable = max((size for size in range(1, fits + 1) if per_rank % size == 0), default=None)
    rates = {one.micro_batch_size: one.samples_per_s for one in search.trials if one.fits and one.samples_per_s}
    best = max(rates.values(), default=0.0)
    enough = min((size for size, rate in rates.items() if rate >= WORTHWHILE * best), default=None)
    return {"largest": fits, "trainer.micro_batch_size": usable, "worthwhile": enough}


def _advice(config: Config, search: BatchSearch, answer: dict[str, int | None]) -> str:
    largest = answer["largest"]
    if not largest:
        return "not even one sample fits: see trainer.activation_checkpointing, precision=bf16, or a smaller model"
    more = ", and there was no need for a larger one (--largest, or the samples)" if largest == search.largest else ""
    lines = [f"largest that fits: {largest}{more}"]
    ranks = resources_of(config).world_size
    lines.append(
        f"with trainer.global_batch_size={config.trainer.global_batch_size} and {ranks} rank{'s' * (ranks > 1)}: "
        f"trainer.micro_batch_size={answer['trainer.micro_batch_size']}"
    )
    if answer["worthwhile"] is not None and answer["worthwhile"] < largest:
        lines.append(f"from {answer['worthwhile']} on, larger ones gain less than {1 - WORTHWHILE:.0%} in speed")
    return "\n".join(lines)
