"""Row intervals on a GPU: no synchronization, no compilation for new data or lengths, and correct CUDA-graph replays.

python3 -m pytest tests/attention/sparse/test_gpu_intervals.py -q -p no:cacheprovider"""

from __future__ import annotations

import random

import pytest
import torch

from clearhead.attention import attend
from clearhead.attention.sparse import interval_launch, triton_row_intervals
from clearhead.masks import causal, documents, padding, prefix, window

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; test_triton_intervals.py interprets the same kernels"
)

KERNELS = {
    "forward": interval_launch.FORWARD,
    "query": interval_launch.QUERY,
    "key": interval_launch.KEY,
    "document table": triton_row_intervals.DOCUMENT_TABLE,
    "row intervals": triton_row_intervals.ROW_INTERVALS,
} if torch.cuda.is_available() else {}  # fmt: skip
MASKS = {
    "documents": documents,
    "causal documents": lambda ids: causal() & documents(ids),
    "windows in documents": lambda ids: causal() & documents(ids) & window(100, 0),
    "prefix per document": lambda ids: causal() & documents(ids) | documents(torch.where(ids % 3 == 0, ids, -1)),
    "padding": lambda ids: causal() & padding(ids.amax(-1) * 50),
    "sinks": lambda ids: causal() & documents(ids) & (window(100, 0) | prefix(4)),
}


def random_ids(T, seed, batch=None):
    generator = torch.Generator().manual_seed(seed)
    size = (T,) if batch is None else (batch, T)
    return torch.randint(0, 150, size, generator=generator).eq(0).cumsum(-1).cuda()


def inputs_of(T, D=64, batch=1, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(T)
    return [
        torch.randn(batch, n, T, D, device="cuda", dtype=dtype, generator=generator, requires_grad=True)
        for n in (4, 2, 2)
    ]


def step(inputs, mask, impl="sparse"):
    out = attend(*inputs, mask, impl=impl)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def assert_close(fast, exact):
    for name, a, b in zip(("out", "dq", "dk", "dv"), fast, exact, strict=True):
        assert bool(a.isfinite().all()), name
        error = (a.double() - b.double()).abs().max().item()
        assert error <= 0.02 * b.abs().max().item(), (name, error)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", MASKS)
def test_attend_over_row_intervals_matches_reference(name, batch, D):
    T = 1031
    inputs, mask = inputs_of(T, D, batch or 1), MASKS[name](random_ids(T, 1, batch))
    exact = step([x.detach().float().requires_grad_() for x in inputs], mask, "reference")
    assert_close(step(inputs, mask), exact)


def test_attend_with_documents_in_pieces_matches_reference():
    T = 1031
    ids = torch.randint(-1, 4, (T,), generator=torch.Generator().manual_seed(1)).cuda()
    inputs, mask = inputs_of(T), causal() & documents(ids)
    exact = step([x.detach().float().requires_grad_() for x in inputs], mask, "reference")
    assert_close(step(inputs, mask), exact)


def test_attend_with_new_documents_does_not_synchronize():
    inputs = inputs_of(1031)
    layouts = [random_ids(1031, seed) for seed in range(4)]
    for name in MASKS:
        step(inputs, MASKS[name](layouts[0]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in layouts:
            for impl in ("sparse", "auto"):
                step(inputs, causal() & documents(ids), impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_attend_with_new_lengths_compiles_nothing():
    lengths = [random.Random(403).randint(500, 3000) for _ in range(50)]
    masks = [lambda ids: causal() & documents(ids), lambda ids: causal() & window(100, 0), lambda ids: window(70, 9)]
    for mask in masks:
        step(inputs_of(1031, batch=2), mask(random_ids(1031, 1)))
    before = {name: count_compiled(kernel) for name, kernel in KERNELS.items()}
    for seed, T in enumerate(lengths):
        for mask in masks:
            step(inputs_of(T, batch=1 + seed % 3), mask(random_ids(T, seed)))
    assert {name: count_compiled(kernel) for name, kernel in KERNELS.items()} == before
    assert all(before.values())


def count_compiled(kernel):
    """Return how many kernels Triton has compiled for a function."""
    caches = kernel.kernel.device_caches
    return sum(len(cache[0]) for cache in caches.values())


def test_captured_step_reads_documents_at_replay():
    T = 1031
    inputs, ids = inputs_of(T), random_ids(T, 0)
    for _ in range(2):
        step(inputs, causal() & documents(ids))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(inputs, causal() & documents(ids))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(inputs, causal() & documents(ids))
    for seed in range(20):
        ids.copy_(random_ids(T, seed))
        graph.replay()
        exact = step(
            [x.detach().float().requires_grad_() for x in inputs], causal() & documents(ids.clone()), "reference"
        )
        assert_close(results, exact)


def test_compiled_step_reads_documents_at_every_call():
    @torch.compile(fullgraph=True)
    def compiled(q, k, v, ids):
        return attend(q, k, v, causal() & documents(ids), impl="sparse")

    for seed, T in enumerate((1031, 1031, 777, 1200)):
        inputs, ids = inputs_of(T), random_ids(T, seed)
        out = compiled(*inputs, ids)
        fast = [out, *torch.autograd.grad(out.float().square().sum(), inputs)]
        exact = step([x.detach().float().requires_grad_() for x in inputs], causal() & documents(ids), "reference")
        assert_close(fast, exact)
