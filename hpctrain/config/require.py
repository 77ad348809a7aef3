"""Checks of single values, written next to the field: ``nodes: Annotated[int, require.at_least(1)] = 1``."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hpctrain.errors import ConfigError
from hpctrain.phrases import page

Check = Callable[[str, Any], None]
"""Takes the full key and its value, which is never None; raises a ConfigError with both and a remedy."""


Schema = TypeVar("Schema")

MAX_INTEGER = 2**63 - 1
"""Largest number that tensors, NumPy's arrays and SLURM's records can hold."""

HELP = "`python -m hpctrain --help` lists groups and keys"
REFERENCE = f"see {page('reference/configuration.md')}"
TYPES: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}
"""Types of fields, in words."""


class Checked:
    """Base of the schema's classes: checks each value as its field's annotation requires; None always passes.

    A class that compares values with each other does so in its own `__post_init__`, after calling this one.
    """

    __slots__ = ()

    @property
    def prefix(self) -> str:
        """Beginning of the fields' full keys: the group, which has a module of the same name."""
        return f"{type(self).__module__.rpartition('.')[2]}."

    def __post_init__(self) -> None:
        """Check single values."""
        schema: type = type(self)
        for name, checks in checks_of(schema).items():
            check_one(f"{self.prefix}{name}", getattr(self, name), checks)


def check_one(key: str, value: Any, checks: Iterable[Check]) -> None:
    """Check a value, unless it is None, which always passes.

    Args:
        key: its full name.
        value: that was found there.
        checks: of its field.

    Raises:
        ConfigError: a check fails, or can't be made of a value of this type.
    """
    if value is None:
        return
    try:
        for check in checks:
            check(key, value)
    except (TypeError, AttributeError) as error:
        # OmegaConf checks the types of values, but not of what they refer to, nor of lists within lists
        raise ConfigError(key, repr(value), "has the wrong type", REFERENCE) from error


def wrong_type(schema: type, name: str, key: str, value: object) -> ConfigError:
    """Return the error for a value that doesn't have the type of its field.

    Args:
        schema: a dataclass.
        name: of its field.
        key: full name of the key.
        value: that was found there.
    """
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return ConfigError(key, value, "is too large", REFERENCE)
    hint = get_type_hints(schema).get(name)
    types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    names = [TYPES[origin] for member in types if (origin := get_origin(member) or member) in TYPES]
    problem = f"must be {' or '.join(names)}" if names else "has the wrong type"
    return ConfigError(key, repr(value), problem, REFERENCE)


def to_schema(schema: type[Schema], key: str, values: Mapping[str, Any], **required: object) -> Schema:
    """Convert and check keys that belong to a schema's class and stand elsewhere than its own group.

    Args:
        schema: a dataclass.
        key: full name of the node that has them.
        values: by the names of the schema's fields.
        required: values of fields without a default.

    Raises:
        ConfigError: a value is wrong; names its key in the node.
    """
    from omegaconf import OmegaConf  # slow to import, and the events of conf/notify are read without it
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema(**required)), dict(values)))
    except ConfigError as error:
        group = re.compile(rf"(?<![\w.]){error.key.partition('.')[0]}\.")
        full_key, problem, remedy = (group.sub(f"{key}.", text) for text in (error.key, error.problem, error.remedy))
        raise ConfigError(full_key, error.value, problem, remedy) from None
    except (OmegaConfBaseException, OverflowError) as error:
        large = (name for name, value in values.items() if isinstance(value, int) and abs(value) > MAX_INTEGER)
        name = str(getattr(error, "full_key", None) or next(large, "")).partition("[")[0]
        raise wrong_type(schema, name, f"{key}.{name}", values.get(name)) from error
    assert isinstance(config, schema)
    return config


# resolving the annotations takes longer than the checks, and a sweep checks every run
@functools.cache
def checks_of(schema: type) -> dict[str, tuple[Check, ...]]:
    """Return the checks of a schema's fields by name, as their annotations list them."""
    hints = get_type_hints(schema, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def that(holds: Callable[[Any], object], problem: str, remedy: str, *, quoted: bool = False) -> Check:
    """Refuse values for which a condition doesn't hold.

    Args:
        holds: takes the value; its result is true for a good one.
        problem: what is wrong with any other.
        remedy: what to type instead; ``{key}`` in it stands for the full key.
        quoted: show the value in quotes, for texts that may be empty or contain control characters.
    """

    def check(key: str, value: object) -> None:
        if not holds(value):
            raise ConfigError(key, repr(value) if quoted else value, problem, remedy.format(key=key))

    return check


def at_least(minimum: float, unit: str = "", *, at_most: float = MAX_INTEGER) -> Check:
    """Refuse NaN, numbers below ``minimum``, and infinity or numbers above ``at_most``."""
    low = that(lambda value: value >= minimum, f"must be at least {minimum}{unit}", f"set {{key}}={minimum} or more")
    high = that(lambda value: value <= at_most, f"must be at most {at_most:,}{unit}", f"set {{key}}={at_most} or less")

    def check(key: str, value: object) -> None:
        low(key, value)
        high(key, value)

    return check


def above(bound: float) -> Check:
    """Refuse infinity, NaN and numbers up to ``bound``."""
    problem = f"must be a number above {bound:g}"
    return that(lambda value: math.isfinite(value) and value > bound, problem, "set {key} to one")


def between(low: float, high: float) -> Check:
    """Refuse NaN and numbers outside of [low, high]."""
    problem = f"must be in [{low:g}, {high:g}]"
    return that(lambda value: low <= value <= high, problem, "set {key} to a number in this range")


def half_open(low: float, bound: float) -> Check:
    """Refuse NaN and numbers outside of [low, bound)."""
    problem = f"must be at least {low:g} and below {bound:g}"
    return that(lambda value: low <= value < bound, problem, "set {key} to such a number")


def one_of(*choices: object) -> Check:
    """Refuse a value that isn't one of ``choices``."""
    names = ", ".join(sorted(map(str, choices)))
    return that(lambda value: value in choices, "is not known", f"choose one of {names}")


# in a batch script a line break would start another command
single_line = that(
    lambda value: not re.search(r"[\x00-\x1f\x7f]", value),
    "contains a line break or a control character",
    "write it on one line",
    quoted=True,
)


not_empty = that(str.strip, "is empty", "give it a value, or omit the key", quoted=True)


def each(check: Check) -> Check:
    """Check every item of a list."""

    def check_items(key: str, items: Iterable[object]) -> None:
        for item in items:
            check(key, item)

    return check_items


BY_LAUNCHER = "remove it: the launcher sets it"
OWN_VARIABLES = {
    "MASTER_PORT": "set cluster.master_port",
    "MASTER_ADDR": "set parallel.init_method=tcp://HOST:PORT",
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME": "remove it: each rank has its own",
    "HPCTRAIN_(CLAIM|LOGGED|STORE|PARENT|TERMINAL|CODE|VERSION)": "remove it: each attempt has its own",
    "HPCTRAIN_(ATTEMPT|RUN_DIR|CHECKPOINT_DIR|SUBMIT_DIR|SESSION|DEADLINE|STOP_SIGNAL)": "remove it: programs get it",
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC)_\w+": "use cluster.srun_args or cluster.sbatch for options of SLURM",
    r"(TORCHELASTIC|SUBMITIT|PMI2?|JSM|PALS|MPISPAWN|OMPI_COMM_WORLD|(MV2|MVP)_COMM_WORLD)_\w+": BY_LAUNCHER,
    r"PMIX_(RANK|NAMESPACE)|MPI_LOCAL(RANKID|NRANKS)|FLUX_(TASK_RANK|TASK_LOCAL_ID|JOB_SIZE|JOB_NNODES)": BY_LAUNCHER,
}
"""Patterns of variables that hpctrain, SLURM or another launcher sets for each rank, and what to do instead."""


def check_variables(key: str, variables: Mapping[str, object]) -> None:
    """Refuse names that aren't variable names or that hpctrain sets, and values that aren't single lines.

    Raises:
        ConfigError: the first such variable.
    """
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{key}.{name}", value, "is not a variable name", "use letters, digits and _")
        if not isinstance(value, str):
            raise ConfigError(f"{key}.{name}", value, "is not a string", f"write {key}.{name}=VALUE")
        if name == "HPCTRAIN_SECRET":
            problem = "would be in config.yaml, which others may read"
            raise ConfigError(f"{key}.{name}", "***", problem, "export it where you start the ranks")
        for pattern, remedy in OWN_VARIABLES.items():
            if re.fullmatch(pattern, name):
                raise ConfigError(f"{key}.{name}", value, "is set by hpctrain or the launcher", remedy)
        single_line(f"{key}.{name}", value)
