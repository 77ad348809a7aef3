"""Write a checkpoint's weights to a file, or a folder, for other programs.

examples:
  python -m hpctrain export digits -o model.safetensors       # the newest intact checkpoint of runs/digits
  python -m hpctrain export digits -o best.pt --step best     # that with the best evaluation
  python -m hpctrain export lm -o published --step ema --dtype bf16

OUTPUT is a file that ends with .safetensors or .pt, or a folder with the names that Hugging Face's libraries expect:
model.safetensors, or model-00001-of-00003.safetensors and so on with model.safetensors.index.json. The checkpoint is
verified first. Its tensors are copied piece by piece: the memory that this takes doesn't grow with the model. Extra
state of modules that isn't a tensor is left out.

The configuration isn't exported: `best SWEEP --export FILE` writes that of a sweep's best run.

Exit code 0; 1 if there is no such checkpoint, it isn't intact or has no averaged weights, or OUTPUT can't be written;
2 if RUN is not a run, or OUTPUT exists.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.cli.arguments import add_runs, chosen_run, command_parser, number
from hpctrain.config.plain_yaml import is_program
from hpctrain.errors import CheckpointDamagedError, CheckpointError, ConfigError, ExitCode, HpctrainError
from hpctrain.phrases import byte_size, counted, listed
from hpctrain.run.checkpoints import BestCheckpoint, find_damage, newest_intact
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import gone_step
from hpctrain.streams import print_warning
from hpctrain.terminal import is_terminal

BEST = "best"
EMA = "ema"
FORMS = {".safetensors": "safetensors", ".pt": "torch"}
FOLDER = "folder"
OTHER_FILES = (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt2", ".pth", ".tar", ".zip")
"""Endings of names that are hardly meant as those of folders."""
MAX_SHARD_GB = 5
GB = 1e9
EXPORT = """
import sys
sys.path.append(sys.argv.pop(1))
from hpctrain.checkpoint.export import main
sys.exit(main(sys.argv[1:]))
"""
PACKAGES = Path(hpctrain.__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Export weights; ``arguments`` are those after `export`."""
    options = _parser().parse_args(arguments)
    directory = chosen_run(options)
    if is_program(directory.config):
        problem = "is the run of a program, which alone knows what its saves contain"
        raise ConfigError("RUN", options.run, problem, "name a run of hpctrain's own training")
    output = Path(options.output).resolve()
    form = _form(output, options)
    _require_free(output, form, force=options.force)
    averaged = options.ema or options.step == EMA
    checkpoint = _choose_checkpoint(directory, options.step)
    request = {
        "checkpoint": str(checkpoint),
        "output": str(output),
        "form": form,
        "averaged": averaged,
        "dtype": options.dtype,
        "max_bytes": int((options.max_shard_gb or MAX_SHARD_GB) * GB),
    }
    report = _run_export(request)
    if report["left_out"]:
        print_warning(f"left out, since it isn't a tensor: {listed(report['left_out'])}")
    if report["infinite"]:
        print_warning(f"values that {options.dtype} can't represent became infinite: {listed(report['infinite'])}")
    if report["has_average"] and not averaged:
        print("the checkpoint has averaged weights, too: --ema exports them", file=sys.stderr)
    print(_summary(report, checkpoint, os.path.relpath(output), form, averaged=averaged))
    return ExitCode.FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("export", __doc__)
    add_runs(parser)
    what = "FILE.safetensors, FILE.pt, or a folder"
    parser.add_argument("-o", dest="output", required=True, metavar="OUTPUT", help=what)
    meaning = "a checkpoint's step; best: by its score; ema: averaged weights of the newest (default: the newest)"
    parser.add_argument("--step", type=_step, metavar="N|best|ema", help=meaning)
    parser.add_argument("--ema", action="store_true", help="the averaged weights (trainer.ema_decay)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="convert floating-point tensors")
    meaning = f"largest file of a folder, in 10^9 bytes (default: {MAX_SHARD_GB})"
    parser.add_argument("--max-shard-gb", type=number(1e-6, 1e6), metavar="GB", help=meaning)
    parser.add_argument("--force", action="store_true", help="replace a file, or the weights in a folder")
    return parser


def _step(text: str) -> int | str:
    if text in (BEST, EMA):
        return text
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a step, best or ema, got {text!r}")
    return int(text)


def _form(output: Path, options: argparse.Namespace) -> str:
    form = FORMS.get(output.suffix, FOLDER)
    if form == FOLDER and output.suffix in OTHER_FILES:
        problem = "is not a kind of file that export writes"
        raise ConfigError("-o", options.output, problem, "end it with .pt or .safetensors")
    if form != FOLDER and options.max_shard_gb is not None:
        raise ConfigError("--max-shard-gb", options.max_shard_gb, "is for folders", "name a folder, or leave it out")
    return form


def _require_free(output: Path, form: str, *, force: bool) -> None:
    """Check that nothing is replaced that shouldn't be.

    Raises:
        ConfigError: something is there.
    """
    path_text = os.path.relpath(output)
    if not output.parent.is_dir():
        raise ConfigError("-o", path_text, "its folder doesn't exist", f"mkdir -p {os.path.relpath(output.parent)}")
    if not os.path.lexists(output):
        return
    if output.is_dir() != (form == FOLDER):
        problem = "is a folder" if form != FOLDER else "is a file without .pt or .safetensors"
        raise ConfigError("-o", path_text, problem, "choose another name")
    if form == FOLDER and not any(output.iterdir()):
        return
    if not force:
        replaced = "its weights, and keep its other files" if form == FOLDER else "it"
        raise ConfigError("-o", path_text, "exists", f"choose another name, or add --force to replace {replaced}")


def _choose_checkpoint(directory: RunDirectory, step: int | str | None) -> Path:
    """Choose a checkpoint, and read it for its checksums.

    Raises:
        CheckpointError: there is none, or it isn't intact.
    """
    _announce("verifying the checkpoint")
    if step is None or step == EMA:
        newest, damaged = newest_intact(directory)
        for info in damaged:
            print_warning(f"{os.path.relpath(info.path)} is not intact, and passed over: {info.problem}")
        gone = gone_step(directory)
        if newest is None:
            saved = "no checkpoint yet" if gone is None else f"the checkpoint of step {gone}, but it is gone"
            none = "no checkpoint of the run is intact" if damaged else f"the run has saved {saved}"
            raise CheckpointError(f"{os.path.relpath(directory.path)}: {none}")
        if gone is not None:
            print_warning(f"the checkpoint of step {gone}, which the run saved, is gone: exporting an older one")
        return newest.path
    path = _checkpoint_at(directory, step)
    if problem := find_damage(path):
        raise CheckpointDamagedError(f"{os.path.relpath(path)} is not intact: {problem}; `inspect` lists the others")
    return path


def _checkpoint_at(directory: RunDirectory, step: int | str) -> Path:
    run_path = os.path.relpath(directory.path)
    if step == BEST:
        best = BestCheckpoint.of(directory)
        path = best.require(directory).path
        if best.warning:
            print_warning(f"{run_path}: {best.warning}")
        return path
    assert isinstance(step, int)
    if step not in (steps := directory.checkpoint_steps()):
        raise CheckpointError(f"{run_path}: no checkpoint of step {step}; there are {listed(steps) or 'none'}")
    return directory.checkpoint(step)


def _announce(work: str) -> None:
    if is_terminal(sys.stderr):
        print(f"{work} ...", file=sys.stderr)


def _run_export(request: dict[str, Any]) -> dict[str, Any]:
    """Run the process that imports torch; return the last object that `hpctrain.checkpoint.export` prints."""
    # -P: nothing from the working directory, such as another user's json.py
    command = [sys.executable, "-P", "-c", EXPORT, str(PACKAGES), json.dumps(request)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    report: dict[str, Any] = {}
    _announce(f"writing {Path(request['output']).name}")
    try:
        for line in process.stdout:
            report = json.loads(line)
    finally:
        # after Ctrl-C: the process notices that nobody reads its output, and removes what it wrote
        process.stdout.close()
        process.wait()
    if "error" in report:
        raise CheckpointError(report["error"])
    if process.returncode or "files" not in report:
        raise HpctrainError(f"the export failed with exit code {process.returncode}: see above")
    return report


def _summary(report: dict[str, Any], checkpoint: Path, output: str, form: str, *, averaged: bool) -> str:
    step = int(checkpoint.name.rpartition("_")[2])
    size = byte_size(report["bytes"])
    files = f" in {counted(report['files'], 'file')}" if form == FOLDER else ""
    weights = "averaged weights" if averaged else "weights"
    if form == "torch":
        read = f'torch.load("{output}", weights_only=True)'
    elif form == FOLDER and report["files"] > 1:
        read = f'huggingface_hub.load_torch_model(model, "{output}")'
    else:
        file = f"{output}/model.safetensors" if form == FOLDER else output
        read = f'safetensors.torch.load_file("{file}")'
    content = f"{weights} of step {step}, {counted(report['tensors'], 'tensor')}, {size}{files}"
    return f"wrote {output}: {content}; to read it: {read}"
