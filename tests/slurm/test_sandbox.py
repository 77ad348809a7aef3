"""The sandbox is a real SLURM, in every way that the other tests of this folder build on."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    StartSandbox = Callable[..., SlurmSandbox]

CGROUPS, STATES = Path("/sys/fs/cgroup"), Path("/run/slurm-sandbox")
PROGRAM = Path(__file__).parents[2] / "slurm" / "sandbox"
TRANSFER = Path(__file__).parent / "programs" / "transfer.py"


def program(*argv: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, str(PROGRAM), *argv],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=60)[0]


def host_state(name: str) -> dict[str, set[str]]:
    """What a sandbox of this name has on this machine, and links of no sandbox; other tests may have sandboxes too."""
    home = STATES / name
    mark = re.compile(re.escape(str(home).encode()) + rb"[/\0]")
    processes: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.search((process / "environ").read_bytes() + b"\0"):
                processes.add(process.name)
    found = {
        "processes": processes,
        "links": {link.name for link in Path("/sys/class/net").glob("sandbox[0-9]*")} - links_of_others(name),
        "mounts": {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{home}/" in line},
        "groups": {str(path) for top in ("", "*/") for path in CGROUPS.glob(f"{top}slurm-sandbox-{name}/*")},
        "states": {str(home)} if home.exists() else set(),
    }
    return {kind: entries for kind, entries in found.items() if entries}


def links_of_others(name: str) -> set[str]:
    """Network interfaces of the other sandboxes that are up, or on their way."""
    found = set()
    for record in STATES.glob("*/record.json"):
        with suppress(OSError):
            if record.parent.name != name:
                found.add(f"sandbox{json.loads(record.read_text())['network']}")
    return found


def leftovers(name: str) -> dict[str, set[str]]:
    """What `down` has left; a process that was killed may take a moment to be gone."""
    deadline = time.monotonic() + 10
    while (found := host_state(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def wait_for_lines(file: Path, count: int, timeout: float = 60) -> list[str]:
    deadline = time.monotonic() + timeout
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"{file} has no {count} lines"
        time.sleep(0.05)
    return file.read_text().splitlines()


def wait_until(ready: Callable[[], object], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, f"not so after {timeout:g} s"
        time.sleep(0.05)


def test_nodes_have_names_and_addresses_of_their_own(sandbox: SlurmSandbox) -> None:
    done = sandbox.run(["srun", "--nodes=4", "sh", "-c", "echo $(hostname) $(hostname -I)"])
    rows = sorted(line.split() for line in done.stdout.splitlines())
    assert [name for name, _ in rows] == sandbox.nodes == ["n1", "n2", "n3", "n4"], done.stderr
    assert len({address for _, address in rows}) == 4


def test_a_node_has_shared_memory_of_its_own(sandbox: SlurmSandbox) -> None:
    sandbox.on("n1", "touch", "/dev/shm/mine")
    try:
        assert sandbox.on("n1", "ls", "/dev/shm") == "mine\n"
        assert sandbox.on("n2", "ls", "/dev/shm") == ""
        assert not Path("/dev/shm/mine").exists()
    finally:
        sandbox.on("n1", "rm", "/dev/shm/mine")


def test_every_node_reaches_every_other_by_name(sandbox: SlurmSandbox) -> None:
    reach = "for peer in n1 n2 n3 n4; do echo > /dev/tcp/$peer/6818 && echo $(hostname)-$peer; done"
    done = sandbox.run(["srun", "--nodes=4", "bash", "-c", reach])
    assert len(set(done.stdout.split())) == 16, done.stderr


def test_gpus_are_counted_and_bound(sandbox: SlurmSandbox) -> None:
    show = ["printenv", "CUDA_VISIBLE_DEVICES"]
    every = sandbox.run(["srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", *show]).stdout
    assert every.split() == ["0,1"] * 4
    one_each = sandbox.run(["srun", "--ntasks=4", "--ntasks-per-node=2", "--gpus-per-task=1", *show]).stdout
    assert sorted(one_each.split()) == ["0", "0", "1", "1"]
    too_many = sandbox.run(["sbatch", "--gpus-per-node=3", "--wrap=true"])
    assert too_many.returncode != 0


def test_a_process_that_hides_from_its_parent_dies_with_its_job(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    if "proctrack/cgroup" not in Path(sandbox.environ["SLURM_CONF"]).read_text():
        pytest.skip("without control groups SLURM follows parents and children only")
    script = tmp_path / "daemon.sh"
    script.write_text(
        "#!/bin/sh\nsetsid sh -c '(sleep 4321 >/dev/null 2>&1 &)' &\n"
        "until pids=$(pgrep -fx 'sleep 4321'); do sleep 0.05; done\necho $pids\n"
    )
    script.chmod(0o755)
    hidden = sandbox.run(["srun", str(script)]).stdout.split()
    assert len(hidden) == 1
    deadline = time.monotonic() + 20
    while "4321" in sandbox.on("n1", "ps", "-e", "-o", "args"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.nightly
def test_preemption_requeues_a_job_of_the_low_partition(start_sandbox: StartSandbox) -> None:
    small = start_sandbox("--nodes=2", "--grace-time=0")
    low = small.submit("--nodes=2", "--wrap=srun sleep 100")
    assert small.wait_job(low, "RUNNING")["Restarts"] == "0"
    high = small.preempt(seconds=1)
    small.wait_job(high, {"RUNNING", "COMPLETING", "COMPLETED"})
    assert small.wait_job(low, "PENDING")["Restarts"] == "1"
    small.wait_job(high, "COMPLETED")
    assert small.wait_job(low, "RUNNING")["Partition"] == "low"


@pytest.mark.nightly
def test_slurm_loses_a_killed_and_a_cut_node_and_takes_them_back(start_sandbox: StartSandbox, tmp_path: Path) -> None:
    small = start_sandbox("--nodes=3", "--node-timeout=4")
    dying, cut = tmp_path / "dying", tmp_path / "cut"
    tick = "srun sh -c 'while sleep 0.1; do hostname >> {}; done'"
    first = small.submit("--nodelist=n1,n2", f"--wrap={tick.format(dying)}")
    second = small.submit("--nodelist=n3", "--no-requeue", f"--wrap={tick.format(cut)}")
    wait_until(lambda: dying.exists() and {"n1", "n2"} <= set(dying.read_text().split()))
    wait_for_lines(cut, 4)
    small.cut("n3")
    small.kill_node("n2")
    died_at = dying.read_text().count("n2")
    unreachable = small.on("n3", "bash", "-c", "timeout 1 bash -c 'echo > /dev/tcp/n1/6818' || echo unreachable")
    assert "unreachable" in unreachable

    small.wait_job(second, "NODE_FAIL")
    assert small.wait_job(first, "PENDING")["Restarts"] == "1"
    assert dying.read_text().count("n2") == died_at > 0
    wait_for_lines(cut, len(cut.read_text().splitlines()) + 5)
    for node in ("n2", "n3"):
        small.wait_node(node, "down*")

    small.revive_node("n2")
    small.mend("n3")
    assert small.run(["srun", "--nodes=1", "--nodelist=n2", "hostname"]).stdout == "n2\n"
    assert small.run(["srun", "--nodes=1", "--nodelist=n3", "hostname"]).stdout == "n3\n"
    # SLURM ends what it gave up, within KillWait
    wait_until(lambda: str(cut) not in small.on("n3", "ps", "-e", "-o", "args"))


def transfer(sandbox: SlurmSandbox, sender: str, receiver: str, num_bytes: int) -> tuple[float, float]:
    """Send over TCP from one node to the other; returns the throughput in Mbit/s and the share of segments resent."""
    command = [sys.executable, str(TRANSFER)]
    with program("on", "--name", sandbox.name, receiver, "--", *command) as receiving:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        mbit, resent = sandbox.on(sender, *command, receiver, port, str(num_bytes)).split()
    return float(mbit), float(resent)


@pytest.mark.nightly
def test_a_slow_link_is_slow_in_both_directions_until_it_is_mended(sandbox: SlurmSandbox) -> None:
    sandbox.slow("n2")
    assert "; its link is slow (20 Mbit/s)\n" in sandbox.command("status")
    for sender, receiver in [("n2", "n1"), ("n1", "n2")]:
        mbit, resent = transfer(sandbox, sender, receiver, 2_000_000)
        assert 5 < mbit < 22
        assert resent < 0.005
    assert transfer(sandbox, "n1", "n3", 2_000_000)[0] > 40
    assert "has its whole link again" in sandbox.command("mend", "n2")
    assert "its link" not in sandbox.command("status")
    assert transfer(sandbox, "n1", "n2", 2_000_000)[0] > 40


@pytest.mark.nightly
def test_a_lossy_link_resends_in_both_directions_until_it_is_mended(sandbox: SlurmSandbox) -> None:
    assert transfer(sandbox, "n1", "n2", 20_000_000)[1] < 0.001
    sandbox.lossy("n2")
    assert "; its link is lossy (2 %)\n" in sandbox.command("status")
    for sender, receiver in [("n2", "n1"), ("n1", "n2")]:
        assert 0.004 < transfer(sandbox, sender, receiver, 20_000_000)[1] < 0.1
    assert sandbox.run(["srun", "--nodes=4", "hostname"]).returncode == 0
    sandbox.mend("n2")
    assert transfer(sandbox, "n1", "n2", 20_000_000)[1] < 0.001


def test_a_link_can_be_slow_lossy_and_cut_at_once(start_sandbox: StartSandbox) -> None:
    small = start_sandbox("--nodes=2")
    small.command("lossy", "n1", "--percent", "0.5")
    small.slow("n1")
    small.command("slow", "n1", "--mbit", "2.5")
    small.cut("n1")
    assert "cut    SLURM says idle; its link is slow (2.5 Mbit/s) and lossy (0.5 %)\n" in small.command("status")
    assert "is connected, and in service again" in small.command("mend", "n1")
    assert "its link" not in small.command("status")

    small.lossy("n2")
    small.kill_node("n2")
    small.revive_node("n2")
    assert "its link" not in small.command("status")


@pytest.mark.parametrize("fault", ["slow", pytest.param("lossy", marks=pytest.mark.nightly)])
def test_a_reset_makes_links_whole(sandbox: SlurmSandbox, fault: str) -> None:
    sandbox.command(fault, "n3")
    assert "has started afresh" in sandbox.command("reset")
    assert "its link" not in sandbox.command("status")
    assert "was as new" in sandbox.command("reset")


@pytest.mark.parametrize("fault", ["slow", "lossy"])
def test_a_kernel_that_cannot_impair_a_link_is_reported_in_one_line(
    sandbox: SlurmSandbox, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "tc").write_text(
        "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.\nCommand failed -:1' >&2\nexit 1\n"
    )
    (tmp_path / "tc").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    refused = program(fault, "n1", "--name", sandbox.name, env={**os.environ, "PATH": path})
    [line] = output_of(refused).splitlines()
    assert "Specified qdisc kind is unknown" in line
    assert refused.returncode == 1


def test_options_reach_slurms_configuration(start_sandbox: StartSandbox) -> None:
    small = start_sandbox("--nodes=1", "--mpi-default=pmix", "--no-requeue")
    config = dict(re.findall(r"^(\w+) += (.*)$", small.ask("scontrol", "show", "config"), re.MULTILINE))
    assert (config["MpiDefault"], config["JobRequeue"]) == ("pmix", "0")
    assert small.run(["srun", "--mpi=none", "hostname"]).stdout == "n1\n"


@pytest.mark.nightly
def test_two_sandboxes_side_by_side_and_one_has_accounting(sandbox: SlurmSandbox, start_sandbox: StartSandbox) -> None:
    other = start_sandbox("--nodes=2", "--accounting")
    here = sandbox.submit("--nodes=4", "--wrap=srun sleep 100")
    assert other.run(["srun", "--nodes=2", "hostname"]).returncode == 0
    assert other.run(["srun", "--nodes=2", "sh", "-c", "exit 3"]).returncode == 3
    other.wait_job("2", "FAILED")
    sandbox.wait_job(here, "RUNNING")
    deadline = time.monotonic() + 20
    while not (rows := other.run(["sacct", "-nXP", "--format=JobID,State,ExitCode"]).stdout).count("FAILED"):
        assert time.monotonic() < deadline, rows
        time.sleep(0.2)
    assert rows.split() == ["1|COMPLETED|0:0", "2|FAILED|3:0"]
    assert sandbox.run(["sacct"]).returncode != 0


@pytest.mark.nightly
def test_preemption_sends_the_users_signal_where_asked_for(start_sandbox: StartSandbox, tmp_path: Path) -> None:
    small = start_sandbox("--nodes=1", "--preempt-send-user-signal", "--grace-time=60")
    heard = tmp_path / "heard"
    script = tmp_path / "listen.sh"
    script.write_text(f"""#!/bin/bash
        for name in TERM USR2; do trap "echo $name >> {heard}; exit" $name; done
        echo ready > {heard}
        while :; do sleep 0.05; done
    """)
    script.chmod(0o755)
    job = small.submit("--signal=USR2@60", "--no-requeue", f"--wrap=srun {script}")
    wait_for_lines(heard, 1)
    small.preempt(seconds=1)
    ended = {"COMPLETED", "PREEMPTED"}  # the latter since SLURM 24.05
    assert small.wait_job(job, ended)["PreemptTime"] != "None"
    assert heard.read_text().split() == ["ready", "USR2"]


@pytest.mark.nightly
def test_preemption_cancels_where_asked_for(start_sandbox: StartSandbox) -> None:
    small = start_sandbox("--nodes=1", "--preempt-mode=CANCEL", "--grace-time=0")
    job = small.submit("--wrap=srun sleep 100")
    small.wait_job(job, "RUNNING")
    small.preempt(seconds=1)
    assert small.wait_job(job, "PREEMPTED")["Restarts"] == "0"


@pytest.mark.nightly
def test_a_job_that_takes_more_memory_than_it_asked_for_is_killed(start_sandbox: StartSandbox) -> None:
    limited = start_sandbox("--nodes=1", "--memory-limits")
    take = ["srun", "--mem=64M", sys.executable, "-c"]
    assert limited.run([*take, "bytearray(20 << 20)"]).returncode == 0
    greedy = limited.run([*take, "bytearray(200 << 20)"])
    assert greedy.returncode != 0
    assert "Out Of Memory" in greedy.stderr


def test_down_leaves_nothing_behind(sandbox: SlurmSandbox, start_sandbox: StartSandbox) -> None:
    other = start_sandbox("--nodes=2")
    other.submit("--nodes=2", "--wrap=srun sleep 100")
    other.wait_job("1", "RUNNING")
    other.kill_node("n2")
    assert {"processes", "links", "states"} <= host_state(other.name).keys()
    other.down()
    assert leftovers(other.name) == {}
    assert "was not up" in other.command("down")


@pytest.mark.parametrize("after_s", [0.1, pytest.param(0.2, marks=pytest.mark.nightly)])
def test_down_cleans_up_after_an_up_that_was_killed(sandbox: SlurmSandbox, after_s: float) -> None:
    name = f"{sandbox.name}-half"
    half = program("up", "--name", name)
    time.sleep(after_s)
    half.kill()
    output_of(half)
    output_of(program("down", "--name", name))
    assert leftovers(name) == {}


def test_an_interrupted_up_cleans_up_itself(sandbox: SlurmSandbox) -> None:
    name = f"{sandbox.name}-stopped"
    stopped = program("up", "--name", name, "--accounting")
    wait_until((STATES / name).exists)  # it handles signals by then
    stopped.terminate()
    assert "interrupted" in output_of(stopped)
    assert stopped.returncode == 130
    assert leftovers(name) == {}


@pytest.mark.nightly
def test_an_up_that_is_interrupted_before_it_begins_cleans_up_itself(sandbox: SlurmSandbox) -> None:
    """It waits for another command, which ends and leaves an empty folder."""
    home = STATES / f"{sandbox.name}-waiting"
    home.mkdir()
    other = os.open(home, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waiting = program("up", "--name", home.name)
    wait_until(lambda: has_open(waiting.pid, home))
    waiting.terminate()
    os.close(other)
    assert "interrupted" in output_of(waiting)
    assert waiting.returncode == 130
    assert leftovers(home.name) == {}


def has_open(pid: int, path: Path) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it may be closed by now
            if link.readlink() == path:
                return True
    return False


def test_many_at_once_get_one_sandbox_of_a_name(sandbox: SlurmSandbox) -> None:
    name = f"{sandbox.name}-same"
    try:
        printed = [output_of(each) for each in [program("up", "--name", name, "--nodes", "1") for _ in range(3)]]
        assert sorted("already up" in text for text in printed) == [False, True, True], printed
    finally:
        assert "is down" in output_of(program("down", "--name", name))


def test_missing_packages_are_named_with_the_line_to_type(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    (tmp_path / "apt-get").symlink_to(shutil.which("true") or "/bin/true")
    refused = program("up", "--name", f"{sandbox.name}-no", "--accounting", env={"PATH": str(tmp_path)})
    assert "apt-get install --no-install-recommends" in (text := output_of(refused))
    assert "slurm-client" in text
    assert refused.returncode == 2


@pytest.mark.parametrize(
    ("argv", "exit_code", "printed"),
    [
        (["kill-node", "9"], 2, "n1, n2, n3, n4"),
        (["up", "--name", "No/Name"], 2, "No/Name"),
        (["up", "--nodes", "0"], 2, "--nodes"),
        (["status", "--name", "nobody"], 1, "up --name nobody"),
        (["env", "--name", "nobody"], 1, "up --name nobody"),
        (["run", "--", "no-such-program"], 127, "no-such-program"),
        (["mend", "1"], 0, "was not cut off"),
        (["slow", "1", "--mbit", "0"], 2, "expected 0.1 to 10000, got 0"),
        (["lossy", "1", "--percent", "100"], 2, "expected 0.001 to 99, got 100"),
        (["lossy", "9"], 2, "n1, n2, n3, n4"),
        (["revive-node", "n1"], 0, "was alive"),
        (["up", "--node-timeout", "99"], 0, "other options"),
        (["status"], 0, "SLURM says idle"),
        (["--help"], 0, "kill-node"),
    ],
)
def test_what_it_prints(sandbox: SlurmSandbox, argv: list[str], exit_code: int, printed: str) -> None:
    process = program(*argv, env={**os.environ, "SLURM_SANDBOX_NAME": sandbox.name})
    assert printed in output_of(process)
    assert process.returncode == exit_code


def test_root_is_asked_for(sandbox: SlurmSandbox) -> None:
    process = program("up", prefix=("unshare", "--user"))
    assert "sudo" in output_of(process)
    assert process.returncode == 2
