"""FLOPs and bytes accessed of each operator, kernel by kernel.

By default an operator reads every input once and writes every output once; views are free. The table of rules contains
the exceptions: matrix products, which have FLOPs, and operators that read less than their inputs or run several
kernels. A third-party operator is charged for its bytes and for the FLOPs of its formula in torch's table
(`torch.utils.flop_counter.register_flop_formula`); an operator without a formula is reported as unknown.

Bytes and FLOPs are stored as terms, each a product of sizes, because symbolic formulas are recovered from the terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clearhead._core.call_types import Args, Kwargs, Operator

Terms: TypeAlias = tuple[int, ...]
_ALIGNMENT = 8  # half-precision elements that a tensor core loads at once
_FLOAT32_BYTES = 4


class Ceiling(Enum):
    """The rate of a machine that limits a kernel; see `Machine`."""

    GEMM = "matrix products"
    UNALIGNED_GEMM = "unaligned matrix products"  # a width is not a multiple of 8: tensor cores cannot load its rows
    UNALIGNED_GEMM_BACKWARD = "unaligned matrix products, backward"
    UNALIGNED_CONVOLUTION = "unaligned convolutions"
    UNALIGNED_CONVOLUTION_BACKWARD = "unaligned convolutions, backward"
    ATTENTION = "attention"  # products around a softmax, in one kernel
    ATTENTION_BACKWARD = "attention, backward"
    REDUCTION = "reductions over rows"  # adds rows, as a bias gradient does


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The bytes accessed and the FLOPs of one kernel, each a sum of terms, and its ceiling."""

    byte_terms: Terms
    flop_terms: Terms = ()
    ceiling: Ceiling = Ceiling.GEMM

    @property
    def n_bytes(self) -> int:
        return sum(self.byte_terms)

    @property
    def flops(self) -> int:
        return sum(self.flop_terms)


def tensor_bytes(x: Tensor) -> int:
    """Return the bytes that reading `x` takes; an expanded dimension is read once."""
    return math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step) * x.element_size()


class OpCall:
    """One operator call: arguments by their schema names, and outputs.

    `plans` maps the handle of each sparse-attention plan to the pairs that it computes per head."""

    def __init__(
        self, func: Operator, args: Args, kwargs: Kwargs, out: Any, backward: bool, plans: Mapping[int, int]
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.backward = backward
        self.plans = plans
        self.name: str = func._schema.name.removeprefix("aten::")
        names = (argument.name for argument in func._schema.arguments)
        self.arguments: Kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        self.values = list(self.arguments.values())
        self.inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def byte_terms(self) -> Terms:
        """Return the bytes of every input and every output; an in-place operand counts as both."""
        read = () if self.name in _WRITE_ONLY else {id(x): x for x in self.inputs}.values()
        return byte_terms(*read, *self.outputs)


def byte_terms(*tensors: Tensor | None) -> Terms:
    """Return the bytes of each tensor that is not None."""
    return tuple(tensor_bytes(x) for x in tensors if x is not None)


def kernels_of(call: OpCall) -> tuple[tuple[KernelCost, ...], bool]:
    """Return the kernels of one call, and whether all of its FLOPs are known."""
    if call.name.startswith(_NO_KERNEL) or _is_view(call):
        return (), True
    if call.name in _RULES:
        return _RULES[call.name](call), True
    formula = flop_registry.get(call.func._overloadpacket)
    if formula is not None:
        return (KernelCost(call.byte_terms(), (int(formula(*call.args, **call.kwargs, out_val=call.out)),)),), True
    product = call.name.startswith(_UNKNOWN_PRODUCTS) and call.name != "linalg_vector_norm"
    return (KernelCost(call.byte_terms()),), call.func.namespace in ("aten", "prims") and not product


def scratch_of(call: OpCall) -> int:
    """Return the workspace bytes of a GPU kernel: float32 sums of half-precision query gradients."""
    if call.name.startswith("_scaled_dot_product") and call.name.endswith("_backward"):
        q: Tensor = call.args[1]
        return q.numel() * _FLOAT32_BYTES if q.element_size() < _FLOAT32_BYTES else 0
    return 0


def _is_view(call: OpCall) -> bool:
    """Return whether all outputs share storage with inputs."""
    if call.func._schema.is_mutable or not call.outputs:
        return not call.outputs
    storages = {x.untyped_storage()._cdata for x in call.inputs}
    return all(x.untyped_storage()._cdata in storages for x in call.outputs)


_NO_KERNEL = ("empty", "new_empty", "_local_scalar", "record_stream", "set_", "lift_fresh", "resize_", "sym_")
_WRITE_ONLY = {f"{name}{end}" for name in ("zero", "fill", "normal", "uniform", "bernoulli") for end in ("", "_")} | {
    "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
    "randn", "rand", "randint", "randperm", "scalar_tensor", "eye", "linspace", "rand_like", "randn_like",
    "tril_indices",
}  # fmt: skip
# Torch operators that contain products and have no rule below: their FLOPs are unknown.
_UNKNOWN_PRODUCTS = ("linalg_", "_linalg", "fft_", "_fft", "_trilinear", "_cdist", "cdist", "_cudnn_rnn", "mkldnn_rnn")


# ---------------------------------------------------------------------- products


def _gemm(call: OpCall, a: Tensor, b: Tensor, *, check_alignment: bool) -> tuple[KernelCost, ...]:
    ceiling = Ceiling.GEMM
    # The larger stride is the distance from one row (or column) of a matrix to the next.
    if check_alignment and any(max(x.stride()[-2:]) % _ALIGNMENT for x in (a, b, call.out)):
        ceiling = Ceiling.UNALIGNED_GEMM_BACKWARD if call.backward else Ceiling.UNALIGNED_GEMM
    return (KernelCost(byte_terms(a, b, call.out), (2 * call.out.numel() * a.shape[-1],), ceiling),)


def _convolution(call: OpCall) -> tuple[KernelCost, ...]:
    weight: Tensor = call["weight"]
    positions = (call["input"] if call["transposed"] else call.out).numel() // weight.shape[0]
    ceiling = Ceiling.UNALIGNED_CONVOLUTION if call["input"].shape[1] % _ALIGNMENT else Ceiling.GEMM
    return (KernelCost(call.byte_terms(), (2 * positions * weight.numel(),), ceiling),)


def _convolution_backward(call: OpCall) -> tuple[KernelCost, ...]:
    grad = call["grad_output"]
    x = call["input"]
    weight = call["weight"]
    output_mask = call["output_mask"]
    positions = (x if call["transposed"] else grad).numel() // weight.shape[0]
    ceiling = Ceiling.UNALIGNED_CONVOLUTION_BACKWARD if x.shape[1] % _ALIGNMENT else Ceiling.GEMM
    product = KernelCost(byte_terms(grad, x, weight), (2 * positions * weight.numel(),), ceiling)
    bias_sum = KernelCost(byte_terms(grad), ceiling=Ceiling.REDUCTION)
    return tuple(kernel for kernel, needed in zip((product, product, bias_sum), output_mask, strict=True) if needed)


def _grouped(call: OpCall) -> tuple[KernelCost, ...]:
    """Return one product over all groups of rows, or of columns for gradients of the parameters."""
    a, b = call["self"], call["mat2"]
    outer = a.shape[0] * b.shape[-1] if a.dim() == b.dim() == 2 else call.out.numel()
    return (KernelCost(call.byte_terms(), (2 * outer * a.shape[-1],)),)


# ---------------------------------------------------------------------- attention


def _pairs(q: Tensor, k: Tensor, is_causal: bool | None) -> Terms:
    """Return twice the query-key pairs of all heads; with the causal flag, of pairs up to the diagonal."""
    B, H, T, _ = q.shape
    S = k.shape[-2]
    return (B * H * T * S, B * H * T) if is_causal and T == S else (2 * B * H * T * S,)


def _attention(call: OpCall) -> tuple[KernelCost, ...]:
    q, k, v = call["query"], call["key"], call["value"]
    products = tuple(n * (q.shape[-1] + v.shape[-1]) for n in _pairs(q, k, call["is_causal"]))
    mask = call["attn_bias"] if call["attn_mask"] is None else call["attn_mask"]
    return (KernelCost(byte_terms(q, k, v, call.out[0], mask), products, Ceiling.ATTENTION),)


def _attention_backward(call: OpCall) -> tuple[KernelCost, ...]:
    """Return two kernels; the second computes five products: the scores again, and four gradients."""
    grad, q, k, v = call.values[:4]
    products = tuple(n * (3 * q.shape[-1] + 2 * v.shape[-1]) for n in _pairs(q, k, call["is_causal"]))
    mask = call["attn_bias"] if call["attn_mask"] is None else call["attn_mask"]
    sums = (q.numel() * _FLOAT32_BYTES,) if q.element_size() < _FLOAT32_BYTES else ()
    backward = KernelCost(byte_terms(q, k, v, grad, q, k, v, grad, mask) + sums, products, Ceiling.ATTENTION_BACKWARD)
    return KernelCost(byte_terms(grad, grad)), backward


def _sparse(call: OpCall) -> tuple[KernelCost, ...]:
    q, v = call["q"], call["v"]
    pairs = call.plans.get(call["handle"], 0) * q.shape[1]
    return (KernelCost(call.byte_terms(), (2 * pairs * (q.shape[-1] + v.shape[-1]),), Ceiling.ATTENTION),)


def _sparse_backward(call: OpCall) -> tuple[KernelCost, ...]:
    """Return two kernels; a plan runs by queries and then by keys, so scores and their gradients are computed twice."""
    grad, q, v = call["grad"], call["q"], call["v"]
    products = (2 * call.plans.get(call["handle"], 0) * q.shape[1] * (4 * q.shape[-1] + 3 * v.shape[-1]),)
    return KernelCost(byte_terms(grad, grad)), KernelCost(call.byte_terms(), products, Ceiling.ATTENTION_BACKWARD)


# ---------------------------------------------------------------------- other operators


def _norm_backward(call: OpCall) -> tuple[KernelCost, ...]:
    """Return one kernel for the gradient of the input and one for scale and shift; both read x and the gradient."""
    grad, x = call.values[:2]
    kernels = [KernelCost(byte_terms(grad, x, x))]
    if any(out is not None for out in call.out[1:]):
        kernels.append(KernelCost(byte_terms(grad, x), ceiling=Ceiling.REDUCTION))
    return tuple(kernels)


def _lookup(call: OpCall) -> tuple[KernelCost, ...]:
    """Return one kernel that reads only the selected entries of its first input."""
    out = byte_terms(*call.outputs)
    return (KernelCost(out + out + byte_terms(*(x for x in call.inputs if not x.is_floating_point()))),)


def _entries(x: Tensor, target: Tensor) -> KernelCost:
    """Return a kernel that reads or writes one entry per row."""
    return KernelCost((target.numel() * x.element_size(), tensor_bytes(target)))


def _sum(call: OpCall) -> tuple[KernelCost, ...]:
    x, dims = call["self"], call["dim"]
    keeps_columns = bool(dims) and x.dim() > 1 and all(d % x.dim() != x.dim() - 1 for d in dims)
    return (KernelCost(byte_terms(x), ceiling=Ceiling.REDUCTION) if keeps_columns else KernelCost(call.byte_terms()),)


_RULES: dict[str, Callable[[OpCall], tuple[KernelCost, ...]]] = {
    "mm": lambda c: _gemm(c, *c.values[:2], check_alignment=True),
    "addmm": lambda c: _gemm(c, *c.values[1:3], check_alignment=True),
    "bmm": lambda c: _gemm(c, *c.values[:2], check_alignment=False),
    "baddbmm": lambda c: _gemm(c, *c.values[1:3], check_alignment=False),
    **dict.fromkeys(("mv", "dot"), lambda c: (KernelCost(c.byte_terms(), (2 * c.values[0].numel(),)),)),
    "addmv": lambda c: (KernelCost(c.byte_terms(), (2 * c.values[1].numel(),)),),
    "_grouped_mm": _grouped,
    **dict.fromkeys(("convolution", "_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    "clearhead::gathered": _sparse,
    "clearhead::gathered_backward": _sparse_backward,
    "native_layer_norm_backward": _norm_backward,
    **dict.fromkeys(("embedding", "gather", "index_select", "index"), _lookup),
    # The table is cleared; then rows are added to it, or entries written.
    "embedding_dense_backward": lambda c: (KernelCost(byte_terms(c.out)), KernelCost(3 * byte_terms(c.values[0]))),
    "nll_loss_forward": lambda c: (_entries(*c.values[:2]),),
    "nll_loss_backward": lambda c: (KernelCost(byte_terms(c.out)), _entries(*c.values[1:3])),
    "sum": _sum,
}
for _kernel in ("flash_attention", "efficient_attention", "flash_attention_for_cpu", "cudnn_attention"):
    _RULES[f"_scaled_dot_product_{_kernel}"] = _attention
    _RULES[f"_scaled_dot_product_{_kernel}_backward"] = _attention_backward
