"""The Triton kernels compile for a GPU, as they are launched, on a machine without one.

The interpreter runs kernels as Python; the compiler is stricter about types and shapes, and knows the shared memory of
a thread block. So launches of real plans are intercepted, and the launched kernels are compiled for an H100."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clearhead.attention.sparse import kernel as gathered
from clearhead.attention.sparse import op
from clearhead.attention.sparse.launch import KernelInputs
from clearhead.attention.sparse.plan import plan
from clearhead.masks import allow, axis, blocks, causal, clamped, documents, every, intervals, prefix, scattered, window

pytest.importorskip("triton", reason="Triton is not installed")

from clearhead.attention.sparse import (
    interval_launch,
    triton_backward,
    triton_distance_lines,
    triton_forward,
    triton_random_pairs,
    triton_row_intervals,
)
from clearhead.attention.sparse.block_index import RandomPairs
from clearhead.attention.sparse.fast_launch import FastLaunch
from clearhead.attention.sparse.random_pairs import index_samples, sample
from clearhead.attention.sparse.row_intervals import (
    IntervalArguments,
    RowIntervals,
    encode,
    ids_of,
    intervals_of,
    row_intervals_torch,
)
from tests.support.kernel_compilation import (
    H100_REGISTERS,
    H100_SHARED_MEMORY,
    CompilingKernel,
    Resources,
)

pytestmark = pytest.mark.compiled  # the runtime type checker rewrites the source that Triton reads

T = 331
GRID = axis(clamped(3, 3), 0, grid=(-1, 16)) & axis(clamped(3, 3), 1, grid=(-1, 16))
KERNELS = {
    triton_forward: ("forward_kernel", "merge_partials_kernel", "prepare_kernel"),
    triton_backward: ("query_kernel", "key_kernel", "sum_partials_kernel"),
}


@pytest.fixture
def compiled_kernels(monkeypatch):
    launched: list[Resources] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, CompilingKernel(getattr(module, name), launched))
    lines = CompilingKernel(triton_distance_lines.DISTANCE_LINES.kernel, launched)
    monkeypatch.setattr(triton_distance_lines, "DISTANCE_LINES", FastLaunch(lines))
    return launched


@pytest.mark.parametrize(
    ("mask", "dtype", "D", "groups", "bias"),
    [
        (causal() & (window(70, 0) | every(32)), torch.bfloat16, 64, 2, None),
        (window(70, 9), torch.float16, 128, 1, torch.float32),
        (window(70, 9), torch.bfloat16, 64, 1, torch.bfloat16),
        (scattered(3, seed=1) | prefix(5).T, torch.float32, 16, 1, None),
        (window(9, 70), torch.bfloat16, 256, 1, torch.float32),
        (documents(torch.arange(2 * T).reshape(2, T) // 47) & causal(), torch.bfloat16, 64, 2, None),
        (allow(torch.arange(2 * T * T).reshape(2, T, T) % 7 == 0), torch.float16, 24, 2, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_kernels_compile_as_launched(compiled_kernels, mask, dtype, D, groups, bias):
    q, grad = (torch.randn(2, 2, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 2 // groups, T, D).to(dtype) for _ in range(2))
    added = None if bias is None else torch.randn(1, 2, T, T).to(bias)
    blocking = gathered.blocking_on(torch.device("cuda"), dtype, D, D, dense=False)
    mask_plan = plan(mask, T, blocking=blocking)
    out, lse = op.forward_triton(mask_plan, KernelInputs(q, k, v, added, 0.125))
    op.backward_triton(mask_plan, KernelInputs(q, k, v, added, 0.125), grad, out, lse)
    kernels = {kernel.kernel for kernel in compiled_kernels}
    assert {"forward_kernel", "prepare_kernel", "query_kernel", "key_kernel"} <= kernels
    assert max(kernel.shared for kernel in compiled_kernels) <= H100_SHARED_MEMORY


@pytest.mark.parametrize(
    ("mask", "dtype", "D", "options", "max_spilled"),
    [
        (causal() & (window(70, 0) | every(32)), torch.bfloat16, 64, {"has_distance": True}, 0),
        (GRID, torch.float16, 128, {"has_distance": True, "cap": 50.0}, 128),
        # Without a bias, the gradient of the keys spills 680 bytes.
        (GRID, torch.float32, 64, {"has_distance": True, "cap": 2.0}, 768),
    ],
    ids=["distance", "wide", "float32"],
)
def test_kernels_with_modified_scores_compile_as_launched(compiled_kernels, mask, dtype, D, options, max_spilled):
    q, grad = (torch.randn(2, 2, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 1, T, D).to(dtype) for _ in range(2))
    values = torch.randn(2, 2 * T) if options.get("has_distance") else None
    blocking = gathered.blocking_on(torch.device("cuda"), dtype, D, D, dense=False)
    mask_plan = plan(mask, T, blocking=blocking)
    inputs = KernelInputs(q, k, v, None, 0.125, values, options.get("cap", 0.0))
    out, lse = op.forward_triton(mask_plan, inputs)
    op.backward_triton(mask_plan, inputs, grad, out, lse, values is not None)
    kernels = {kernel.kernel for kernel in compiled_kernels}
    assert {"forward_kernel", "prepare_kernel", "query_kernel", "key_kernel"} <= kernels
    for kernel in compiled_kernels:
        assert kernel.shared <= H100_SHARED_MEMORY
        assert kernel.spilled <= max_spilled, kernel


@pytest.mark.parametrize(
    ("mask", "bias", "min_blocks"),
    [
        (window(128, 128) | every(64), None, 4),
        (causal() & (window(256, 0) | every(128)), None, 4),
        (window(256, 256), None, 4),
        (window(256, 256), torch.bfloat16, 3),
        (window(256, 256), torch.float32, 2),
        (scattered(3, seed=1), None, 3),
    ],
    ids=str,
)
def test_forward_kernel_fits_several_blocks_on_a_multiprocessor(compiled_kernels, mask, bias, min_blocks):
    """Several thread blocks fit on a multiprocessor, to hide the latency of loads, without spilled registers."""
    T = 1031  # enough for full tiles
    q, k, v = (torch.randn(1, 2, T, 64).bfloat16() for _ in range(3))
    blocking = gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 64, 64, dense=bias is None)
    added = None if bias is None else torch.randn(1, 1, T, T).to(bias)
    op.forward_triton(plan(mask, T, blocking=blocking), KernelInputs(q, k, v, added, 0.125))
    (kernel,) = (kernel for kernel in compiled_kernels if kernel.kernel == "forward_kernel")
    assert kernel.spilled == 0
    assert kernel.blocks_per_multiprocessor >= min_blocks


INTERVAL_KERNELS = {
    interval_launch: ("FORWARD", "QUERY", "KEY", "DISTANCE"),
    triton_row_intervals: ("DOCUMENT_TABLE", "ROW_INTERVALS"),
    triton_distance_lines: ("DISTANCE_LINES",),
}


def run_interval_kernels(mask, dtype, D, T, batch=2, bias=None, has_distance=False, cap=0.0):
    """Launch all kernels of row intervals for random data."""
    conditions = encode(intervals_of(mask), torch.device("cpu"))
    bounds = triton_row_intervals.launch_row_intervals(conditions, T, T, 0, torch.device("cpu"))
    rows = RowIntervals(bounds, ids_of(conditions.numbers, conditions.tensors), 0)
    q, grad = (torch.randn(batch, 2, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, 1, T, D).to(dtype) for _ in range(2))
    added = None if bias is None else torch.randn(1, 2, T, T).to(bias)
    values = torch.randn(2, 2 * T) if has_distance else None
    call = interval_launch.IntervalCall(IntervalArguments(q, k, v, added, rows, 0.125, values, cap))
    out, lse = interval_launch.interval_forward(call)
    interval_launch.interval_backward(call, grad, out, lse, has_distance)


@pytest.mark.parametrize(
    ("mask", "dtype", "D", "options", "max_spilled"),
    [
        (causal() & documents(torch.arange(T) // 47), torch.bfloat16, 64, {}, 128),
        (causal() | prefix(9), torch.float16, 128, {"bias": torch.float32}, 256),
        (causal(), torch.bfloat16, 64, {"has_distance": True}, 0),
        (causal(), torch.bfloat16, 128, {"has_distance": True, "cap": 50.0}, 0),
    ],
    ids=["documents", "union with bias", "distance", "distance and cap"],
)
def test_interval_kernels_compile_as_launched(monkeypatch, mask, dtype, D, options, max_spilled):
    compiled_kernels: list[Resources] = []
    for module, names in INTERVAL_KERNELS.items():
        for name in names:
            kernel = CompilingKernel(getattr(module, name).kernel, compiled_kernels)
            monkeypatch.setattr(module, name, FastLaunch(kernel))
    run_interval_kernels(mask, dtype, D, T, **options)
    kernels = {kernel.kernel for kernel in compiled_kernels}
    assert {
        "interval_forward_kernel",
        "interval_query_kernel",
        "interval_key_kernel",
        "row_intervals_kernel",
    } <= kernels
    assert ("interval_distance_kernel" in kernels) == options.get("has_distance", False)
    for kernel in compiled_kernels:
        assert kernel.shared <= H100_SHARED_MEMORY
        assert kernel.spilled <= max_spilled, kernel


def test_kernel_of_keys_compiles_with_intervals_per_query(monkeypatch):
    compiled_kernels: list[Resources] = []
    kernel = CompilingKernel(interval_launch.KEY.kernel, compiled_kernels)
    monkeypatch.setattr(interval_launch, "KEY", FastLaunch(kernel))
    row, cpu = torch.arange(T), torch.device("cpu")
    conditions = encode(intervals_of(intervals(row * 7 % T // 2, row * 7 % T)), cpu)
    bounds = row_intervals_torch(conditions.numbers, conditions.tensors, T, T, 0, cpu)
    q, k = torch.randn(2, 1, 2, T, 64, dtype=torch.bfloat16)
    rows = RowIntervals(bounds, (None,), 0, tests_by_query=True)
    call = interval_launch.IntervalCall(IntervalArguments(q, k, k, None, rows, 0.125))
    lse = torch.zeros(1, 2, T)
    strided = q, k, k, q, torch.empty_like(k), torch.empty_like(k)
    tensors = (*strided, lse, lse, call.bias, call.distance)
    call.launch(interval_launch.KEY, call.tiles.key, tensors, strided, True, extra=(True,))
    (resources,) = compiled_kernels
    assert resources.shared <= H100_SHARED_MEMORY
    assert resources.spilled <= 128, resources


class RecordingKernel:
    """Replaces a kernel: a launch records everything by which Triton selects a compiled kernel."""

    def __init__(self, kernel, selections):
        self.kernel, self.selections = kernel, selections

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        selection: list[object] = [self.kernel.__name__, *sorted(options.items())]
        for parameter, value in zip(self.kernel.params, args, strict=True):
            if isinstance(value, torch.Tensor):
                selection.append(value.dtype)
            elif parameter.is_constexpr or not (parameter.do_not_specialize or isinstance(value, float)):
                selection.append((parameter.name, value))
        self.selections.add(tuple(selection))


@pytest.mark.parametrize("modifies_scores", [False, True], ids=["documents", "bias and cap"])
def test_interval_kernels_are_not_compiled_again_for_new_sizes(monkeypatch, modifies_scores):
    """Length, batch and data change what a kernel computes, but not which compiled kernel runs."""
    selections: set[tuple[object, ...]] = set()
    for module, names in INTERVAL_KERNELS.items():
        for name in names:
            kernel = RecordingKernel(getattr(module, name).kernel, selections)
            monkeypatch.setattr(module, name, FastLaunch(kernel))
    generator = torch.Generator().manual_seed(403)
    for number in range(50):
        T = int(torch.randint(1, 700, (1,), generator=generator))
        ids = torch.randint(0, 50, (T,), generator=generator).eq(0).cumsum(-1)
        mask = causal() if modifies_scores else causal() & documents(ids)
        options = {"has_distance": True, "cap": 1.0 + number} if modifies_scores else {}
        run_interval_kernels(mask, torch.float32, 16, T, batch=1 + number % 3, **options)
    assert len(selections) == 5 + modifies_scores  # one per kernel


def test_large_blocks_fit_shared_memory_and_registers(compiled_kernels):
    """Twice the rows need twice the warps, within the available shared memory and registers."""
    q, k, v, grad = (torch.randn(1, 2, T, 128).bfloat16() for _ in range(4))
    blocking = gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 128, 128, dense=False)
    mask_plan = plan(blocks(256), T, blocking=replace(blocking, long_list_columns=100))
    assert (mask_plan.query_pieces[0].M, mask_plan.key_pieces[0].M) == (128, 128)
    out, lse = op.forward_triton(mask_plan, KernelInputs(q, k, v, None, 0.125))
    op.backward_triton(mask_plan, KernelInputs(q, k, v, None, 0.125), grad, out, lse)
    for kernel in compiled_kernels:
        assert kernel.shared <= H100_SHARED_MEMORY
        assert 256 * kernel.registers <= H100_REGISTERS
        assert kernel.spilled <= 128


@pytest.mark.parametrize("per_row", [3, 16])
def test_kernels_of_random_pairs_compile_as_launched(monkeypatch, per_row):
    compiled_kernels: list[Resources] = []
    for name in ("SAMPLE", "LIST_SAMPLES", "LIST_TRANSPOSED"):
        kernel = CompilingKernel(getattr(triton_random_pairs, name).kernel, compiled_kernels)
        monkeypatch.setattr(triton_random_pairs, name, FastLaunch(kernel))
    samples = sample(RandomPairs(scattered(per_row, seed=1), False, causal()), T, torch.device("cpu"))
    for transposed in (False, True):
        index_samples(samples._replace(columns=samples.columns * 0), 64, transposed=transposed)
    assert [kernel.kernel for kernel in compiled_kernels] == [
        "sample_kernel",
        "list_samples_kernel",
        "list_transposed_kernel",
    ]
    assert all(kernel.spilled == 0 for kernel in compiled_kernels)
