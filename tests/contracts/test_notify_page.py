"""The commands of docs/how_to/notify.md do what the page says: with other programs in place of mail, curl and ssh."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from hpctrain.attempt.notification import Notifier
from hpctrain.attempt.outcome import Outcome
from hpctrain.config.compose import Composer
from hpctrain.config.notify import EVENTS, Notify
from hpctrain.config.root import RunConfig
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "notify.md").read_text()
EXAMPLES = dict(re.findall(r"^```yaml conf/notify/(\w+)\.yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
QUOTED = '\\n it\'s "q" $HOME `id`'
"""What a shell or JSON would change, if it got the chance."""
MESSAGE = f"failed after step 3: {QUOTED}; the run ends here"


@pytest.fixture
def notify(tmp_path):
    """Notifies by a command, in a home of its own, of the end of a run with a message that is hard to quote."""
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mail", "curl", "ssh", "notify-send"):
        keeps = f'printf "%s\\n" "$@" > {tmp_path}/{name}.words; cat > {tmp_path}/{name}.input'
        (programs / name).write_text(f"#!/bin/sh\n{keeps}\n")
        (programs / name).chmod(0o755)
    # the other machine's shell
    (programs / "ssh").write_text('#!/bin/sh\nexec sh -c "$4"\n')
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def end(settings: Notify) -> None:
        notifier = Notifier(directory, RunConfig(name="gpt", notify=settings), environ, "16")
        notifier.ended(1, Outcome(Reason.FAILED, 3, QUOTED))
        notifier.finish()
        assert directory.notify_log.read_text() == ""

    return end


@pytest.fixture
def example(tmp_path):
    """Composes a file of the page, as the words of the page do."""
    folder = tmp_path / "conf" / "notify"
    folder.mkdir(parents=True)
    for name, text in EXAMPLES.items():
        (folder / f"{name}.yaml").write_text(text)

    def compose(name: str) -> Notify:
        assert f"python -m hpctrain notify={name}\n" in PAGE
        return Composer(str(tmp_path / "conf")).compose([f"notify={name}"]).notify

    return compose


def test_the_mail(notify, example, tmp_path):
    notify(example("mail"))
    assert (tmp_path / "mail.words").read_text().splitlines() == ["-s", "gpt: failed", "me@example.org"]
    assert (tmp_path / "mail.input").read_text().startswith(MESSAGE)


def test_slack(notify, example, tmp_path):
    notify(example("slack"))
    posted = json.loads((tmp_path / "curl.input").read_text())
    assert list(posted) == ["text"]
    assert posted["text"].startswith(f"gpt: {MESSAGE}")
    assert f"{tmp_path}/.slack_webhook" in (tmp_path / "curl.words").read_text().splitlines()


def test_the_desktop(notify, example, tmp_path):
    notify(example("desktop"))
    title, message = (tmp_path / "notify-send.words").read_text().splitlines()
    assert title == "hpctrain"
    assert message.startswith(MESSAGE)


def test_the_file(notify, tmp_path):
    (typed,) = re.findall(r"^python -m hpctrain (notify\.command=.*)$", PAGE, re.MULTILINE)
    (word,) = shlex.split(typed)
    notify(Notify(command=word.partition("=")[2]))
    (found,) = tmp_path.glob("runs-*.jsonl")
    assert json.loads(found.read_text())["message"].startswith(MESSAGE)


def test_the_object_has_the_fields_and_events_of_the_page(notify, tmp_path):
    notify(Notify(command="cat > ~/one"))
    shown = json.loads(re.search(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1])
    assert list(shown) == list(json.loads((tmp_path / "one").read_text()))
    rows = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert rows == {*shown, *EVENTS}
