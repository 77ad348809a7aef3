from __future__ import annotations

import pytest

from tests.support.kept_values import DTYPES, KEEPERS, require_own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.__name__)
def test_stored_values_do_not_share_memory_with_weights(keeper, dtype):
    require_own(keeper, "cpu", dtype)
