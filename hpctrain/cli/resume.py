"""`python -m hpctrain resume RUN [KEY=VALUE ...]`: continue a run that stopped."""

from __future__ import annotations

from hpctrain.cli.arguments import add_overrides, add_runs, chosen_run, command_parser
from hpctrain.launch.launcher import launch
from hpctrain.launch.prepare import changed_config
from hpctrain.status.report import require_stopped

_EPILOG = """\
examples:
  python -m hpctrain resume runs/digits/2026-01-31_12-00-00
  python -m hpctrain resume RUN trainer.max_steps=2000        # train longer
  python -m hpctrain resume RUN cluster=slurm nodes=2         # continue somewhere else

If the resume fails before its attempt begins, the run's configuration stays as it was.

Exit code: the run's; 0 once it is submitted; 2 if RUN is not a run, is running or may be, or can't use an override."""


def main(arguments: list[str]) -> int:
    """Launch a run again with its own configuration; ``arguments`` are those after `resume`.

    Raises:
        RunDirectoryError: the run doesn't exist, or is running, or may be.
        ConfigError: an override is invalid.
    """
    parser = command_parser("resume", "Continue a stopped run from its newest intact checkpoint.", _EPILOG)
    add_runs(parser)
    add_overrides(parser, "what to change in its configuration")
    parser.add_argument(
        "--force", action="store_true", help="resume although SLURM can't be asked whether the run's job is over"
    )
    options = parser.parse_intermixed_args(arguments)
    directory = chosen_run(options)
    require_stopped(directory, force=options.force)
    config = changed_config(directory, options.overrides, options.config_dir)
    return launch(config, ["python", "-m", "hpctrain", "resume", *arguments])
