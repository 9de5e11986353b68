"""Row intervals and their kernel for CPUs match dense masks and the reference, also if data and lengths change."""

from __future__ import annotations

import pytest
import torch

from clearhead.attention import attend
from clearhead.attention.attend import choose, validate_inputs
from clearhead.attention.sparse.interval_choice import intervals_beat_sdpa
from clearhead.attention.sparse.interval_op import interval_attention, interval_attention_backward, interval_rows
from clearhead.attention.sparse.row_intervals import (
    ROW_INTERVALS,
    TESTED,
    RowIntervals,
    compute_row_intervals,
    encode,
    estimate_pairs,
    intervals_of,
)
from clearhead.masks import blocks, causal, documents, full, intervals, padding, prefix, window
from tests.support.attention_accuracy import forward_backward

CPU = torch.device("cpu")
N = 61


def contiguous_ids(n=N, batch=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (n,) if batch is None else (batch, n)
    return torch.randint(0, 9, size, generator=generator).eq(0).cumsum(-1)


def scattered_ids(n=N, seed=0):
    """Return ids of documents in several pieces; some positions have none."""
    return torch.randint(-1, 4, (n,), generator=torch.Generator().manual_seed(seed))


def random_bounds(*batch, seed=0):
    """Return start and stop of random intervals, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, N + 1, (2, *batch, N), generator=generator).sort(0).values


MASKS = {
    "documents": lambda: documents(contiguous_ids()),
    "documents of a batch": lambda: causal() & documents(contiguous_ids(batch=2)),
    "documents in pieces": lambda: causal() & documents(scattered_ids()),
    "documents with equal table entries": lambda: documents(contiguous_ids() * (1 << 40)) & window(9, 4),
    "documents and window": lambda: causal() & documents(contiguous_ids()) & window(7, 0),
    "prefix per document": lambda: causal() & documents(contiguous_ids()) | documents(scattered_ids()),
    "padding": lambda: padding(torch.tensor([20, 0])),
    "left padding": lambda: causal() & padding(torch.tensor([20, 30]), left_pad=torch.tensor([3, 31])),
    "padding of queries and keys": lambda: padding(torch.tensor([9, 50])) & padding(torch.tensor([30, 50])).T,
    "blocks": lambda: causal() & blocks(9) & documents(contiguous_ids()),
    "intervals": lambda: intervals(*random_bounds()),
    "monotone intervals": lambda: intervals(torch.arange(N) // 3, torch.arange(N) // 3 + 9),
    "intervals of a batch, causal": lambda: causal() & intervals(*random_bounds(2)),
    "intervals and documents in pieces": lambda: intervals(*random_bounds()) & documents(scattered_ids()),
    "two intervals": lambda: intervals(*random_bounds()) | intervals(*random_bounds(seed=3)) & window(9, 9),
    "sinks": lambda: causal() & documents(contiguous_ids()) & (window(4, 0) | prefix(3)),
}


@pytest.fixture(params=MASKS, ids=str)
def mask(request):
    return MASKS[request.param]()


@pytest.mark.parametrize(("T", "S", "query_offset"), [(N, N, 0), (17, 53, 31), (1, N, 60), (0, 5, 0), (5, 0, 0)])
def test_row_intervals_contain_visible_pairs(mask, T, S, query_offset):
    if "intervals" in str(mask):
        T, S, query_offset = N, N, 0  # their tensors have N rows
    conditions = encode(intervals_of(mask), CPU)
    rows = compute_row_intervals(conditions, T, S, query_offset, CPU)
    dense = mask.dense(T, S, query_offset=query_offset).reshape(rows.bounds.shape[0], T, S)
    for first, n, pairs in ((0, T, dense), (T, S, dense.mT)):
        low, high = rows.bounds[..., first : first + n].long().unbind(2)  # (P, R, n)
        is_tested = low >= TESTED
        column = torch.arange(pairs.shape[-1])
        inside = (column >= (low - TESTED * is_tested)[..., None]) & (column < high[..., None])
        untested = inside & ~is_tested[..., None]
        assert not bool((untested.any(1) & ~pairs).any())
        assert not bool((pairs & ~inside.any(1)).any())


def test_row_intervals_of_contiguous_documents_need_no_test():
    rows = compute_row_intervals(encode(intervals_of(documents(contiguous_ids())), CPU), N, N, 0, CPU)
    assert int(rows.bounds.max()) <= N


def random_inputs(seed=0, T=N, S=N):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, m, w, generator=generator) for n, m, w in ((4, T, 16), (2, S, 16), (2, S, 11))]


@pytest.mark.parametrize("bias", [None, (1, 4, N, N), (2, 1, 1, N)], ids=str)
def test_attend_over_row_intervals_matches_reference(mask, bias):
    inputs, cotangent = random_inputs(), torch.randn(2, 4, N, 11, generator=torch.Generator().manual_seed(1))
    added = None if bias is None else torch.randn(bias, generator=torch.Generator().manual_seed(2))
    assert isinstance(choose(validate_inputs(*inputs, mask, bias=added), "sparse").plan, RowIntervals)
    fast, exact = (
        forward_backward([x.to(dtype) for x in inputs], cotangent, impl, mask=mask, bias=added)
        for impl, dtype in (("sparse", torch.float32), ("reference", torch.float64))
    )
    for a, b in zip(fast, exact, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


def test_attend_over_row_intervals_with_five_dimensions_matches_reference():
    q = torch.randn(2, 3, 4, N, 8, generator=torch.Generator().manual_seed(0))
    mask = causal() & documents(contiguous_ids())
    torch.testing.assert_close(attend(q, q, q, mask, impl="sparse"), attend(q, q, q, mask, impl="reference"))


def test_attend_after_ids_change_in_place_matches_reference():
    ids, inputs = contiguous_ids(), random_inputs()
    mask = causal() & documents(ids)
    for seed in range(4):
        ids.copy_(contiguous_ids(seed=seed))
        out, expected = (attend(*inputs, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(out, expected)


def test_attend_after_ids_and_lengths_change_matches_reference():
    for seed, length in enumerate((N, 23, 131)):
        inputs = random_inputs(seed, length, length)
        mask = causal() & documents(contiguous_ids(length, batch=2, seed=seed))
        out, expected = (attend(*inputs, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(out, expected)


def test_attend_with_inference_tensor_of_ids_reads_them_at_every_call():
    inputs = random_inputs()
    with torch.inference_mode():
        ids = contiguous_ids()
        for seed in range(2):
            ids.copy_(contiguous_ids(seed=seed))
            out, expected = (attend(*inputs, documents(ids), impl=impl) for impl in ("sparse", "reference"))
            torch.testing.assert_close(out, expected)


def test_cached_row_intervals_distinguish_roles_of_a_tensor():
    lengths = torch.tensor([3, 5])
    inputs = [x[:, :, :2] for x in random_inputs()]
    for mask in (documents(lengths), padding(lengths), padding(lengths).T):
        out, expected = (attend(*inputs, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(out, expected)


def test_row_intervals_of_equal_calls_are_computed_once():
    mask = causal() & documents(contiguous_ids())
    arguments = intervals_of(mask), mask.versions, N, N, 0, CPU
    assert ROW_INTERVALS.get(*arguments) is ROW_INTERVALS.get(*arguments)


@pytest.mark.parametrize(
    "mask", [full(), causal(), causal() & window(9, 0), prefix(7).T, causal() | prefix(40)], ids=str
)
def test_estimated_pairs_are_near_the_count(mask):
    bounds = tuple(interval[:7] for interval in intervals_of(mask))
    estimate = estimate_pairs(bounds, 256, 256, 0)
    count = mask.count(256)
    assert 0.9 * count <= estimate <= 1.6 * count  # two intervals may overlap


@pytest.mark.parametrize("n", [4096, 65536])
@pytest.mark.parametrize("has_prefix", [False, True], ids=["documents", "documents with prefixes"])
def test_row_intervals_of_long_documents_are_predicted_to_beat_sdpa_on_a_gpu(n, has_prefix):
    ids = torch.arange(n) // 1024
    mask = causal() & documents(ids) | documents(ids) if has_prefix else causal() & documents(ids)
    x = torch.empty(1, 16, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)  # gets the rates of a GPU
    assert intervals_beat_sdpa(validate_inputs(x, x, x, mask), intervals_of(mask))


@pytest.mark.parametrize(
    "ids", [torch.zeros(0, 5, dtype=torch.long), torch.zeros(5, dtype=torch.long)], ids=["batch", "shared"]
)
@pytest.mark.parametrize("n_heads", [0, 2])
@pytest.mark.parametrize("impl", ["auto", "sparse", "reference"])
def test_attend_with_documents_of_an_empty_batch_returns_an_empty_output(ids, n_heads, impl):
    q, k, v = torch.randn(0, n_heads, 5, 7), torch.randn(0, 1, 5, 7), torch.randn(0, 1, 5, 3)
    assert attend(q, k, v, documents(ids), impl=impl).shape == (0, n_heads, 5, 3)


def compiled_attend(backend):
    """Return attend compiled as one graph over ids, for a backend."""

    def run(q, k, v, ids):
        return attend(q, k, v, causal() & documents(ids), impl="sparse")

    return torch.compile(run, fullgraph=True, backend=backend, dynamic=True)


@pytest.mark.compiled
def test_compiled_graph_reads_ids_at_every_call():
    compiled = compiled_attend("eager")
    for seed, length in enumerate((N, N, 53)):
        inputs = [x.requires_grad_() for x in random_inputs(seed, length, length)]
        ids = contiguous_ids(length, seed=seed)
        results = []
        for function in (compiled, lambda q, k, v, ids: attend(q, k, v, causal() & documents(ids), impl="reference")):
            out = function(*inputs, ids)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.compiled
def test_operators_pass_opcheck():
    mask = causal() & documents(contiguous_ids())
    conditions = encode(intervals_of(mask), CPU)
    q, k, v = (x.requires_grad_() for x in random_inputs())
    ids = conditions.tensors[0]
    arguments = (q, list(conditions.tensors), list(conditions.numbers), N, N, 0)
    torch.library.opcheck(interval_rows, arguments)
    bounds = interval_rows(*arguments)
    torch.library.opcheck(interval_attention, (q, k, v, None, bounds, ids, None, 0, 0.25))
    out, lse = (x.detach() for x in interval_attention(q, k, v, None, bounds, ids, None, 0, 0.25))
    tensors = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(
        interval_attention_backward, (torch.ones_like(out), *tensors, None, out, lse, bounds, ids, None, 0, 0.25)
    )
