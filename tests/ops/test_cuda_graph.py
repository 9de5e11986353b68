"""Backends of graphs and of attention by device."""

from __future__ import annotations

import torch

from clearhead.ops.cuda_graph import graphs_for, sdpa_without_cudnn


def test_cpu_has_no_graphs():
    assert graphs_for(torch.device("cpu")) is None


def test_sdpa_without_cudnn_excludes_cudnn_inside_the_block_only():
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with sdpa_without_cudnn():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    with sdpa_without_cudnn(enabled=False):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
