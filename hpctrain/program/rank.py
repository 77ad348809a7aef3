"""One rank of a program: its place, its folders, and the environment of its program."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.environment import cpu_cores, cpu_threads
from hpctrain.config.program import command_of
from hpctrain.config.resources import resources_of
from hpctrain.config.root import ProgramConfig
from hpctrain.files import read_json_or_empty
from hpctrain.program.output import ProgramOutput
from hpctrain.rank.interface import choose_interface
from hpctrain.rank.rank import Member
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.import_path import editable_places, in_copy, python_prefixes
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.reason import Reason

_OF_EACH_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
"""Variables of a rank; a program that starts the ranks by itself sets them."""
_PRIVATE = LauncherFacts(attempt=1, logged=True, store="-", parent=1, terminal=1, code="-", version="-").variables()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRank(Member):
    """One rank of a program, as its process of hpctrain's sees it.

    With ``run.processes=node`` each node is one rank here.

    Attributes:
        config: of the run.
        session: the folder through which the program reports and learns of a stop.
        code: the copy of the code in which the program runs; None if it runs where it was launched.
        output: of the program.
        deadline: epoch seconds at which the job's time is over; None if that isn't known.
    """

    config: ProgramConfig
    session: Path
    output: ProgramOutput
    code: CodeSnapshot | None = None
    deadline: float | None = None

    @property
    def spawns(self) -> bool:
        """Whether the program starts the ranks of its node by itself."""
        return self.config.run.processes == "node"

    @property
    def log(self) -> Path:
        """The file with the output of the program."""
        return self.directory.rank_log(self.environment.rank)

    @property
    def submit_dir(self) -> Path:
        """The folder in which the run was launched."""
        if self.code is not None:
            return self.code.submit_dir
        return Path(str(read_json_or_empty(self.directory.manifest).get("folder") or Path.cwd()))

    @property
    def folder(self) -> Path:
        """The program's working directory."""
        return self.submit_dir if self.code is None else self.code.working_directory

    def make_exit_record(self, reason: Reason, step: int = 0, message: str = "") -> ExitRecord:
        """Make its exit record.

        Args:
            reason: why it ends.
            step: the last one that the program reported.
            message: one line about the end.
        """
        return self.exit_record(reason, step, self.output.lost, message)


def program_variables(rank: ProgramRank, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank's program.

    Sources: torch.distributed.elastic.agent, `LocalElasticAgent._start_workers`, for the variables of a rank;
    torch.distributed.argparse_util, `env`, for PET_*, the defaults of torchrun's options.

    Args:
        rank: its place.
        inherited: the environment of hpctrain's process.
    """
    variables = {name: value for name, value in inherited.items() if name not in _PRIVATE}
    variables |= rank.config.cluster.env
    choose_interface(rank.config.cluster.network_interface, rank.environment.node_addresses, variables)
    # block-buffered output would hide the last lines of a program that is killed
    variables.setdefault("PYTHONUNBUFFERED", "1")
    # not PYTHONPYCACHEPREFIX, which would hide the compiled files of installed packages as well
    variables.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    variables |= _run_variables(rank)
    if rank.code is not None:
        variables |= _code_variables(rank.code, command_of(rank.config)[0], variables)
    return variables | (_node_variables(rank, variables) if rank.spawns else _rank_variables(rank, variables))


def _run_variables(rank: ProgramRank) -> dict[str, str]:
    variables = {
        "PWD": str(rank.folder),
        "HPCTRAIN_RUN_DIR": str(rank.directory.path),
        "HPCTRAIN_ATTEMPT": str(rank.attempt),
        "HPCTRAIN_CHECKPOINT_DIR": str(rank.directory.checkpoints),
        "HPCTRAIN_SUBMIT_DIR": str(rank.submit_dir),
        "HPCTRAIN_SESSION": str(rank.session),
        "HPCTRAIN_STOP_SIGNAL": rank.config.run.signal,
    }
    if rank.deadline is not None:
        variables["HPCTRAIN_DEADLINE"] = f"{rank.deadline:.0f}"
    return variables


def _code_variables(code: CodeSnapshot, word: str, variables: Mapping[str, str]) -> dict[str, str]:
    changes = {
        # git would take the repository that contains the run for that of the copy
        "GIT_CEILING_DIRECTORIES": os.pathsep.join(
            [str(code.folder.parent), *filter(None, [variables.get("GIT_CEILING_DIRECTORIES")])]
        ),
        # uv would install the copy, in place of the original, into the environment that both share
        "UV_NO_SYNC": variables.get("UV_NO_SYNC", "1"),
    }
    if code.commit:
        changes["HPCTRAIN_CODE_COMMIT"] = code.commit
    if "PATH" in variables:
        changes["PATH"] = program_path(code, variables)
    if places := python_path(code, word, variables):
        changes["PYTHONPATH"] = places
    return changes


def _rank_variables(rank: ProgramRank, variables: Mapping[str, str]) -> dict[str, str]:
    place = rank.environment
    values = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.num_nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        "TORCHELASTIC_RUN_ID": f"{place.job_id or rank.config.name}.{rank.attempt}",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    threads = cpu_threads(place, rank.config.cluster.cpus_per_process, variables)
    if threads is not None:
        values["OMP_NUM_THREADS"] = threads
    return {name: str(value) for name, value in values.items()}


def _node_variables(rank: ProgramRank, variables: dict[str, str]) -> dict[str, str]:
    for name in [name for name in variables if name in _OF_EACH_RANK or name.startswith("TORCHELASTIC_")]:
        del variables[name]
    place = rank.environment
    # one rank per node, so this is the node's number in the order of the ranks, whose first node is MASTER_ADDR
    node_rank = place.rank
    resources = resources_of(rank.config, variables)
    spawned = resources.spawned_per_node or 1
    values = {
        "NODE_RANK": node_rank,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": place.num_nodes,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        "PET_NNODES": place.num_nodes,
        "PET_NPROC_PER_NODE": spawned,
        "PET_NODE_RANK": node_rank,
        "PET_MASTER_ADDR": place.master_addr,
        "PET_MASTER_PORT": place.master_port,
    }
    if spawned > 1 and "OMP_NUM_THREADS" not in variables:
        values["OMP_NUM_THREADS"] = max(1, cpu_cores(place, resources.cpus_per_process) // spawned)
    return {name: str(value) for name, value in values.items()}


def python_path(
    code: CodeSnapshot, word: str, variables: Mapping[str, str], places: Sequence[str] | None = None
) -> str:
    """Return PYTHONPATH for a program, which runs in the copy and finds its own folder by itself.

    Args:
        code: of the run.
        word: the first of the program's command.
        variables: with the PYTHONPATH of the original.
        places: of this process; None for its search path.
    """
    entries = variables["PYTHONPATH"].split(os.pathsep) if variables.get("PYTHONPATH") else []
    from_variable = [in_copy(code, str(code.submit_dir / place)) for place in entries]
    if places is None:
        # without -P, Python has put the working directory first
        places = sys.path if sys.flags.safe_path else sys.path[1:]
    installed = editable_places(python_prefixes(word, variables, (code.submit_dir, code.root)))
    from_process = [copy for place in (*places, *installed) if (copy := in_copy(code, place)) != place]
    return os.pathsep.join(dict.fromkeys([*from_variable, *from_process]))


def program_path(code: CodeSnapshot, variables: Mapping[str, str]) -> str:
    """Return PATH for a program: folders inside of the code are those of the copy."""
    places = variables["PATH"].split(os.pathsep)
    return os.pathsep.join(in_copy(code, place) if place.startswith("/") else place for place in places)


def command_in_copy(code: CodeSnapshot, command: Sequence[str]) -> list[str]:
    """Return a command with the copies of the files of the code that it names by absolute paths."""
    return [_file_in_copy(code, word) if word.startswith("/") else word for word in command]


def _file_in_copy(code: CodeSnapshot, word: str) -> str:
    parent, name = os.path.split(word)
    original = Path(os.path.realpath(parent), name)
    if not name or not original.is_relative_to(code.root):
        return word
    copy = code.folder / original.relative_to(code.root)
    try:
        state = copy.stat()
    except OSError:
        return word
    # what the program itself wrote into the copy isn't read-only, and what is linked isn't in the copy
    is_copied = stat.S_ISREG(state.st_mode) and not state.st_mode & 0o222
    return str(copy) if is_copied and copy.resolve().is_relative_to(code.folder.resolve()) else word
