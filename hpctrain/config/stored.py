"""Write and read a run's ``config.yaml``: plain YAML with everything resolved, which is read without Hydra."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config.plain_yaml import read_yaml, to_yaml_text
from hpctrain.config.program import USAGE, default_texts
from hpctrain.config.root import GROUPS, Config, ProgramConfig, RunConfig, to_config
from hpctrain.config.schedule import Custom, schema_of
from hpctrain.errors import ConfigError
from hpctrain.startup import __version__

MODEL_KEYS = ("name", "seed", "task", "model", "precision.kind", "trainer.eval_ema")
"""What building a run's task and model, and loading its weights, depends on."""


def to_yaml(config: RunConfig) -> str:
    """Return the text of ``config.yaml``, with everything resolved."""
    plain = dataclasses.asdict(config)
    if isinstance(config, ProgramConfig) and not config.run.args_as_typed:
        del plain["run"]["args_as_typed"]
    return to_yaml_text(plain)


def load_for_model(path: Path) -> Config:
    """Read what decides a run's task and model from its ``config.yaml``; the rest has its defaults.

    So the model of a run loads although another version wrote its other keys.

    Raises:
        ConfigError: as `load`.
    """
    return load(path, keys=MODEL_KEYS)


def _select(stored: Any, keys: Sequence[str]) -> DictConfig:
    part = OmegaConf.create()
    for key in keys:
        if (value := OmegaConf.select(stored, key)) is not None:
            OmegaConf.update(part, key, value)
    return part


def _refuse_unknown(path: Path, schema_node: object, stored: object, prefix: str = "") -> None:
    """Refuse stored keys that a typed group lacks."""
    if not isinstance(schema_node, DictConfig) or not isinstance(stored, DictConfig) or stored._is_none():
        return
    if not dataclasses.is_dataclass(OmegaConf.get_type(schema_node)):
        return  # of any keys
    for name in map(str, stored):
        if name not in schema_node:
            problem = f"is in {path}, but is not a key of this version of hpctrain ({__version__})"
            remedy = "if another version wrote the file (manifest.json names it), use that version"
            raise ConfigError(f"{prefix}{name}", stored._get_node(name), problem, f"{remedy}; or remove the key there")
        _refuse_unknown(path, schema_node._get_node(name), stored._get_node(name), f"{prefix}{name}.")


def load(path: Path, overrides: list[str] | None = None, *, keys: Sequence[str] = ()) -> Config:
    """Read the configuration of a training from its ``config.yaml``, and apply overrides ``key=value``.

    Args:
        path: of the file.
        overrides: as typed.
        keys: full names of the keys to read; empty for all.

    Raises:
        ConfigError: this version doesn't know a key or a value, or the file can't be read or isn't valid YAML; or the
            run is a program's.
    """
    config = load_run(path, overrides, keys=keys)
    if not isinstance(config, Config):
        problem = "is the run of a program, not a training of hpctrain's"
        raise ConfigError("run", path.parent, problem, "name a run of a training")
    return config


def load_run(path: Path, overrides: list[str] | None = None, *, keys: Sequence[str] = ()) -> Config | ProgramConfig:
    """Read the configuration of a run, a training or a program, as `load`."""
    try:
        stream = io.StringIO(read_yaml(path))
        stream.name = str(path)  # errors in the YAML name it
        stored: Any = OmegaConf.load(stream)
        is_program = "run" in stored
        if keys and not is_program:
            stored = _select(stored, keys)
        command, texts = _take_run(stored) if is_program else ([], {})
        root = _root(stored, ProgramConfig if is_program else Config)
        _refuse_unknown(path, root, stored)
        merged = OmegaConf.merge(root, stored)
        assert isinstance(merged, DictConfig)
        if overrides:
            from hpctrain.config.overrides import apply_overrides  # Hydra is slow to import, and ranks change nothing

            if is_program:
                with_texts = copy.deepcopy(merged)
                for key, text in texts.items():
                    OmegaConf.update(with_texts, key, text, force_add=True)
                apply_overrides(with_texts, overrides, as_typed=True)
            apply_overrides(merged, overrides)
        config = to_program(merged, command) if is_program else to_config(merged, Config)
        if isinstance(config, ProgramConfig):
            texts = differing_texts(config, with_texts) if overrides else texts
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, args_as_typed=texts))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        from hpctrain.config.explain import unreadable  # for mistakes alone

        raise unreadable(error, [path.parent]) from error
    except OmegaConfBaseException as error:
        from hpctrain.config.explain import Explainer  # for mistakes alone

        raise Explainer(str(error), overrides or [str(path)]).explain() from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        # a kind of cluster that doesn't exist; a number of hundreds of digits; nesting
        problem = f"can't be read: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise ConfigError("configuration", path, problem, "correct the file") from error
    if config.name is None:
        raise ConfigError("name", None, f"is missing in {path}", "correct the file")
    return config


def to_program(node: DictConfig, command: Sequence[str]) -> ProgramConfig:
    """Convert a composed or stored configuration of a program, as `to_config`; the command stays as it was typed."""
    if OmegaConf.select(node, "run.command"):
        typed_value = OmegaConf.to_container(node.run.command, resolve=False)
        raise ConfigError("run.command", typed_value, "is set by what follows --", USAGE)
    if OmegaConf.select(node, "run.args_as_typed"):
        typed_value = OmegaConf.to_container(node.run.args_as_typed, resolve=False)
        raise ConfigError("run.args_as_typed", typed_value, "is set by the values of args", "write args.NAME=VALUE")
    config = to_config(node, ProgramConfig)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, command=list(command)))


def differing_texts(config: ProgramConfig, with_texts: DictConfig) -> dict[str, str]:
    """Return the texts of `args` that differ from the default texts of their values, by full key.

    Args:
        config: with the values.
        with_texts: the same configuration, with texts in place of the values of `args`.
    """
    args = OmegaConf.to_container(with_texts.args, resolve=True)
    assert isinstance(args, dict)
    plain, texts = default_texts(config.args), default_texts({str(key): value for key, value in args.items()})
    return {key: text for key, text in texts.items() if key in plain and plain[key] != text}


def _take_run(stored: Any) -> tuple[list[str], dict[str, str]]:
    """Remove the command of a program, and the texts of `args`, from a stored configuration, and return them."""
    # not through OmegaConf: ${HOME} in a command is the shell's
    plain = OmegaConf.to_container(stored.run, resolve=False)
    run = plain if isinstance(plain, dict) else {}
    words, texts = run.get("command"), run.get("args_as_typed") or {}
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("run.command is not a list of texts")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("run.args_as_typed is not a mapping of texts")
    OmegaConf.update(stored, "run.command", [])
    stored.run.pop("args_as_typed", None)
    return list(map(str, words)), {str(key): text for key, text in texts.items()}


def _root(stored: Any, schema: type[RunConfig]) -> DictConfig:
    """Return the schema of a stored configuration, with its defaults."""
    root: DictConfig = OmegaConf.structured(schema)
    root.cluster = OmegaConf.structured(GROUPS["cluster"][OmegaConf.select(stored, "cluster.kind") or "local"])
    if schema is Config:
        # a run that lacks the key was made before it existed, and kept none
        OmegaConf.update(root, "checkpoint.keep_best", 0)
        schedule = schema_of(OmegaConf.select(stored, "schedule") or {})
        root.schedule = None if schedule is Custom else OmegaConf.structured(schedule)
    return root
