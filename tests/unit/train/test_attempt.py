from __future__ import annotations

from hpctrain.run.directory import RunDirectory
from hpctrain.train.attempt import _log_to_file
from hpctrain.train.workload import close_log_files


def test_the_log_takes_any_text(tmp_path):
    directory = RunDirectory.at(tmp_path)
    directory.rank_log(0).parent.mkdir()
    stream = _log_to_file(directory, 0)
    stream.write("präzision \udc9b\n")
    close_log_files()
    assert directory.rank_log(0).read_bytes() == "präzision \\udc9b\n".encode()
