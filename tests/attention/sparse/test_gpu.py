"""The Triton kernels on a GPU match the float64 reference, forward and backward, for every kind of mask and shape.

    python3 -m pytest tests/attention/sparse/test_gpu.py -q -p no:cacheprovider

Compiling kernels takes nearly all of the time, so the cases are distributed over processes, slowest compilations first,
while torch.compile runs too. The tolerance is that of `test_triton.py`: at most twice the error of the reference in the
same dtype, plus two rounding errors of the largest entry."""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from clearhead.attention import attend
from clearhead.attention.attend import Impl
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel
from clearhead.attention.sparse.plan import Plan
from clearhead.masks import (
    Full,
    Mask,
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
from clearhead.masks.catalogue import CATALOGUE, neighborhood
from clearhead.nn.positions import ALiBi, RelativeBias
from tests.support.attention_accuracy import forward_backward
from tests.support.rounding import kernel_rounding

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA GPU; test_triton.py runs the same kernels in Triton's interpreter",
)

WORKERS = os.cpu_count() or 1
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One call: a mask (or the name of a mask of random data), (B, H, K, T, S, D, E), and options."""

    mask: Mask | str
    shape: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = BRAIN
    query_offset: int = 0
    bias: str | None = None
    deterministic: bool = False
    temperature: float = 1.0
    way: Impl = "sparse"

    def __str__(self) -> str:
        extra = f" + {self.bias}" * (self.bias is not None) + " twice" * self.deterministic
        extra += f" / {self.temperature}" * (self.temperature != 1.0) + f" {self.way}" * (self.way != "sparse")
        return f"{self.mask}{extra} {self.shape} {str(self.dtype).removeprefix('torch.')}"


def square(T: int, D: int = 64) -> tuple[int, int, int, int, int, int, int]:
    return (1, 2, 1, T, T, D, D)


LANDMARKS = causal() & (window(40, 0) | every(32))
LEAVES = [
    causal(),
    window(9, 5),
    window(70, 70),
    every(7),
    every(32, start=5),
    dilated(3),
    dilated(8),
    prefix(40),
    prefix(150),
    blocks(48),
    scattered(5, seed=2),
]
SHAPES = [  # (shape, offset): no size is a multiple of anything, and T and S differ in both directions
    ((1, 2, 1, 397, 397, 64, 64), 0),
    ((2, 4, 2, 131, 523, 64, 64), 203),
    ((1, 3, 3, 523, 257, 64, 64), 31),
    ((1, 2, 2, 67, 67, 24, 40), 0),
]


def expression(random_: random.Random, depth: int) -> Mask:
    if depth == 0 or random_.random() < 0.2:
        return random_.choice(LEAVES)
    kind = random_.randrange(5)
    mask = expression(random_, depth - 1)
    if kind == 0:
        return ~mask
    if kind == 1:
        return mask.T
    other = expression(random_, depth - 1)
    return mask & other if kind == 2 else mask | other


def expressions(count: int) -> list[Case]:
    """Random expressions, the same in every process."""
    random_ = random.Random(403)
    cases: list[Case] = []
    while len(cases) < count:
        mask = expression(random_, 3)
        if isinstance(mask, Full):
            continue
        shape, query_offset = SHAPES[len(cases) % len(SHAPES)]
        cases.append(Case(mask, shape, (BRAIN, HALF, SINGLE)[len(cases) // 4 % 3], query_offset))
    return cases


DENSE_LENGTH = 4 * kernel.DENSE_MULTIPLE
"""A length with a dense piece."""
DIFFERENCES = (1, 2)  # the gradients of q and k, after the output
CASES = [
    *(Case(pattern.mask(1021), square(1021)) for pattern in CATALOGUE),
    *(Case(LANDMARKS, square(331, D), dtype) for D in (16, 32, 64, 128, 256) for dtype in (HALF, BRAIN, SINGLE)),
    # Enough columns that every query sees for a dense call in addition to the sparse one; and the causal triangle.
    *(
        Case(mask, (1, 4, 2, DENSE_LENGTH, DENSE_LENGTH, D, D), dtype)
        for mask in (window(2, 2) | every(4), causal() | prefix(301))
        for D, dtype in ((64, BRAIN), (128, HALF))
    ),
    Case(LANDMARKS, (1, 2, 1, 331, 331, 5, 11), SINGLE),
    Case(window(9, 5) | every(7), (1, 2, 2, 331, 331, 80, 48), HALF),
    *(
        Case(mask, (2, 4, 2, 397, 397, 64, 64), dtype, bias=bias)
        for bias, dtype in (("ALiBi", BRAIN), ("RelativeBias", SINGLE), ("row", HALF))
        for mask in (LANDMARKS, window(2, 2) | every(4))
    ),
    # A bias that half precision would round: given in float32, or divided by a temperature.
    *(
        Case("padding alone", (2, 2, 2, 1025, 1025, 32, 32), HALF, bias="large row", way=way)
        for way in ("auto", "sdpa", "sparse")
    ),
    *(
        Case(causal() & window(32, 0), square(1024, 32), BRAIN, bias="large", temperature=0.3, way=way)
        for way in ("auto", "sdpa", "sparse")
    ),
    *(Case(mask, (1, 4, 2, 1031, 1031, 64, 64), bias="ALiBi", way="auto") for mask in (causal(), full())),
    Case(full(), (1, 2, 2, 397, 397, 64, 64), bias="ALiBi", way="sparse"),
    *(Case(name, (2, 4, 2, 397, 397, 64, 64)) for name in ("padding", "documents", "allow by batch", "forbid by head")),
    Case(window(3, 0) & every(16), square(331), SINGLE),  # most rows see nothing
    Case(~full(), square(331)),
    Case(window(2, 2), (1, 1, 1, 1, 1, 64, 64)),
    Case(causal() & (window(9, 0) | every(3)), square(2053), deterministic=True),
    Case(window(2, 2) | every(4), (1, 4, 2, 4099, 4099, 64, 64), deterministic=True),
    # Whole grids, whose tables are computed on the device.
    Case(neighborhood((24, 40), 7), square(960)),
    Case(neighborhood((6, 10, 12), 5), square(720), HALF),
    # Lists long enough for larger blocks.
    Case(blocks(6000), (1, 2, 1, 9001, 9001, 128, 128)),
    Case(causal() & blocks(9000), (1, 1, 1, 9001, 9001, 96, 128), HALF, deterministic=True),
    *expressions(40),
]


def mask_of(case: Case) -> Mask:
    if isinstance(case.mask, Mask):
        return case.mask
    B, H, _, T, S, _, _ = case.shape
    generator = torch.Generator().manual_seed(5)
    if case.mask == "padding alone":
        return padding([T // 3, T])
    if case.mask == "padding":
        return causal() & padding([T // 3, T], left_pad=[11, 0])
    if case.mask == "documents":
        return documents((torch.rand(B, T, generator=generator) < 0.02).cumsum(-1))
    size = (B, 1, T, S) if case.mask == "allow by batch" else (H, T, S)
    allowed = torch.rand(size, generator=generator) < 0.1
    return allow(allowed) if case.mask == "allow by batch" else forbid(~allowed)


def bias_of(case: Case, device: str) -> torch.Tensor | None:
    if case.bias is None:
        return None
    B, H, _, T, S, _, _ = case.shape
    if case.bias == "large row":
        return 10 * torch.randn(B, H, 1, S, generator=torch.Generator().manual_seed(6)).to(device)
    if case.bias == "large":
        return 10 * torch.randn(H, T, S, generator=torch.Generator().manual_seed(6)).to(device, case.dtype)
    if case.bias == "row":
        return torch.randn(H, 1, S, generator=torch.Generator().manual_seed(6)).to(device)
    torch.manual_seed(7)
    module = (ALiBi() if case.bias == "ALiBi" else RelativeBias()).build(H).to(device)
    with torch.no_grad():
        return module(T, S, case.query_offset, device).dense()


def errors(case: Case, device: str) -> list[dict[str, float]]:
    """Return, for out, dq, dk, dv, the errors of the case and of the reference, and the rounding tolerance."""
    B, H, K, T, S, D, E = case.shape
    generator = torch.Generator().manual_seed(T + S + D)
    *inputs, cotangent = (
        torch.randn(size, generator=generator).to(device, case.dtype)
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E), (B, H, T, E))
    )
    bias = bias_of(case, device)
    arguments = {"mask": mask_of(case), "query_offset": case.query_offset, "normalizer": Softmax(case.temperature)}
    wide = None if bias is None else bias.double()
    exact = forward_backward([x.double() for x in inputs], cotangent, "reference", bias=wide, **arguments)
    plain = forward_backward(inputs, cotangent, "reference", bias=bias, **arguments)
    torch.use_deterministic_algorithms(case.deterministic)
    fast = forward_backward(inputs, cotangent, case.way, bias=bias, **arguments)
    again = fast
    if case.deterministic:
        again = forward_backward(inputs, cotangent, case.way, bias=bias, **arguments)
    torch.use_deterministic_algorithms(False)
    largest = max(e.abs().max().item() for e in exact)
    return [
        {
            "finite": bool(f.isfinite().all()),
            "same": torch.equal(f, a),
            "fast": (f.double() - e).abs().max().item(),
            "plain": (p.double() - e).abs().max().item(),
            "rounding": kernel_rounding(e.abs().max().item(), largest, case.dtype, E, is_difference=i in DIFFERENCES),
        }
        for i, (f, a, p, e) in enumerate(zip(fast, again, plain, exact, strict=True))
    ]


def run(number: int) -> list[dict[str, float]] | str:
    """Run a case in a worker process; return the traceback of a failure as text."""
    torch.set_num_threads(1)
    try:
        return errors(CASES[number], "cuda")
    except Exception:
        return traceback.format_exc()


def compile_cost(case: Case) -> tuple[bool, int, int]:
    """Return a sort key of compile time: float32 without tensor cores is slowest, then width and length."""
    T, _, D, E = case.shape[3:]
    return case.dtype == SINGLE, max(D, E), T


@pytest.fixture(scope="module")
def results():
    """Yield a future per case, all submitted."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        order = sorted(range(len(CASES)), key=lambda number: compile_cost(CASES[number]), reverse=True)
        futures = {number: pool.submit(run, number) for number in order}
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.usefixtures("results")  # computed at the same time
@pytest.mark.compiled
def test_compiled_single_graph_matches_eager_with_backward():
    q, k, v = (torch.randn(1, 2, 1031, 64, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
    mask = window(9, 5) | every(32)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, mask, impl="sparse").float().square()

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    results = []
    for way in (compiled, step):
        out = way(q, k, v)
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_error_is_at_most_twice_the_reference(results, number):
    rows = results[number].result()
    assert not isinstance(rows, str), rows
    for name, row in zip(("out", "dq", "dk", "dv"), rows, strict=True):
        assert row["finite"], name
        assert row["same"], f"{name} differs from one run to the next"
        assert row["fast"] <= 2 * row["plain"] + row["rounding"], (name, row)


@pytest.mark.parametrize("alone", [False, True], ids=["with the queries", "alone"])
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_learned_float32_bias_gradient_matches_reference(dtype, alone):
    """The Triton kernels have none for it: the fused kernel computes such a call in float32. Where the bias alone
    learns, that kernel keeps nothing for it, and the reference is left."""
    generator = torch.Generator().manual_seed(8)
    q, k, v, grad = (torch.randn(2, n, 131, 32, generator=generator).to("cuda", dtype) for n in (4, 2, 2, 4))
    bias = torch.randn(4, 131, 131, generator=generator).cuda()

    def gradient(impl: str, wide: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
        learned = bias.to(wide, copy=True).requires_grad_()
        inputs = tuple(x.detach().requires_grad_(not alone) for x in inputs)
        attend(*inputs, causal(), bias=learned, impl=impl).backward(grad.to(inputs[0].dtype))
        return learned.grad

    exact = gradient("reference", torch.float64, q.double(), k.double(), v.double())
    plain, fast = ((gradient(impl, SINGLE, q, k, v) - exact).abs().max().item() for impl in ("reference", "auto"))
    assert fast <= 2 * plain + 2 * torch.finfo(dtype).eps * exact.abs().max().item()


def plan_of(case: Case) -> Plan:
    B, H, K, T, S, D, E = case.shape
    q, k, v = (
        torch.empty(size, dtype=case.dtype, device="cuda") for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    )
    return kernel.plan_for(AttentionInputs(q, k, v, mask_of(case), ScaledDot(), Softmax(), None, 0))


@pytest.mark.parametrize("impl", ["sparse", "sdpa"])
@pytest.mark.parametrize("size", [1e30, torch.finfo(SINGLE).min], ids=["1e30", "least"])
def test_huge_bias_gives_the_largest_score_weight_one(size, impl):
    """A product and a sum in one rounding step would be off by more than an exponent holds."""
    q, k, v = (torch.randn(1, 1, 70, 16, device="cuda", requires_grad=True) for _ in range(3))
    bias = torch.full((70, 70), -abs(size), device="cuda")
    bias.fill_diagonal_(size)
    out = attend(q, k, v, mask=causal(), bias=bias, impl=impl)
    out.sum().backward()
    if size > 0:
        torch.testing.assert_close(out, v)
        torch.testing.assert_close(v.grad, torch.ones_like(v))
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("size", [1e8, 1e30, -1e30])
def test_gradients_with_large_bias_are_finite(size):
    q, k, v = (torch.randn(2, 1, 5, 32, device="cuda", requires_grad=True) for _ in range(3))
    for keys in (1, 5):
        bias = size * (1 + torch.rand(1, 1, 1, keys, device="cuda"))
        out = attend(q, k[:, :, :keys], v[:, :, :keys], bias=bias)
        out.sum().backward()
        assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 3, 1), (1, 2, 1, 1)], ids=str)
def test_bias_constant_over_keys_matches_reference(shape):
    q, k, v = (torch.randn(1, 2, 3, 4, device="cuda") for _ in range(3))
    bias = torch.randn(shape, device="cuda", requires_grad=True)
    q.requires_grad_()
    actual, expected = (attend(q, k, v, bias=bias, impl=impl) for impl in ("auto", "reference"))
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_mask_hides_keys_at_extreme_scores(dtype):
    """The visible key scores less than a hidden one by more than 65,504."""
    q = torch.full((1, 1, 1, 16), 30.0, device="cuda", dtype=dtype)
    k = torch.cat((q, -q), dim=-2)
    v = torch.arange(16.0, device="cuda", dtype=dtype).view(1, 1, 2, 8)
    out = attend(q, k, v, every(1, start=1), normalizer=Softmax(temperature=0.01))
    torch.testing.assert_close(out, v[:, :, 1:])


def test_values_of_width_zero_give_zero_gradients():
    q, k = (torch.randn(1, 1, 2, 8, device="cuda", dtype=HALF, requires_grad=True) for _ in range(2))
    v = torch.zeros(1, 1, 2, 0, device="cuda", dtype=HALF, requires_grad=True)
    attend(q, k, v).sum().backward()
    assert v.grad.shape == v.shape
    assert not q.grad.any()


def test_dense_cases_have_a_dense_piece():
    """Otherwise the cases above would not test merging."""
    plans = [plan_of(case) for case in CASES if case.shape[3] == DENSE_LENGTH]
    assert len(plans) == 4
    assert all(mask_plan.has_dense_causal or mask_plan.dense_columns is not None for mask_plan in plans)


def test_long_cases_have_large_blocks():
    plans = [plan_of(case) for case in CASES if case.shape[3] == 9001]
    assert [lists.M for mask_plan in plans for lists in (*mask_plan.query_pieces, *mask_plan.key_pieces)] == [128] * 4


@pytest.mark.parametrize("mask", [scattered(16, seed=7), window(9, 5) | prefix(8).T | scattered(3, seed=1)], ids=str)
def test_random_pairs_of_a_new_length_are_planned_without_synchronization(mask):
    """Forward and backward with a first length plan the other pieces, which the new lengths share."""

    def step(T: int) -> None:
        q, k, v = (torch.randn(1, 2, T, 64, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
        out = attend(q, k, v, mask, impl="sparse")
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step(1500)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for T in (1501, 1516, 1530):
            step(T)
    finally:
        torch.cuda.set_sync_debug_mode("default")
