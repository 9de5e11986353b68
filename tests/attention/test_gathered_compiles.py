"""The Triton kernels compile for a GPU, as they are launched, on a machine that has none.

The interpreter runs kernels as Python; a compiler is stricter about types and shapes, and knows how much shared memory a
block of threads has. So real launches of real plans are caught here, and what they would launch is compiled for an H100.
"""

from __future__ import annotations

import pytest
import torch

from clearhead.attention.kernels import gathered, gathered_ops
from clearhead.attention.plan import plan
from clearhead.masks import causal, every, prefix, scattered, window

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from clearhead.attention.kernels import gathered_triton, gathered_triton_backward  # noqa: E402

pytestmark = pytest.mark.compiled  # the type checker's hook rewrites what Triton reads

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that one block of threads may use there
KERNELS = {
    gathered_triton: ("forward_kernel", "join_kernel", "delta_kernel"),
    gathered_triton_backward: ("query_kernel", "key_kernel", "sum_kernel"),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiled:
    """Stands in for a kernel: a launch compiles what it would run and notes the shared memory that it takes."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, **constants):
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | constants
        assert list(given) == names, "a launch gives every argument, in order"
        fixed = {n for n, parameter in zip(names, self.kernel.params, strict=True) if parameter.is_constexpr}
        source = ASTSource(
            fn=self.kernel,
            signature={n: "constexpr" if n in fixed else kind(given[n]) for n in names},
            constexprs={(i,): given[n] for i, n in enumerate(names) if n in fixed},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if n not in fixed and aligned(given[n])
            },
        )
        made = triton.compile(
            source, target=HOPPER, options={"num_warps": num_warps, "num_stages": num_stages}
        )
        self.found.append((self.kernel.__name__, made.metadata.shared))


def kind(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def aligned(value):
    """What Triton takes for granted of an argument: memory is aligned, and so are sizes that are multiples of 16."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


@pytest.fixture
def found(monkeypatch):
    launched: list[tuple[str, int]] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Compiled(getattr(module, name), launched))
    return launched


@pytest.mark.parametrize(
    ("mask", "dtype", "D", "groups", "bias"),
    [
        (causal() & (window(70, 0) | every(32)), torch.bfloat16, 64, 2, False),
        (window(70, 9), torch.float16, 128, 1, True),
        (scattered(3, seed=1) | prefix(5).T, torch.float32, 16, 1, False),
        (window(9, 70), torch.bfloat16, 256, 1, False),
    ],
    ids=lambda value: str(value),
)
def test_every_kernel_compiles_as_launched(found, mask, dtype, D, groups, bias):
    T = 331
    q, grad = (torch.randn(2, 2, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 2 // groups, T, D).to(dtype) for _ in range(2))
    added = torch.randn(1, 2, T, T).to(dtype) if bias else None
    blocking = gathered.blocking_on(torch.device("cuda"), dtype, D, D, dense=False)
    made = plan(mask, T, blocking=blocking)
    out, lse = gathered_ops._forward_triton(made, q, k, v, added, 0.125)
    gathered_ops._backward_triton(made, grad, q, k, v, added, out, lse, 0.125)
    kernels = {name for name, _ in found}
    assert {"forward_kernel", "delta_kernel", "query_kernel", "key_kernel"} <= kernels
    assert max(shared for _, shared in found) <= SHARED
