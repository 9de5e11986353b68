"""Masks inside torch.compile: one graph, with fixed and with changing sizes, and masks made inside the graph."""

from __future__ import annotations

import pytest
import torch

from clearhead.masks import (
    allow,
    blocks,
    causal,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    prefix,
    scattered,
    window,
)

pytestmark = pytest.mark.compiled

STRUCTURE = causal() & (window(3, 0) | every(4)) | ~dilated(3).T & blocks(5) | prefix(2).T & full() | scattered(2, 7).T


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_dense_traces_whole(dynamic):
    def use(x, mask):
        return mask.dense(x.shape[0], x.shape[1], query_offset=3), mask.may_be_empty(
            x.shape[0], x.shape[1], query_offset=3
        )

    compiled = torch.compile(use, fullgraph=True, dynamic=dynamic, backend="eager")
    for mask in (STRUCTURE, scattered(3, 5)):
        for T, S in ((5, 11), (7, 13)):
            dense, empty = compiled(torch.zeros(T, S), mask)
            assert torch.equal(dense, mask.dense(T, S, query_offset=3))
            assert empty is mask.may_be_empty(T, S, query_offset=3)


never = ~full()  # `~` itself is not traced by torch.compile: such masks are made outside the graph


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_made_inside_the_graph(dynamic):
    def use(lengths, ids, table):
        S = ids.shape[-1]
        mask = causal() & padding(lengths) & documents(ids) | allow(table).T & forbid(table) | never
        return mask.dense(S, S), mask.allows(torch.arange(S)[:, None], torch.arange(S), keys=S)

    compiled = torch.compile(use, fullgraph=True, dynamic=dynamic, backend="eager")
    for B, S in ((2, 7), (3, 11)):
        arguments = torch.arange(B) + 3, torch.arange(B * S).reshape(B, S) // 4, torch.rand(B, 1, S, S) < 0.5
        dense, one_by_one = compiled(*arguments)
        expected, _ = use(*arguments)
        assert torch.equal(dense, expected)
        assert torch.equal(one_by_one, expected)


def test_generated_code_scatters_the_same():
    """The hash must survive a compiler that is free to reorder integer arithmetic."""
    compiled = torch.compile(lambda n: scattered(5, 2**31 - 1).dense(n, 101, query_offset=10**6), fullgraph=True)
    assert torch.equal(compiled(29), scattered(5, 2**31 - 1).dense(29, 101, query_offset=10**6))
