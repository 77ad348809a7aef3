"""Explain errors of Hydra and OmegaConf in one line: the key, the value and what to type instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hpctrain.config import require
from hpctrain.config.cluster import Slurm
from hpctrain.config.logger import SERVICES
from hpctrain.config.schedule import Plateau
from hpctrain.errors import MAX_SHOWN_CHARS, ConfigError

PLAIN_TYPES = {"bool": "true or false", "Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
WRONG_TYPE = re.compile(
    r"could not be converted|cannot be assigned None|not Optional|not optional|not a valid|incompatible with"
    r"|Incompatible value|not a subclass|Cannot assign|Invalid type|Cannot merge|is not supported|unexpectedly"
    r"|Invalid value assigned"
)
LIKELY_TYPO = 0.8
"""Similarity of two keys of which one is probably the other, misspelt."""
SYNTAX = re.compile(r"no viable alternative|mismatched input|extraneous input|LexerNoViableAlt|token recognition")


@dataclass(frozen=True, slots=True)
class Explainer:
    """Turns one error into a ConfigError.

    Args:
        text: the error's text.
        overrides: the command line's overrides, from which the value is shown.
        keys: returns all known keys; called only when needed.
        options: returns the options of a group.
    """

    text: str
    overrides: Sequence[str]
    keys: Callable[[], list[str]] = list
    options: Callable[[str], list[str]] = lambda _: []

    def explain(self) -> ConfigError:
        """Return the first explanation that fits."""
        # the first pattern that is found counts: some texts contain several
        for pattern, explanation in (
            (r"Could not (?:find|load) '([^']+)'", self._missing_choice),
            (r"Could not override '([\w/@.-]+)'\.\s*No match in the defaults list", self._unknown_group),
            (r"No earlier Group Default for '([\w/@.-]+)'", self._unknown_group),  # Hydra 1.4
            (r"Could not override '([^']+)'", self._unknown_key),
            (r"Could not delete from config\. '([^']+)'", self._undeletable),
            (r"Error merging override ~([\w.]+)[\s\S]* does not support deletion", self._undeletable),
            (r"Key '[^']+' (?:is )?not in [\s\S]*?full_key: (.+)", self._unknown_key),
            (r"Key '([^']+)' (?:is )?not in", self._unknown_key),
            (r"Missing mandatory value", self._missing_value),
            (r"has missing mandatory value: (\w+)", self._missing_field),
            (r"Recursive interpolation", self._recursive),
            (r"Error parsing override '([^']*)'", self._syntax),
            (WRONG_TYPE, self._wrong_type),
            (SYNTAX, self._syntax),
            (r"Interpolation key '([^']+)' not found", self._interpolation),
            (r"Error merging override \+*([^=]+)=", self._not_single),
        ):
            if (match := re.search(pattern, self.text)) is not None:
                return explanation(match)
        first = next((line for line in self.text.splitlines() if line.strip()), "cannot be composed")
        return ConfigError("configuration", " ".join(self.overrides), first.rstrip("."), require.HELP)

    def _value(self, key: str) -> str | None:
        for override in reversed(self.overrides):
            name, _, value = override.lstrip("+~").partition("=")
            if name.split("@")[0] == key:
                return value
        return None

    @property
    def _full_key(self) -> str:
        match = re.search(r"full_key: (.+)", self.text)
        # OmegaConf 2.4 leaves it out for the value of an interpolation
        reference = next((word.lstrip("+").partition("=")[0] for word in self.overrides if "${" in word), None)
        return match[1] if match else reference or "configuration"

    @property
    def _file(self) -> tuple[str, str] | None:
        """Group and option of the file with the mistake; None for a mistake on the command line."""
        match = re.match(r"In '([^']+)/([^/']+)': ", self.text)
        return (match[1], match[2]) if match else None

    def _about(self, key: str, problem: str, remedy: str) -> ConfigError:
        """Make an error with the value, if the command line has it; Hydra doesn't report the values in files."""
        if self._file is not None:
            return ConfigError(*self._file, f"contains {key}, which {problem}", remedy)
        value = self._value(key)
        return ConfigError(key, "..." if value is None else value, problem, remedy)

    def _missing_choice(self, match: re.Match[str]) -> ConfigError:
        group, _, option = match[1].rpartition("/")
        if not group:
            return ConfigError(option, self._value(option), "was not found", require.HELP)
        options = self.options(group)
        problem = f"is not an option of the group {group}"
        if (instead := self._option_instead(group, option, options)) is not None:
            return ConfigError(group, option, problem, instead)
        near = difflib.get_close_matches(option, options, n=1)
        remedy = f"choose one of {', '.join(options) or 'none'}" + (f"; did you mean {near[0]}?" if near else "")
        return ConfigError(group, option, problem, remedy)

    def _option_instead(self, group: str, option: str, options: Sequence[str]) -> str | None:
        if "." in option and "custom" in options:
            return f"write {group}=custom {group}._target_={option}"
        if group != "experiment" and option in self.options("experiment"):
            return f"did you mean experiment={option}?"
        return option_instead(group, option)

    def _unknown_group(self, match: re.Match[str]) -> ConfigError:
        return self._about(match[1], "is not a known group or key", self._suggest(match[1]))

    def _unknown_key(self, match: re.Match[str]) -> ConfigError:
        key = match[1]
        group, _, name = key.partition(".")
        is_slurm_key = name in Slurm.__dataclass_fields__ or ("." in name and key in self.keys())
        if group == "cluster" and is_slurm_key:
            remedy = "start the file with `defaults: [slurm, _self_]`" if self._file else "add cluster=slurm"
            return self._about(key, "exists only with cluster=slurm", remedy)
        callback = name.partition(".")[0]
        if group == "callbacks" and "." in name and f"callbacks.{callback}" not in self.keys():
            return self._about(key, f"exists only with the callback {callback}", f"add callbacks=[{callback}]")
        if group == "schedule" and name in Plateau.__dataclass_fields__:
            return self._about(key, "exists only with schedule=plateau", "add schedule=plateau")
        option = self._value(group)
        if self._file is not None and self._file[0] == group and "object_type=NamedOptimizers" in self.text:
            return self._about(key, "named optimizers don't share", f"set it in optimizer.named.NAME.{name}")
        if self._file is not None and option is not None and key in self.keys():
            where = f"conf/{self._file[0]}/NAME.yaml"
            remedy = f"leave out {group}={option}, or copy the file to {where} without {key}"
            return self._about(key, f"{group}={option} doesn't have", remedy)
        return self._about(key, "is not a known key", self._suggest(key))

    def _undeletable(self, match: re.Match[str]) -> ConfigError:
        key = match[1]
        # OmegaConf also reports a key that is null as missing
        if "does not exist" in self.text and key not in self.keys():
            return self._unknown_key(match)
        return ConfigError(f"~{key}", self._value(key) or "", "can't be removed", f"set a value instead: {key}=VALUE")

    def _missing_value(self, _match: re.Match[str]) -> ConfigError:
        return ConfigError(self._full_key, "???", "is required", f"add {self._full_key}=VALUE")

    def _missing_field(self, match: re.Match[str]) -> ConfigError:
        # OmegaConf names the class and the field, not the group
        keys = [override.lstrip("+~").partition("=")[0] for override in self.overrides]
        key = next((name for name in reversed(keys) if name.rpartition(".")[2] == match[1]), match[1])
        return ConfigError(key, "???", "is required", f"add {key}=VALUE")

    def _not_single(self, match: re.Match[str]) -> ConfigError:
        remedy = f"{require.REFERENCE} for {match[1]}"
        return self._about(match[1], "must be a single value, not a list or a group of keys", remedy)

    def _recursive(self, _match: re.Match[str]) -> ConfigError:
        override = next((word for word in reversed(self.overrides) if "${" in word), " ".join(self.overrides))
        key, _, value = override.partition("=")
        return ConfigError(key, value, "refers to itself", "write a value")

    def _wrong_type(self, _match: re.Match[str]) -> ConfigError:
        key = self._full_key
        if self._file is not None and key in ("configuration", self._file[0]):
            return ConfigError(*self._file, "the file contains no keys", "write lines of the form KEY: VALUE")
        text = self._value(key)
        expected = re.search(r"(?:could not be converted to|is not a valid) (\w+)", self.text)
        if expected:
            problem = f"must be {PLAIN_TYPES.get(expected[1], expected[1])}"
        elif re.search("assigned None|not optional|not Optional|'None'", self.text):
            problem = "cannot be null"
        elif f"{key}.enabled" in self.keys():
            return self._about(key, "is a group of keys", f"set {key}.enabled=true")
        elif key.endswith(".groups") and str(text).startswith("{"):
            return self._about(key, "must be a list", f"write it in brackets: {key}=[{text}]")
        elif key == "args":
            return self._about(key, "is a group of keys of your own", "set args.NAME=VALUE")
        elif "is not a ListConfig" in self.text:
            example = "" if text is None or self._file or len(text) > MAX_SHOWN_CHARS else f": {key}=[{text}]"
            return self._about(key, "must be a list", f"write it in brackets{example}")
        else:
            problem = "has the wrong type"
        return self._about(key, problem, f"{require.REFERENCE} for {key}")

    def _syntax(self, match: re.Match[str]) -> ConfigError:
        # the lexer's message lacks the override, unlike that of Hydra's parser
        word = match[1] if match.re.groups else next((o for o in self.overrides if "=" not in o), self.overrides[-1])
        key, equals, value = word.partition("=")
        if not equals:
            remedy = f"write {word}=VALUE; to run a program, python -m hpctrain run [KEY=VALUE ...] -- COMMAND"
            return ConfigError("argument", word, "is not KEY=VALUE", remedy)
        if "NoneType is incompatible" in self.text:
            return ConfigError(key, value, "has null in a function, which takes none", f"list the values: {key}=null,1")
        remedy = "quote values with special characters: 'key=\"a,b\"'"
        return ConfigError(key or word, value or None, "cannot be parsed as KEY=VALUE", remedy)

    def _interpolation(self, match: re.Match[str]) -> ConfigError:
        key, target = self._full_key, match[1]
        text = self._value(key) or f"${{{target}}}"
        return ConfigError(key, text, f"refers to {target}, which does not exist", f"set {target}, or write a value")

    def _suggest(self, key: str) -> str:
        known_keys, (group, _, key_in_group) = self.keys(), key.partition(".")
        if key_in_group:  # a group isn't a key that was meant
            groups = {name.partition(".")[0] for name in known_keys if "." in name}
            known_keys = [name for name in known_keys if name not in groups]
        last = key.rpartition(".")[2]
        if last in INSTEAD_OF_KEY and not (key_in_group and group in ARGUMENT_GROUPS):
            return INSTEAD_OF_KEY[last]
        is_like = difflib.get_close_matches(key, known_keys, n=1, cutoff=LIKELY_TYPO)
        is_custom = self._value(group) == "custom" or "object_type=Custom" in self.text
        if group in ("optimizer", "schedule") and is_custom and not is_like:
            return f"an argument of the class needs a plus: +{key}=VALUE"
        if group == "logger" and "." in key_in_group and not is_like:
            return SINKS
        near = difflib.get_close_matches(key, known_keys, n=1, cutoff=0.6)
        if not is_like:  # a key with the same last part is more likely than one that looks a little alike
            near = [name for name in known_keys if name.rpartition(".")[2] == last][:1] or near
        hint = f"a new key of your own needs a plus: +{key}=VALUE"
        if not near:
            return f"{require.HELP}; {hint}"
        # an argument that the task's file doesn't list is often like none that it lists
        unlike = key.startswith("task.") and not difflib.get_close_matches(key, near, cutoff=LIKELY_TYPO)
        return f"did you mean {near[0]}? {hint[0].upper()}{hint[1:]}" if unlike else f"did you mean {near[0]}?"


def unreadable(error: yaml.YAMLError | UnicodeDecodeError, folders: Sequence[Path]) -> ConfigError:
    """Explain why a file isn't valid YAML, with its path and the line.

    Args:
        error: raised while reading it.
        folders: of the user's configuration, searched for the file if the error doesn't name it.
    """
    if isinstance(error, UnicodeDecodeError):
        path, line = _holder_of(error, folders)
        return _in_file(path, line, folders, "is not UTF-8", "save the file as UTF-8")
    if isinstance(error, yaml.reader.ReaderError):
        path = Path(error.name)
        line = path.read_text(encoding="utf-8").count("\n", 0, error.position) + 1 if path.is_file() else None
        return _in_file(path, line, folders, str(error).splitlines()[0], "correct the file")
    mark, begin = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if mark is None:
        return ConfigError("configuration", "...", f"cannot be read: {error}", "correct the file")
    problem = f"is not valid YAML: {getattr(error, 'problem', None) or 'it is malformed'}"
    if begin is not None and begin.line != mark.line:
        problem += f", in the part that starts in line {begin.line + 1}"
    return _in_file(Path(mark.name), mark.line + 1, folders, problem, "correct the file")


def _holder_of(error: UnicodeDecodeError, folders: Sequence[Path]) -> tuple[Path | None, int | None]:
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        content = path.read_bytes() if path.is_file() else b""
        begin = content.find(error.object)
        if begin >= 0:
            return path, content.count(b"\n", 0, begin + error.start) + 1
    return None, None


def _in_file(path: Path | None, line: int | None, folders: Sequence[Path], problem: str, remedy: str) -> ConfigError:
    """Make an error about GROUP=OPTION if the file is an option, otherwise about the file."""
    if path is None:
        return ConfigError("configuration", "...", f"one of its files {problem}", remedy)
    where = path if line is None else f"{path}, line {line},"
    for root in (folder.resolve() for folder in folders):
        inside = path.resolve().relative_to(root) if path.resolve().is_relative_to(root) else Path()
        if len(inside.parts) > 1:
            return ConfigError(inside.parent.as_posix(), inside.stem, f"{where} {problem}", remedy)
    return ConfigError("configuration", path.stem, f"{where} {problem}", remedy)


CODE_NOW = "a new run copies the code as it is now; for an earlier run: python -m hpctrain resume RUN --code=now"
INSTEAD_OF_KEYS: Mapping[str, Sequence[str]] = {
    'in a file, write "on" with quotes: YAML reads on as true': ("True",),
    "leave it out: GPUs are used where there are any; on SLURM set cluster.gpus_per_node=N": ("accelerator",),
    "set trainer.micro_batch_size: a step accumulates up to trainer.global_batch_size": (
        "accumulate_grad_batches",
        "gradient_accumulation_steps",
    ),
    "set trainer.global_batch_size (per step, over all ranks), or trainer.micro_batch_size (per forward pass of a "
    "rank)": ("batch_size",),
    "set trainer.eval_every_steps=N": ("check_val_every_n_epoch", "val_check_interval"),
    "python -m hpctrain resume RUN continues a run; init_from=PATH starts a new one with its weights": (
        "ckpt_path",
        "resume_from_checkpoint",
    ),
    "set run_dir=PATH": ("default_root_dir", "output_dir"),
    "set cluster.processes_per_node=N, or cluster.gpus_per_node=N": ("devices", "num_processes"),
    "set trainer.max_epochs=N": ("epochs", "num_epochs", "num_train_epochs"),
    "set trainer.max_steps=2": ("fast_dev_run",),
    "set cluster.gpus_per_node=N": ("gpus",),
    "set cluster.gpus_per_process=N": ("gpus_per_task",),
    "set cluster.gpu_type=NAME": ("gpu_type",),
    "set cluster.gpus_per_node=N and cluster.gpu_type=NAME, or cluster.sbatch.gres=gpu:NAME:N": ("gres",),
    "set trainer.clip_grad_norm, or trainer.clip_grad_value": ("gradient_clip_val", "max_grad_norm"),
    "set optimizer.lr": ("learning_rate",),
    "set trainer.max_steps=N": ("limit_train_batches",),
    "set logger.every_steps=N": ("log_every_n_steps",),
    "choose precision=bf16": ("mixed_precision", "precision"),
    "set checkpoint.metric=NAME": ("monitor",),
    "set nodes=N": ("node", "nodes", "num_nodes"),
    "set trainer.sanity_batches=N": ("num_sanity_val_steps",),
    "set seed=N": ("seed",),
    "choose parallel=ddp": ("strategy",),
    "set cluster.processes_per_node=N": ("tasks_per_node",),
    "set cluster.time_limit_min=N": ("timeout_min",),
}
"""What to do instead of setting an unknown key, and the last parts of such keys, which are other libraries' names."""
INSTEAD_OF_KEY = {name: instead for instead, names in INSTEAD_OF_KEYS.items() for name in names}
TORCH_OPTIMIZERS = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop")
"""Classes of torch.optim whose names are typed as options."""
INSTEAD_OF_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "code": {"none": "set code.snapshot=none", "auto": "set code.snapshot=auto", "now": CODE_NOW},
    "logger": {
        "csv": "set logger.csv=true",
        "tensorboard": "set logger.tensorboard=true",
        **{name: f"set logger.{name}.enabled=true" for name in SERVICES},
    },
    "optimizer": {
        **{name.lower(): f"write optimizer=custom optimizer._target_=torch.optim.{name}" for name in TORCH_OPTIMIZERS},
        "adam": "choose optimizer=adamw, or write optimizer=custom optimizer._target_=torch.optim.Adam",
    },
    "precision": {
        "16": "choose precision=fp16",
        "16-mixed": "choose precision=fp16",
        "32": "choose precision=fp32",
        "32-true": "choose precision=fp32",
        "bf16-mixed": "choose precision=bf16",
        "bf16-true": "choose precision=bf16_pure",
        "no": "choose precision=fp32",
    },
}
"""What to do instead, by group and the name of an option that it doesn't have."""
ARGUMENT_GROUPS = ("task", "model", "optimizer", "callbacks")
"""Groups whose keys may be any arguments of a class."""
SINKS = f"set {', '.join(f'logger.{name}.enabled' for name in SERVICES)}, logger.tensorboard or logger.csv"


def option_instead(group: str, option: object) -> str | None:
    """Return what to do instead of choosing an unknown option; None if it isn't one of another library's."""
    return INSTEAD_OF_OPTIONS.get(group, {}).get(str(option).lower())
