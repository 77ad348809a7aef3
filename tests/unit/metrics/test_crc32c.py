from __future__ import annotations

import random

import pytest

from hpctrain.metrics import crc32c


def test_checksums_of_the_rfc():
    assert crc32c.crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c.crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("size", [1, 255, 256, 257, 511, 512, 513, 4096, 5000, 70_001])
def test_large_data_have_the_checksum_that_a_loop_finds(size, monkeypatch):
    data = random.Random(size).randbytes(size)
    monkeypatch.setattr(crc32c, "_MIN_FAST_BYTES", 1)
    fast = crc32c.crc32c(data)
    monkeypatch.setattr(crc32c, "_MIN_FAST_BYTES", size + 1)
    assert crc32c.crc32c(data) == fast
