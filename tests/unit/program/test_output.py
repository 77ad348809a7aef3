from __future__ import annotations

import threading
import time

import pytest

from hpctrain.program.output import LAST_LINES, find_errors, read_tail

OWN = "2026-01-01 12:00:00 hpctrain: "
PLAIN = """step 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
    ~~~~^^
  File "train.py", line 1, in main
    raise ValueError("bad")
ValueError: bad
[W1] Exception ignored
"""
CHAINED = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
my.package.OwnError: no x
"""
IN_LOADER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 1, in get
ValueError: sample 3 is empty

"""


def test_the_last_line_of_a_traceback():
    (error,) = find_errors(PLAIN)
    assert (error.message, error.type) == ("ValueError: bad", "ValueError")
    assert error.traceback.startswith("Traceback (most recent call last):\n  File")
    assert error.traceback.endswith('raise ValueError("bad")\nValueError: bad')


def test_torchs_prefix_of_a_rank_is_removed():
    prefixed = "".join(f"[rank3]: {line}\n" for line in PLAIN.splitlines()[1:8])
    (error,) = find_errors(f"noise\n{prefixed}[rank3]:[W1] destroyed\n")
    assert error == find_errors("\n".join(PLAIN.splitlines()[1:8]) + "\n[rank3]:[W1] destroyed\n")[0]


@pytest.mark.parametrize(
    ("text", "message", "type_name"),
    [(CHAINED, "my.package.OwnError: no x", "OwnError"), (IN_LOADER, "ValueError: sample 3 is empty", "ValueError")],
)
def test_an_error_with_the_one_that_it_followed_from(text, message, type_name):
    error = find_errors(text)[-1]
    assert (error.message, error.type) == (message, type_name)
    assert error.traceback == text.rstrip()


def test_torchruns_own_error_says_nothing():
    wrapper = (
        "Traceback (most recent call last):\n  File x\ntorch.distributed.x.ChildFailedError: \n=====\ntrain.py FAILED\n"
    )
    assert [error.message for error in find_errors(PLAIN + wrapper)] == ["ValueError: bad"]


def test_without_a_traceback_the_last_lines_count():
    (error,) = find_errors("".join(f"line {number}\n" for number in range(100)) + "loading:  1%\rloading: 99%\n\n")
    assert error.message == "loading: 99%"
    assert error.traceback.splitlines()[0] == f"line {100 - LAST_LINES + 1}"
    assert error.type == ""
    assert find_errors("\n \n") == []


def test_an_unfinished_traceback_is_text():
    assert find_errors('Traceback (most recent call last):\n  File "a.py"\n')[0].message == 'File "a.py"'


def test_the_tail_begins_with_the_attempt_and_ends_with_the_program(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write(f"{OWN}started\nmine\n{OWN}the program ended: exit code 1\nafter\n")
    assert read_tail(log, start, "the program ended: exit code 1") == "mine\n"
    assert read_tail(tmp_path / "none", 0, "ended") == ""


@pytest.mark.parametrize("unfinished", ["error: no data", "\r 99%"])
def test_a_last_line_without_an_end_is_kept(tmp_path, unfinished):
    log = tmp_path / "log"
    log.write_text(f"mine\n{unfinished}{OWN}attempt 1: the program ended: exit code 1\nafter\n")
    assert read_tail(log, 0, "attempt 1: the program ended: exit code 1") == f"mine\n{unfinished}"
    log.write_text(f"{unfinished}{OWN}SIGTERM received\nlast\n{OWN}ended\n")
    assert read_tail(log, 0, "ended") == f"{unfinished}\nlast\n"


def test_thousands_of_chained_tracebacks_are_read_at_once():
    start = time.process_time()
    errors = find_errors(("During handling of the above exception\n" + IN_LOADER.partition("\nOrig")[0] + "\n") * 3000)
    assert errors[-1].type == "ValueError"
    assert time.process_time() - start < 0.3


def test_output_that_still_arrives_is_awaited(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n")

    def arrive():
        time.sleep(0.1)
        with log.open("a") as file:
            file.write(f"last\n{OWN}ended\n")

    writer = threading.Thread(target=arrive)
    writer.start()
    assert read_tail(log, 0, "ended") == "first\nlast\n"
    writer.join()
