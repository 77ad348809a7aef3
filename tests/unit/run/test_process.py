from __future__ import annotations

import os
import signal
import subprocess
import sys

from hpctrain.run.process import signals_blocked, stat_fields


def test_a_command_s_name_may_hold_anything(tmp_path):
    program = tmp_path / "a) R 7 (b"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        assert stat_fields(process.pid)[1] == str(os.getpid()), "the parent is the second field"
        process.stdin.close()


def test_what_is_started_inside_begins_with_the_signals_blocked():
    shown = "import signal; print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))"
    with signals_blocked([signal.SIGUSR1, signal.SIGINT]):
        told = subprocess.run([sys.executable, "-S", "-c", shown], stdout=subprocess.PIPE, check=True).stdout
    assert told.split() == [b"[2,", b"10]"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGUSR1, signal.SIGINT}
