from __future__ import annotations

import pytest
from kept_values import DTYPES, KEEPERS, require_own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.__name__)
def test_no_value_that_is_kept_shares_memory_with_a_weight(keeper, dtype):
    require_own(keeper, "cpu", dtype)
