from __future__ import annotations

import pytest

from hpctrain.config.hooks import not_a_hook


@pytest.mark.parametrize("method", ["load_state", "get_state_dict", "save_state", "load_dict", "stop", "_on_epoch"])
def test_methods_of_ones_own_are_accepted(method):
    assert not_a_hook("callbacks.own", "own.Own", method) is None


@pytest.mark.parametrize("method", ["aftr_step", "on_epoch_end", "load_state_dic", "state_dct", "before_epoch"])
def test_what_is_almost_a_hook_is_refused(method):
    assert f"has {method}, which is not a hook" in str(not_a_hook("callbacks.own", "own.Own", method))
