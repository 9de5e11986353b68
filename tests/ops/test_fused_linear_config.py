"""The table of small-batch linear layers."""

from __future__ import annotations

import itertools

import pytest

from clearhead.ops.fused_linear_config import linear_config

H200 = "NVIDIA H200"
SHAPES = [(2304, 768), (768, 3072), (5632, 2048), (2048, 5632), (50257, 768), (100, 70_000), (16, 16)]


@pytest.mark.parametrize("device", [H200, "a device without measurements"])
@pytest.mark.parametrize("kind", ["plain", "normed", "gated"])
def test_every_shape_has_a_kernel_for_every_number_of_rows(device, kind):
    for R, (N, M) in itertools.product(range(1, 129), SHAPES):
        config = linear_config(device, R, N, M, kind)
        assert config.kernel != "rows" or R <= 4
        assert config.kernel != "resident" or (R <= 16 and M <= 1024)


def test_measured_shape_uses_its_own_entry():
    assert linear_config(H200, 8, 5632, 2048, "gated") == linear_config(H200, 5, 5600, 2100, "gated")
    assert linear_config(H200, 8, 768, 768, "plain") != linear_config(H200, 8, 768, 3072, "plain")
