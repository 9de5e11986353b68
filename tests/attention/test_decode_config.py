"""The table of sizes of the decode kernel."""

from __future__ import annotations

import itertools

import pytest

from clearhead.attention.decode_config import decode_config

H200 = "NVIDIA H200"


@pytest.mark.parametrize("device", [H200, "a device without measurements"])
def test_decode_config_exists_for_every_size(device):
    for pairs, G, D, S in itertools.product((1, 12, 4096), (1, 16, 32), (16, 64, 128, 256), (1, 300, 100_000)):
        config = decode_config(device, pairs, G, D, S)
        assert config.block * D <= 64 * 32 * config.warps * max(1, D // 64)
        assert config.warps > 1 or G == 1


def test_decode_config_depends_on_capacity():
    assert decode_config(H200, 4, 16, 64, 256) != decode_config(H200, 64, 16, 64, 16_384)
