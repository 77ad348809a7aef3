from __future__ import annotations

import pytest

from hpctrain.config.precision import FORMATS


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_where_a_precision_does_not_work_another_one_does(formats):
    assert FORMATS[formats.on_older_gpus].capability == (0, 0)
    for other in filter(None, (formats.faster, formats.without_nvidia, formats.on_cpu)):
        assert not FORMATS[other].without_nvidia
        assert not FORMATS[other].on_cpu


@pytest.mark.parametrize("formats", [formats for formats in FORMATS.values() if formats.has_half_weights])
def test_half_precision_weights_have_a_precision_that_computes_alike_by_autocast(formats):
    other = FORMATS[formats.by_autocast]
    assert (other.products, other.scales_loss) == (formats.products, formats.scales_loss)
    assert other.autocast == (formats.model or formats.copy)
    assert not other.has_half_weights
