from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hpctrain.config.compose import Composer
from hpctrain.config.plain_yaml import parse_plain_config, read_plain_config, read_plain_values, to_yaml_text
from hpctrain.config.stored import load, to_yaml
from hpctrain.errors import ConfigError

KEYS = ("name", "run", "trainer.max_steps", "trainer.absent", "absent", "seed", "task")


@pytest.fixture
def read(tmp_path):
    def both(text, keys=KEYS):
        """A few keys as they are read alone, and from all of it."""
        path = tmp_path / "config.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        config = read_plain_config(path)
        expected = {}
        for key in keys:
            group, _, name = key.partition(".")
            inside = config.get(group) if name else config
            if isinstance(inside, dict) and (name or group) in inside:
                expected[key] = inside[name or group]
        return read_plain_values(path, keys), expected

    return both


def test_a_configuration_that_hpctrain_wrote(read):
    config = Composer().compose(["trainer.max_steps=500", "run_dir=/runs/a"])
    found, expected = read(to_yaml(config))
    assert found == expected
    assert (found["name"], found["trainer.max_steps"]) == ("digits", 500)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1",
        "text",
        "- 1\n- 2\n",
        "name: digits",
        "name: null\ntrainer: null\n",
        "name: yes\ntrainer: {max_steps: 460}\n",
        "name: 2026-01-31\ntrainer:\n  max_steps: 010\n",
        "name: 'it''s'\ntrainer:\n  max_steps: 1_000\n  precise: true\n",
        "name: long\n  name\ntrainer:\n  max_steps:\n    5\n",
        "name: &a x\nseed: *a\ntrainer:\n  max_steps: 5\n",
        "seed: &a 7\ntrainer:\n  max_steps: *a\n",
        "name: a\nname: b\n",
        "name: a # so\n# max_steps: 3\ntrainer:\n  other:\n    max_steps: 4\n",
        "trainer:\n  note: |\n    x\n  max_steps: 4\n  last:\n  - max_steps\n",
        "name: long\nargs: {lr: 0.1}\nrun: {command: [python, train.py, 'a b']}\n",
        "run:\n  command:\n  - python\n  - 'a b'\n\nname: x\n",
        "---\nname: x\n",
        "name: x\n---\nname: y\n",
        "task:\n- 1\n-2\n",
        "name: x\r\ntrainer:\r\n  max_steps: 3\r\n",
        "name: tr\u00e4ge\n",
        b"name: \xff\n",
        "name: x\n".encode("utf-16"),
    ],
)
def test_other_texts_are_read_alike(read, text):
    found, expected = read(text)
    assert found == expected


def test_a_file_that_is_missing(tmp_path):
    assert read_plain_values(tmp_path / "config.yaml", KEYS) == {}


LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    "text", ["name: &x [*x]\n", LAUGHS, "name: " + "[" * 50_000, "name: x\n" + "y: &y\n  z: [*y]\n", "name: \xff"]
)
def test_yaml_that_would_fill_the_memory_is_not_read(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="latin-1")
    assert read_plain_config(path) == {}
    assert read_plain_values(path, ["name", "h"]) == {}
    with pytest.raises(ConfigError, match=r"configuration=.*config"):
        load(path)


def test_a_pipe_in_place_of_a_configuration_is_not_waited_for(tmp_path):
    path = tmp_path / "config.yaml"
    os.mkfifo(path)
    assert read_plain_config(path) == {}
    with pytest.raises(ConfigError, match="not a regular file"):
        load(path)


def test_an_anchor_that_is_used_a_few_times_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("name: &n x\ngroup:\n  again: *n\n")
    assert read_plain_config(path) == {"name": "x", "group": {"again": "x"}}
    assert read_plain_values(path, ["group.again"]) == {"group.again": "x"}


def test_what_json_lacks_is_text_or_a_list():
    text = "a: 2026-01-31\nb: !!binary aGk=\nc: !!set {x, y}\nd: !!timestamp 2026-01-31\n2026-01-31: 1\n"
    config = parse_plain_config(text.encode(), Path())
    assert json.loads(json.dumps(config)) == config
    assert config == {"a": "2026-01-31", "b": "aGk=", "c": ["x", "y"], "d": "2026-01-31", "2026-01-31": 1}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
@example("1e-3")
@example("1_000")
@example("inf")
@example("on")
@example("2026-01-31")
@example("🙂\n")
def test_omegaconf_reads_what_was_written(value):
    text = to_yaml_text({"key": {"name": value}})
    loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    assert loaded == {"key": {"name": value}}
