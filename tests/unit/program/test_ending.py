from __future__ import annotations

import signal

import pytest

from hpctrain.config.run import ProgramRun
from hpctrain.program.output import ProgramEnd, outcome_of
from hpctrain.run.reason import Reason

TRACEBACK = "Traceback (most recent call last):\n  File x\n{}\n"
CLOSED = TRACEBACK.format("RuntimeError: [/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9")
LOST_WORKER = TRACEBACK.format("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.")
BAD = TRACEBACK.format("ValueError: bad")
NCCL_ON_GPU = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\n"
)
WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7) ran for 600029 milliseconds before timing out.\n"
)


def of(code, output="", world_size=1, run=None, **fields):
    return outcome_of(ProgramEnd(code=code, **fields), output, run or ProgramRun(), world_size)


@pytest.mark.parametrize(
    ("code", "fields", "reason"),
    [
        (0, {}, "completed"),
        (1, {}, "failed"),
        (-9, {}, "infrastructure"),
        (-11, {}, "infrastructure"),
        (-35, {}, "infrastructure"),
        (137, {}, "infrastructure"),
        (143, {}, "infrastructure"),
        (139, {}, "infrastructure"),
        (130, {}, "failed"),
        (-9, {"out_of_memory": True}, "out_of_memory"),
        (1, {"out_of_memory": True}, "failed"),
        (0, {"stop_signal": signal.SIGTERM}, "interrupted"),
        (1, {"stop_signal": signal.SIGTERM}, "interrupted"),
        (-15, {"stop_signal": signal.SIGUSR2}, "interrupted"),
        (0, {"stopping": "another rank"}, "interrupted"),
        (0, {"stopping": "deadline"}, "time_limit"),
        (0, {"stopping": "deadline", "stop_signal": signal.SIGTERM}, "interrupted"),
        (0, {"stop_signal": signal.SIGTERM, "done": True}, "completed"),
        (-6, {"done": True}, "completed"),
        (-9, {"stop_signal": signal.SIGINT, "cut_short": True}, "interrupted"),
    ],
)
def test_the_reason(code, fields, reason):
    assert of(code, **fields).reason is Reason(reason)


@pytest.mark.parametrize(("code", "reason"), [(0, "completed"), (1, "failed"), (-15, "failed")])
def test_a_code_that_is_believed_after_a_stop(code, reason):
    run = ProgramRun(on_stop="exit_code")
    assert of(code, run=run, stop_signal=signal.SIGTERM).reason is Reason(reason)


def test_the_message_of_a_failure():
    judged = of(3, f"step 1\n{BAD}")
    assert (judged.message, judged.traceback) == ("exit code 3: ValueError: bad", BAD.rstrip())
    assert of(3).message == "exit code 3, without any output"
    assert of(3, "no such data\n").message == "exit code 3: no such data"
    assert of(137, "step 4\n").message == "killed by SIGKILL (exit code 137)"
    assert of(-9, "step 4\n").traceback == "step 4"
    assert of(-11, "step 4\n").message == "killed by SIGSEGV: step 4"


@pytest.mark.parametrize(
    ("output", "world_size", "reason", "blames_peer"),
    [
        (CLOSED, 2, "infrastructure", True),
        (CLOSED, 1, "failed", False),
        (CLOSED.replace("RuntimeError", "torch.distributed.DistBackendError"), 2, "infrastructure", True),
        (CLOSED.replace("RuntimeError", "urllib.URLError"), 2, "failed", False),
        (f"Connection reset by peer\n{BAD}", 2, "failed", False),
        (CLOSED + BAD, 2, "failed", False),
        ("RuntimeError in a log: Connection closed by peer\n", 2, "failed", False),
        ("RuntimeError: NCCL error in: x.cpp:5, unhandled system error\nretrying\nno data\n", 2, "failed", False),
        ("[c10d] The server socket has failed: Connection reset by peer\n", 2, "infrastructure", True),
        ("cat: write error: Broken pipe\nno data\n", 2, "failed", False),
        ("no data\ncat: write error: Broken pipe\n", 2, "failed", False),
        (TRACEBACK.format("RuntimeError: dataset server timed out after 30s"), 2, "failed", False),
        (TRACEBACK.format("RuntimeError: bad data\ncat: write error: Broken pipe"), 2, "failed", False),
        (TRACEBACK.format("RuntimeError: Connection reset by peer"), 2, "infrastructure", True),
        (TRACEBACK.format("RuntimeError: Connection reset by peer"), 1, "failed", False),
        (TRACEBACK.format("torch.distributed.DistNetworkError: Broken pipe"), 2, "infrastructure", True),
        (TRACEBACK.format("RuntimeError: [/p/gloo/x.cc:81] Timed out waiting 5000ms for recv"), 2, "hang", True),
        (
            TRACEBACK.format("torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /default_pg/0"),
            2,
            "hang",
            True,
        ),
        (
            TRACEBACK.format("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."),
            2,
            "infrastructure",
            False,
        ),
        (
            TRACEBACK.format("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
            1,
            "infrastructure",
            False,
        ),
        (TRACEBACK.format("torch.AcceleratorError: CUDA error: device-side assert triggered"), 2, "failed", False),
        (TRACEBACK.format(NCCL_ON_GPU + "Cuda failure 2 'out of memory'"), 2, "failed", False),
        (TRACEBACK.format(NCCL_ON_GPU + "Cuda failure 214 'uncorrectable ECC error'"), 2, "infrastructure", False),
        (TRACEBACK.format(NCCL_ON_GPU + "Cuda failure 1 'invalid argument'"), 2, "infrastructure", True),
        (
            TRACEBACK.format("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
            1,
            "infrastructure",
            False,
        ),
    ],
)
def test_another_ranks_fault(output, world_size, reason, blames_peer):
    judged = of(1, output, world_size)
    assert (judged.reason, judged.blames_peer) == (Reason(reason), blames_peer)


def test_an_abort_of_nccls_watchdog():
    judged = of(-6, WATCHDOG, 2)
    assert (judged.reason, judged.blames_peer) == (Reason.HANG, True)
    frames = "".join(f"frame #{number}: <unknown function> (0x7f in /lib/libc10.so)\n" for number in range(30))
    assert of(-6, f"{WATCHDOG}Exception raised from checkTimeout\n{frames}", 2).reason is Reason.HANG
    assert of(-6, WATCHDOG, 1).reason is Reason.INFRASTRUCTURE


@pytest.mark.parametrize("output", [BAD + CLOSED, CLOSED + BAD, CLOSED + BAD + CLOSED])
def test_among_several_ranks_of_one_program_the_one_that_failed_by_itself_counts(output):
    judged = of(1, output, 2, ProgramRun(processes="node"))
    assert (judged.message, judged.blames_peer) == ("exit code 1: ValueError: bad", False)
    assert of(1, CLOSED, 2, ProgramRun(processes="node")).blames_peer
