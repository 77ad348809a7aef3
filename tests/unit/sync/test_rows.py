"""Nothing but the run's own files is sent, whatever other users put into its directory."""

from __future__ import annotations

import os

import pytest

from hpctrain.cli import main
from hpctrain.errors import ExitCode
from hpctrain.sync.sender import SenderClaim
from hpctrain.sync.sent_run import Rows
from tests.support.logged_run import LoggedRun

FILE = "sample_00000005.txt"


@pytest.fixture
def run(directory):
    run = LoggedRun(directory)
    run.train(0, 6, media=True)
    return run


@pytest.fixture
def secret(tmp_path):
    """A folder outside of the run, with a file of the medium's name."""
    folder = tmp_path / "home" / "eval"
    folder.mkdir(parents=True)
    (folder / FILE).write_text("secret")
    return folder / FILE


def sent(run):
    rows = Rows(run.directory, -1)
    rows.read()
    (medium,) = [medium for row in rows.before(None) for medium in row.media.values()]
    with medium.copied() as path:
        assert path.name == FILE
        return path.read_text()


def link(place, target):
    place.rename(place.with_name("away"))
    place.symlink_to(target)


def test_a_medium_is_sent_from_a_copy_that_is_gone_afterwards(run):
    assert sent(run) == "after 5"


@pytest.mark.parametrize("part", ["media", "media/eval", f"media/eval/{FILE}"])
def test_no_link_is_followed(run, secret, part):
    place = run.directory.path / part
    link(place, {"media": secret.parents[1], "eval": secret.parent}.get(place.name, secret))
    with pytest.raises(OSError, match=f"{place.name} is a symbolic link, which isn't followed"):
        sent(run)


@pytest.mark.parametrize("opened", ["", "media", "media/eval"])
def test_a_hard_link_is_refused_in_a_folder_that_others_can_write_to(run, secret, opened):
    place = run.directory.media / "eval" / FILE
    place.unlink()
    os.link(secret, place)
    assert sent(run) == "secret"  # of this user, who may save space
    (run.directory.path / opened).chmod(0o770)
    with pytest.raises(OSError, match="a hard link"):
        sent(run)


def test_a_pipe_is_refused_and_nobody_waits_for_it(run):
    place = run.directory.media / "eval" / FILE
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(OSError, match="not a regular file"):
        sent(run)


@pytest.mark.parametrize("name", ["media/../../home/eval", "/media/eval", "media/eval/.."])
def test_a_record_cannot_lead_out_of_the_run(run, secret, name):
    records = run.directory.media_records
    records.write_text(records.read_text().replace("media/eval", name))
    with pytest.raises((OSError, ValueError)):
        sent(run)


def test_other_records_are_not_read_through_a_link(run, secret):
    link(run.directory.metrics, secret)
    with pytest.raises(OSError, match=r"metrics\.jsonl is a symbolic link"):
        Rows(run.directory, -1).read()


@pytest.mark.parametrize("linked", ["sync", "sync/wandb_claims"])
def test_no_claim_is_made_behind_a_link(run, tmp_path, linked):
    """A sender removes what precedes its claim."""
    place, home = run.directory.path / linked, tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / "wandb_claims").mkdir()
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(home)
    with pytest.raises(OSError, match="symbolic link"):
        SenderClaim(run.directory, "wandb").acquire()
    assert sorted(path.name for path in home.iterdir()) == [".ssh", "wandb_claims"]


def test_a_configuration_that_is_a_link_is_one_line(run, secret, capsys):
    link(run.directory.config, secret)
    assert main(["sync", str(run.directory.path), "--service", "mlflow"]) == ExitCode.FAILED
    message = "config.yaml is a symbolic link, which isn't followed here; replace it by what it names"
    assert capsys.readouterr().err == f"hpctrain: error: {run.directory.config}: {message}\n"
