"""Values that are kept for later are copies, wherever the weights are."""

from __future__ import annotations

import pytest
import torch

from tests.support.kept_values import DTYPES, KEEPERS, require_own

pytestmark = [pytest.mark.gpu, pytest.mark.core]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_values_do_not_share_memory_with_weights(dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for keeper in KEEPERS:
        require_own(keeper, device, dtype)
