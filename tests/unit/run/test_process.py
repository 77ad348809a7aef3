from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

from hpctrain.run.process import (
    environ_replaced,
    open_files_raised,
    process_age_s,
    process_start,
    signals_blocked,
)


def test_a_command_s_name_may_hold_anything(tmp_path):
    program = tmp_path / "a) R 7 (b"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        started = process_start(process.pid)
        assert started is not None
        assert abs(started - time.time()) < 60, "a field that is counted from the wrong parenthesis is another number"
        process.stdin.close()


def test_what_is_started_inside_begins_with_the_signals_blocked():
    shown = "import signal; print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))"
    with signals_blocked([signal.SIGUSR1, signal.SIGINT]):
        printed = subprocess.run([sys.executable, "-S", "-c", shown], stdout=subprocess.PIPE, check=True).stdout
    assert printed.split() == [b"[2,", b"10]"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGUSR1, signal.SIGINT}


def test_the_age_of_a_process_is_not_that_of_the_shell_that_it_replaced():
    program = (
        "import time; sum(range(10**7)); import hpctrain; time.sleep(0.2);"
        "from hpctrain.run.process import process_age_s; print(process_age_s(), time.process_time())"
    )
    began = time.monotonic()
    shell = ["bash", "-c", f"sleep 2 && {sys.executable} -c '{program}'"]
    age_s, computed_s = map(float, subprocess.check_output(shell, text=True).split())
    assert computed_s + 0.1 < age_s <= time.monotonic() - began - 2
    assert process_age_s() > age_s - 1


def test_the_environment_is_replaced_and_comes_back(monkeypatch):
    monkeypatch.setenv("MINE", "1")
    before = dict(os.environ)
    with environ_replaced({"MINE": "2", "OTHER": "3"}):
        assert dict(os.environ) == {"MINE": "2", "OTHER": "3"}
        os.environ["LATER"] = "4"
    assert dict(os.environ) == before


def test_as_many_files_as_the_hard_limit_allows_may_be_open_inside():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = (200, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, few)
    try:
        with open_files_raised():
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert 200 < soft <= hard == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
