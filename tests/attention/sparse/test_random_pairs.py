"""The kernels that list random pairs agree with the hash and the mask, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CASES = [
    # length, keys per query, rows of a block, seed, condition
    (41, 4, 32, 1, None),
    (70, 3, 16, 7, "causal()"),
    (64, 5, 32, 2**31 - 1, "window(5, 5)"),
    (41, 4, 32, 1, "~window(3, 1) & ~every(5)"),
    (33, 1, 16, 0, "scattered(7, 2).T"),
    (19, 19, 16, 3, "causal()"),
]


def compare(T, per_row, M, seed, condition):
    """Return whether samples, and the lists of both sides of a leaf and of its transpose, match the mask."""
    import torch

    from clearhead.attention.sparse.block_index import RandomPairs
    from clearhead.attention.sparse.random_pairs import index_samples, sample
    from clearhead.masks import parse, scattered
    from tests.support.block_lists import dense

    leaf = scattered(per_row, seed)
    condition = None if condition is None else parse(condition)
    results = []
    for swapped in (False, True):
        samples = sample(RandomPairs(leaf, swapped, condition), T, torch.device("cpu"))
        results.append(torch.equal(samples.columns.long(), leaf.sampled_keys(torch.arange(T)[:, None], T)))
        mask = leaf.T if swapped else leaf
        expected = (mask if condition is None else mask & condition).dense(T)
        for by_key in (False, True):
            index = index_samples(samples, M, transposed=by_key != swapped)
            results.append(torch.equal(dense(index)[0], expected.T if by_key else expected))
    return all(results)


def compare_shared_plan():
    """Return whether plans of similar lengths share the pieces without random pairs, and compute the mask."""
    import torch

    from clearhead.attention import attend
    from clearhead.attention.sparse.plan import Blocking, plan
    from clearhead.masks import parse

    mask, blocking = parse("window(3, 1) | prefix(2).T | scattered(2, 1)"), Blocking(32, 32, None, False)
    plans = [plan(mask, T, blocking=blocking) for T in (67, 71)]
    is_shared = plans[0].query_pieces[0] is plans[1].query_pieces[0]
    has_random = [p.query_pieces[-1].block_tables is not None and p.key_pieces[-1].max_pairs for p in plans]
    errors = []
    for T in (67, 71):
        q, k, v = (torch.randn(1, 2, T, 16, requires_grad=True) for _ in range(3))
        outputs = []
        for impl in ("sparse", "reference"):
            out = attend(q, k, v, mask, impl=impl)
            outputs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        errors += [float((a - b).abs().max()) for a, b in zip(*outputs, strict=True)]
    return [is_shared, *map(bool, has_random), max(errors) < 1e-4]


@pytest.fixture(scope="module")
def results():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.attention.sparse.test_random_pairs"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_lists_of_random_pairs_match_mask(results, number):
    assert results["cases"][number]


def test_plans_of_similar_lengths_share_pieces_and_match_reference(results):
    assert results["shared"] == [True] * 4


if __name__ == "__main__":
    cases = [compare(*case) for case in CASES]
    print(json.dumps({"cases": cases, "shared": compare_shared_plan()}))
