import pytest

from hpctrain.cli.train import REFUSED, main


def named(text):
    return [flag for flag in REFUSED if f"--{flag.replace('_', '-')}" in text]


def test_what_is_refused_is_not_advertised(capsys):
    assert main(["--hydra-help"]) == 0
    out = capsys.readouterr().out
    assert "--config-dir" in out
    assert named(out) == []


def test_nor_in_the_answer_to_a_flag_that_is_unknown(capsys):
    with pytest.raises(SystemExit):
        main(["--fly"])
    assert named(capsys.readouterr().err) == []
