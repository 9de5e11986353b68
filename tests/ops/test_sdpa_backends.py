"""cuDNN's attention, which prepares a plan for each size, is excluded for sizes that do not recur."""

from __future__ import annotations

import pytest
import torch

from clearhead._core.caches import clear_caches
from clearhead.ops import sdpa_backends
from clearhead.ops.sdpa_backends import (
    CALLS_BEFORE_CUDNN,
    WithoutCuDNN,
    fixed_sizes,
    is_rare_size,
    sdpa_without_cudnn,
)


@pytest.fixture(autouse=True)
def no_counts():
    clear_caches()
    yield
    clear_caches()


def test_sdpa_without_cudnn_excludes_cudnn_inside_the_block_only():
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with sdpa_without_cudnn():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    with sdpa_without_cudnn(enabled=False):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_size_is_rare_until_it_recurs():
    assert all(is_rare_size((1, 16, 512)) for _ in range(CALLS_BEFORE_CUDNN))
    assert not is_rare_size((1, 16, 512))
    assert is_rare_size((1, 16, 513))
    assert not is_rare_size((1, 16, 512))


def test_fixed_sizes_are_never_rare():
    with fixed_sizes():
        assert not is_rare_size((1, 16, 512))
    assert is_rare_size((1, 16, 512))


def test_new_size_at_every_step_keeps_a_bounded_number_of_counts(monkeypatch):
    monkeypatch.setattr(sdpa_backends, "MAX_SIZES", 8)
    assert all(is_rare_size(size) for size in range(50))
    assert len(sdpa_backends._CALLS) <= 8


@pytest.mark.parametrize("was_enabled", [True, False])
def test_without_cudnn_restores_the_setting_after_an_error(was_enabled):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(was_enabled)
    try:
        with pytest.raises(AssertionError), WithoutCuDNN():
            assert torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
