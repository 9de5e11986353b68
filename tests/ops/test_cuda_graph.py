"""Backends of graphs and of attention by device."""

from __future__ import annotations

import torch

from clearhead.ops.cuda_graph import graphs_for


def test_cpu_has_no_graphs():
    assert graphs_for(torch.device("cpu")) is None
