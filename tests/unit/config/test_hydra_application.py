from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError

PACKAGE = Path(__file__).parents[3] / "hpctrain"


@pytest.mark.parametrize(("method", "arguments"), [("no_such_method", {}), ("show_info", {"no_such_argument": 1})])
def test_a_release_that_lacks_a_feature_is_named(method, arguments):
    with pytest.raises(ConfigError, match=r"^hydra-core=1\.\d.*: has no --info .*; pip install hydra-core"):
        Composer().application.call("--info", method, **arguments)


def test_no_private_module_of_hydra_or_omegaconf_is_imported():
    private = re.compile(r"^\s*(from|import) (hydra|omegaconf)[\w.]*\._", re.MULTILINE)
    assert private.search("    from hydra._internal.utils import x")
    assert [path for path in PACKAGE.rglob("*.py") if private.search(path.read_text())] == []
