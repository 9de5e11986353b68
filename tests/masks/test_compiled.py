"""Masks under torch.compile: a single graph, static and dynamic sizes, and masks built inside the graph."""

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
def _reset_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_dense_compiles_to_a_single_graph(dynamic):
    def evaluate(x, mask):
        return mask.dense(x.shape[0], x.shape[1], query_offset=3), mask.may_be_empty(
            x.shape[0], x.shape[1], query_offset=3
        )

    compiled = torch.compile(evaluate, fullgraph=True, dynamic=dynamic, backend="eager")
    for mask in (STRUCTURE, scattered(3, 5)):
        for T, S in ((5, 11), (7, 13)):
            dense, empty = compiled(torch.zeros(T, S), mask)
            assert torch.equal(dense, mask.dense(T, S, query_offset=3))
            assert empty is mask.may_be_empty(T, S, query_offset=3)


nothing = ~full()  # `~` itself is not traced by torch.compile: such masks are made outside the graph


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_built_inside_the_graph_match_eager(dynamic):
    def evaluate(lengths, ids, table):
        S = ids.shape[-1]
        mask = causal() & padding(lengths) & documents(ids) | allow(table).T & forbid(table) | nothing
        return mask.dense(S, S), mask.allows(torch.arange(S)[:, None], torch.arange(S), keys=S)

    compiled = torch.compile(evaluate, fullgraph=True, dynamic=dynamic, backend="eager")
    for B, S in ((2, 7), (3, 11)):
        arguments = torch.arange(B) + 3, torch.arange(B * S).reshape(B, S) // 4, torch.rand(B, 1, S, S) < 0.5
        dense, by_pair = compiled(*arguments)
        expected, _ = evaluate(*arguments)
        assert torch.equal(dense, expected)
        assert torch.equal(by_pair, expected)


def test_scattered_compiled_equals_eager():
    """The hash must not change when the compiler reorders integer arithmetic."""
    compiled = torch.compile(lambda n: scattered(5, 2**31 - 1).dense(n, 101, query_offset=10**6), fullgraph=True)
    assert torch.equal(compiled(29), scattered(5, 2**31 - 1).dense(29, 101, query_offset=10**6))
