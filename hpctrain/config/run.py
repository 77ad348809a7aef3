"""``conf/run``: how the program of `python -m hpctrain run` is started and stopped. Owner: hpctrain.program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class ProgramRun(require.Checked):
    """A program that is launched as the ranks of a run."""

    command: list[str] = field(default_factory=list)
    """The program and its arguments; set by what follows `--`, not by hand."""
    args_as_typed: dict[str, str] = field(default_factory=dict)
    """Texts of `args` whose values would be written otherwise, such as 1.10 for 1.1; set by hpctrain, not by hand."""
    processes: Annotated[str, require.one_of("ranks", "node")] = "ranks"
    """ranks: start the program once per rank; node: once per node, for a program such as torchrun that starts the
    ranks itself."""
    independent_ranks: bool = False
    """The ranks don't train one model together. Allows a launcher, such as torchrun, in each rank, and turns off the
    warning that the ranks haven't connected to each other."""
    on_stop: Annotated[str, require.one_of("requeue", "exit_code")] = "requeue"
    """Meaning of the program's end after it was asked to stop. requeue: interrupted, whatever the exit code, unless it
    called session.done(); exit_code: completed if the code is 0, else failed."""
    cwd: Annotated[str | None, require.one_of("own", "shared")] = None
    """The program's working directory. own: this run's own copy of the code, with links to ignored data, and with
    `run.own_folders` empty; shared: the copy that all runs of a sweep share, with links to all that git ignores. null:
    own for the runs of a sweep, shared for others."""
    own_folders: Annotated[list[str], require.each(require.single_line)] = field(
        default_factory=lambda: [
            "checkpoint", "checkpoints", "ckpt", "ckpts", "lightning_logs", "log", "logs", "mlruns", "multirun", "out",
            "output", "outputs", "result", "results", "runs", "save", "saved", "saves", "tb_logs", "tensorboard",
            "wandb", "work_dir", "work_dirs",
        ]
    )  # fmt: skip
    """With run.cwd=own: patterns, as in code.exclude, of folders and files that the program writes. Each run has its
    own folders, empty at first, and none of these files. Files that git tracks stay, and so do folders with scripts."""
    signal: Annotated[str, require.one_of("TERM", "INT", "HUP", "USR1", "USR2")] = "TERM"
    """Signal by which the program is asked to stop: at a preemption, at a cancellation, and before the time limit
    (`cluster.signal_delay_s`)."""
