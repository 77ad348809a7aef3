"""Compose the configuration of a program that is launched as the ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpctrain.config.checks import check
from hpctrain.config.compose import Composer
from hpctrain.config.override_texts import has_differing_text
from hpctrain.config.program import USAGE, ProgramConfig, default_name
from hpctrain.config.schema import TRAINING_KEYS
from hpctrain.config.stored import differing_texts, to_program
from hpctrain.errors import ConfigError


class ProgramComposer(Composer):
    """Composes `ProgramConfig` from ``conf/program.yaml``; see `Composer`.

    Args:
        command: the program and its arguments.
        config_dir: the folder of `--config-dir`; None for none.

    Raises:
        ConfigError: the folder doesn't exist, or there is no command.
    """

    primary = "program"
    foreign = TRAINING_KEYS

    def __init__(self, command: Sequence[str], config_dir: str | None = None, folder: Path | None = None) -> None:
        if not command or not command[0].strip():
            raise ConfigError("run.command", " ".join(command), "there is no program to run", USAGE)
        super().__init__(config_dir, folder)
        self.command = list(command)

    def compose_program(self, overrides: Sequence[str]) -> ProgramConfig:
        """Compose and check the configuration for these overrides.

        Raises:
            ConfigError: an override, a value or a combination of values is invalid.
        """
        self.refuse_foreign(overrides)
        with self.explaining(overrides):
            config = to_program(self._raw(overrides), self.command)
            if any(map(has_differing_text, self.parse(overrides))):
                typed = self._raw(overrides, as_typed=True)
                config.run.args_as_typed = differing_texts(config, typed)
                # variables may refer to args
                config.cluster.env = to_program(typed, self.command).cluster.env
        check(config)
        return config

    def compose_run(self, overrides: Sequence[str]) -> ProgramConfig:
        """As `compose_program`."""
        return self.compose_program(overrides)

    def _default_name(self, task: str, node: DictConfig) -> str:  # noqa: ARG002 - a training is named after its task
        return default_name(self.command)

    def _foreign_key(self, key: str, value: str) -> ConfigError:
        problem = "belongs to hpctrain's own training, not to a program's run"
        name = key.rpartition(".")[2]
        remedy = f"pass it to the program after --; to sweep over it, add args.{name}={value} and write {{args.{name}}}"
        return ConfigError(key, value, problem, remedy)
