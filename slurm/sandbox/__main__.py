"""A real SLURM of a few nodes on one Debian or Ubuntu machine: `python slurm/sandbox --help`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from home import names
from options import Options
from problem import SandboxError
from requirements import check_root
from sandbox import Sandbox

HERE = "python slurm/sandbox"
EPILOG = f"""example:
  {HERE} up && eval "$({HERE} env)"
  sinfo; srun -N4 hostname
  {HERE} down
"""


def main() -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        check_root()
        code: int = arguments.command(Sandbox(arguments.name), arguments)
    except SandboxError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("sandbox: interrupted", file=sys.stderr)
        return 130
    return code


def up(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Bring it up."""
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    began = time.monotonic()
    if sandbox.up(options):
        nodes = options.node_names
        print(f"sandbox {sandbox.name!r} is up after {time.monotonic() - began:.1f} s: {nodes[0]} to {nodes[-1]}, idle")
    else:
        print(f"sandbox {sandbox.name!r} is already up")
        if sandbox.record().options != options:
            print(f"  with other options than asked for; to change them: {_line(sandbox, 'down')}, then up again")
    print(f'next:  eval "$({_line(sandbox, "env")})"')
    print("then:  sinfo, srun -N2 hostname, ... as on any cluster")
    print(f"end:   {_line(sandbox, 'down')}")
    return 0


def down(sandbox: Sandbox, _: argparse.Namespace) -> int:
    """Take it down."""
    was = "is down; nothing is left of it" if sandbox.down() else "was not up"
    print(f"sandbox {sandbox.name!r} {was}")
    return 0


def env(sandbox: Sandbox, _: argparse.Namespace) -> int:
    """Print what a shell needs."""
    sandbox.record()
    print(f"export SLURM_CONF={sandbox.path}/slurm.conf")
    return 0


def run(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Become the command."""
    sandbox.record()
    return _become(arguments.argv, sandbox.cluster.environ)


def on(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Become the command on a node."""
    node = sandbox.node(arguments.node)
    return _become(node.command(*(arguments.argv or ["bash"])), sandbox.cluster.environ)


def status(sandbox: Sandbox, _: argparse.Namespace) -> int:
    """Print what is up."""
    if others := [name for name in names() if name != sandbox.name]:
        print(f"other sandboxes on this machine: {', '.join(others)}")
    if not sandbox.is_up():
        print(f"sandbox {sandbox.name!r} isn't up. Type: {_line(sandbox, 'up')}")
        return 1
    record, alive = sandbox.record(), sandbox.machines()
    print(f"sandbox {sandbox.name!r} is up; its files and logs are in {sandbox.path}")
    print(", ".join(f"{name}={value}" for name, value in vars(record.options).items()))
    states, impaired = sandbox.cluster.node_states(), sandbox.impairments()
    for name in record.options.node_names:
        life = "dead" if name not in alive else "cut" if sandbox.is_cut(name) else "alive"
        link = f"; its link is {impaired[name]}" if name in impaired else ""
        print(f"{name}  {record.address(name):<14} {life:<6} SLURM says {states.get(name, 'nothing')}{link}")
    print(f"jobs in the queue: {len(sandbox.cluster.jobs())}")
    return 0


def kill_node(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Kill a node."""
    sandbox.kill_node(arguments.node)
    timeout_s = sandbox.record().options.node_timeout_s
    print(f"{arguments.node} is dead; SLURM will call it down in about {timeout_s + 5} s")
    print(f"next:  {_line(sandbox, f'revive-node {arguments.node}')}")
    return 0


def revive_node(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Start a dead node."""
    was = "is in service again" if sandbox.revive_node(arguments.node) else "was alive"
    print(f"{arguments.node} {was}")
    return 0


def cut(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Cut a node off."""
    sandbox.cut(arguments.node)
    print(f"{arguments.node} is cut off; its processes live on")
    print(f"next:  {_line(sandbox, f'mend {arguments.node}')}")
    return 0


def slow(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Slow a node's link."""
    sandbox.slow(arguments.node, arguments.mbit)
    return _impaired(sandbox, arguments.node)


def lossy(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Make a node's link lose packets."""
    sandbox.lossy(arguments.node, arguments.percent)
    return _impaired(sandbox, arguments.node)


def _impaired(sandbox: Sandbox, node: str) -> int:
    print(f"the link of {node} is {sandbox.impairments()[node]}")
    print(f"next:  {_line(sandbox, f'mend {node}')}")
    return 0


def mend(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Undo a cut, a slow link and a lossy one."""
    undone = sandbox.mend(arguments.node)
    if "cut" in undone:
        print(f"{arguments.node} is connected, and in service again")
    elif undone:
        print(f"{arguments.node} has its whole link again")
    else:
        print(f"{arguments.node} was not cut off, slow or lossy")
    return 0


def crash_controller(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Kill and restart the controller."""
    sandbox.crash_controller(arguments.seconds)
    print("the controller runs again, with the state that it had saved")
    return 0


def preempt(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    """Submit a job that takes nodes."""
    record = sandbox.record()
    print(sandbox.cluster.preempt(arguments.nodes or record.options.nodes, arguments.seconds))
    return 0


def reset(sandbox: Sandbox, _: argparse.Namespace) -> int:
    """Return to the state after `up`."""
    was = "has started afresh" if sandbox.reset() else "was as new"
    print(f"sandbox {sandbox.name!r} {was}: no jobs, every node idle")
    return 0


def _line(sandbox: Sandbox, command: str) -> str:
    return f"{HERE} {command}" + ("" if sandbox.name == "default" else f" --name {sandbox.name}")


def _become(argv: list[str], environ: dict[str, str]) -> int:
    try:
        os.execvpe(argv[0], argv, environ)
    except FileNotFoundError:
        raise SandboxError(f"{argv[0]}: no such command", 127) from None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _node_name(text: str) -> str:
    return f"n{text}" if text.isdecimal() else text


def _between(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not low <= (value := float(text)) <= high:
            raise argparse.ArgumentTypeError(f"expected {low:g} to {high:g}, got {text}")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=HERE, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = argparse.ArgumentParser(add_help=False)
    name = os.environ.get("SLURM_SANDBOX_NAME", "default")
    named.add_argument("--name", default=name, help="which sandbox (default: $SLURM_SANDBOX_NAME, or 'default')")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(command: object, text: str) -> argparse.ArgumentParser:
        word = getattr(command, "__name__", "").replace("_", "-")
        added = commands.add_parser(word, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[named])
        added.set_defaults(command=command)
        return added

    _add_up_options(add(up, "bring a sandbox up and wait until its nodes are idle"))
    add(down, "take it down; leaves nothing behind, can be repeated")
    add(env, 'print the line that connects a shell: eval "$(... env)"')
    add(status, "show the sandbox, its nodes and jobs")
    add(run, "run a command connected to it: run -- CMD ...").add_argument("argv", nargs="+", metavar="CMD")
    for command, text in {
        on: "run a command, or a shell, on a node: on N -- CMD ...",
        kill_node: "make a node die: SIGKILL to all of its processes, and its network disappears",
        revive_node: "start a dead node again, empty, and return it to service",
        cut: "cut a node off the network; its processes live on",
        slow: "let a node's link carry only so much in each direction",
        lossy: "let a node's link lose a share of its packets in each direction, at random",
        mend: "undo cut, slow and lossy; a node that was cut off returns to service",
    }.items():
        added = add(command, text)
        added.add_argument("node", metavar="N", type=_node_name, help="2 or n2")
        if command is on:
            added.add_argument("argv", nargs="*", metavar="CMD")
        elif command is slow:
            added.add_argument("--mbit", type=_between(0.1, 10_000), default=20, help="Mbit/s (default: 20)")
        elif command is lossy:
            added.add_argument("--percent", type=_between(0.001, 99), default=2, help="of the packets (default: 2)")
    added = add(crash_controller, "SIGKILL to the controller, and start it again")
    added.add_argument("--seconds", type=float, default=1.0, help="how long it is away (default: 1)")
    added = add(preempt, "take the nodes of jobs in the partition low for a job in high; prints its job id")
    added.add_argument("--nodes", type=int, help="how many (default: all)")
    added.add_argument("--seconds", type=int, default=5, help="how long the job runs (default: 5)")
    add(reset, "no jobs, and every node alive and idle: kills all that runs and starts afresh")
    return parser


def _add_up_options(parser: argparse.ArgumentParser) -> None:
    default = Options()
    add = parser.add_argument
    add("--nodes", type=int, choices=range(1, 65), metavar="N", default=default.nodes, help="1 to 64 (default: 4)")
    add("--accounting", action="store_true", help="sacct works: slurmdbd on a MariaDB of its own")
    grace = "time that a preempted job of the partition low has (default: 10)"
    add("--grace-time", type=int, dest="grace_time_s", metavar="S", default=default.grace_time_s, help=grace)
    add("--preempt-mode", choices=["REQUEUE", "CANCEL"], default=default.preempt_mode, help="(default: REQUEUE)")
    every = "also low_requeue, low_requeue_0, low_cancel and low_cancel_0, the last of each pair without grace time"
    add("--every-preemption", action="store_true", help=every)
    add("--preempt-send-user-signal", action="store_true", help="preemption sends the signal of sbatch --signal")
    add("--memory-limits", action="store_true", help="kill a job that takes more memory than it asked for")
    add("--signal-children", action="store_true", help="signals reach all processes of a job, not its tasks alone")
    timeout = "SLURM gives a silent node up after this (default: 20)"
    add("--node-timeout", type=int, dest="node_timeout_s", metavar="S", default=default.node_timeout_s, help=timeout)
    tasks = "a job array has at most N tasks (default: 1001)"
    add("--max-array-size", type=int, metavar="N", default=default.max_array_size, help=tasks)
    mpi = "MpiDefault; SLURM can't load Debian's pmix, so srun fails without --mpi=none (default: none)"
    add("--mpi-default", choices=["none", "pmix"], default=default.mpi_default, help=mpi)
    add("--oci", action="store_true", help="srun --container works, with runc (oci.conf)")
    requeue = "SLURM requeues a job only where its sbatch says --requeue (JobRequeue=0)"
    add("--no-requeue", action="store_false", dest="requeue", help=requeue)
    switches = "the nodes are on two switches, the last ones on the first: SLURM 26.05 gives those the first tasks"
    add("--switches", action="store_true", help=switches)
    types = "GPUs of the type a100 on the first half of the nodes, h100 on the others, and a partition for each"
    add("--gpu-types", action="store_true", help=types)
    form = "sbatch takes GPUs in this form only, and only with a type (default: any)"
    add("--gpu-form", choices=["any", "gpus-per-node", "gres", "gpus-per-task"], default=default.gpu_form, help=form)
    add("--expedite", action="store_true", help="sbatch --requeue=expedite works (SLURM 25.11 and later)")


if __name__ == "__main__":
    sys.exit(main())
