"""What an operator asks of a machine: the kernels it runs, each with the bytes it moves and the operations of its
matrix products.

The rule for all of them: every input is read once and every output written once, views are free. The table below holds
what differs: products, which have operations, and kernels that read less than they are given or run in several steps.
An operator of somebody else's is charged for its bytes, and for the operations that torch's own table of formulas
(`torch.utils.flop_counter.register_flop_formula`) has for it; without an entry there it is named as unknown.

Bytes and operations are kept as sums of products of sizes, term by term: formulas are read off the terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Terms: TypeAlias = tuple[int, ...]
_ALIGNED = 8  # elements of half precision that a tensor core loads at once
_WIDE = 4


class Ceiling(Enum):
    """What bounds a kernel: the two ordinary rates of a machine, or, in place of one of them, that of its own kind."""

    ORDINARY = "products"
    ODD = "products of odd width"  # no multiple of 8: tensor cores cannot load its rows
    ODD_BACKWARD = "gradients of odd width"
    CONVOLUTION = "convolutions of odd channels"
    CONVOLUTION_BACKWARD = "gradients of odd channels"
    ATTENTION = "attention"  # products around a softmax, in one kernel
    ATTENTION_BACKWARD = "attention, backward"
    ROW_SUM = "sums over rows"  # adds rows up into one, as a bias's gradient does


@dataclass(frozen=True, slots=True)
class Kernel:
    """The bytes it moves and the multiplications and additions of its products, each as a sum of terms."""

    moved: Terms
    products: Terms = ()
    ceiling: Ceiling = Ceiling.ORDINARY

    @property
    def n_bytes(self) -> int:
        return sum(self.moved)

    @property
    def operations(self) -> int:
        return sum(self.products)


def bytes_of_tensor(x: Tensor) -> int:
    """What reading it takes: an expanded dimension is read once."""
    return math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step) * x.element_size()


class Call:
    """One operator with what it was given, by the names of its schema, and what it gave back. `plans` are the pairs
    that each plan of gathered attention computes for one head."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any, backward: bool, plans: Mapping[int, int]) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        self.backward, self.plans = backward, plans
        self.name: str = func._schema.name.removeprefix("aten::")
        names = (argument.name for argument in func._schema.arguments)
        self.given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        self.first = list(self.given.values())
        leaves = tree_leaves((args, kwargs)), tree_leaves(out)
        self.inputs, self.outputs = ([x for x in tree if isinstance(x, Tensor)] for tree in leaves)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    def moved(self) -> Terms:
        """Every input once, every output once; what is written over twice, if it is read first."""
        read = () if self.name in _ONLY_WRITE else {id(x): x for x in self.inputs}.values()
        return sizes(*read, *self.outputs)


def sizes(*tensors: Tensor | None) -> Terms:
    return tuple(bytes_of_tensor(x) for x in tensors if x is not None)


def kernels_of(call: Call) -> tuple[tuple[Kernel, ...], bool]:
    """The kernels of one call, and whether all of its operations are known."""
    if call.name.startswith(_NOTHING) or _is_view(call):
        return (), True
    if call.name in _RULES:
        return _RULES[call.name](call), True
    formula = flop_registry.get(call.func._overloadpacket)
    if formula is not None:
        return (Kernel(call.moved(), (int(formula(*call.args, **call.kwargs, out_val=call.out)),)),), True
    product = call.name.startswith(_OTHER_PRODUCTS) and call.name != "linalg_vector_norm"
    return (Kernel(call.moved()),), call.func.namespace in ("aten", "prims") and not product


def scratch_of(call: Call) -> int:
    """Bytes that a GPU's kernel needs beside its results: sums in float32 of queries' gradients in half precision."""
    if call.name.startswith("_scaled_dot_product") and call.name.endswith("_backward"):
        q: Tensor = call.args[1]
        return q.numel() * _WIDE if q.element_size() < _WIDE else 0
    return 0


def _is_view(call: Call) -> bool:
    """It gives back what it was given, seen another way."""
    if call.func._schema.is_mutable or not call.outputs:
        return not call.outputs
    given = {x.untyped_storage()._cdata for x in call.inputs}
    return all(x.untyped_storage()._cdata in given for x in call.outputs)


_NOTHING = ("empty", "new_empty", "_local_scalar", "record_stream", "set_", "lift_fresh", "resize_", "sym_")
_ONLY_WRITE = {f"{name}{end}" for name in ("zero", "fill", "normal", "uniform", "bernoulli") for end in ("", "_")} | {
    "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
    "randn", "rand", "randint", "randperm", "scalar_tensor", "eye", "linspace", "rand_like", "randn_like",
    "tril_indices",
}  # fmt: skip
# Operators of torch's own with products inside that have no rule here: their operations are unknown.
_OTHER_PRODUCTS = ("linalg_", "_linalg", "fft_", "_fft", "_trilinear", "_cdist", "cdist", "_cudnn_rnn", "mkldnn_rnn")


# ---------------------------------------------------------------------- products


def _matrix(call: Call, a: Tensor, b: Tensor, *, odd: bool) -> tuple[Kernel, ...]:
    ceiling = Ceiling.ORDINARY
    # The larger stride: elements from one row (or column) of a matrix to the next.
    if odd and any(max(x.stride()[-2:]) % _ALIGNED for x in (a, b, call.out)):
        ceiling = Ceiling.ODD_BACKWARD if call.backward else Ceiling.ODD
    return (Kernel(sizes(a, b, call.out), (2 * call.out.numel() * a.shape[-1],), ceiling),)


def _convolution(call: Call) -> tuple[Kernel, ...]:
    weight: Tensor = call["weight"]
    places = (call["input"] if call["transposed"] else call.out).numel() // weight.shape[0]
    ceiling = Ceiling.CONVOLUTION if call["input"].shape[1] % _ALIGNED else Ceiling.ORDINARY
    return (Kernel(call.moved(), (2 * places * weight.numel(),), ceiling),)


def _convolution_backward(call: Call) -> tuple[Kernel, ...]:
    grad, x, weight, wanted = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    places = (x if call["transposed"] else grad).numel() // weight.shape[0]
    ceiling = Ceiling.CONVOLUTION_BACKWARD if x.shape[1] % _ALIGNED else Ceiling.ORDINARY
    product = Kernel(sizes(grad, x, weight), (2 * places * weight.numel(),), ceiling)
    sums = Kernel(sizes(grad), ceiling=Ceiling.ROW_SUM)
    return tuple(kernel for kernel, want in zip((product, product, sums), wanted, strict=True) if want)


def _grouped(call: Call) -> tuple[Kernel, ...]:
    """One product for each group of rows, or, where weights get their gradients, of columns."""
    a, b = call["self"], call["mat2"]
    outer = a.shape[0] * b.shape[-1] if a.dim() == b.dim() == 2 else call.out.numel()
    return (Kernel(call.moved(), (2 * outer * a.shape[-1],)),)


# ---------------------------------------------------------------------- attention


def _pairs(q: Tensor, k: Tensor, is_causal: bool | None) -> Terms:
    """Twice the pairs of a query and a key in all heads; with the kernel's causal flag those up to the diagonal."""
    B, H, T, _ = q.shape
    S = k.shape[-2]
    return (B * H * T * S, B * H * T) if is_causal and T == S else (2 * B * H * T * S,)


def _attention(call: Call) -> tuple[Kernel, ...]:
    q, k, v = call["query"], call["key"], call["value"]
    products = tuple(n * (q.shape[-1] + v.shape[-1]) for n in _pairs(q, k, call["is_causal"]))
    mask = call["attn_bias"] if call["attn_mask"] is None else call["attn_mask"]
    return (Kernel(sizes(q, k, v, call.out[0], mask), products, Ceiling.ATTENTION),)


def _attention_backward(call: Call) -> tuple[Kernel, ...]:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys."""
    grad, q, k, v = call.first[:4]
    products = tuple(n * (3 * q.shape[-1] + 2 * v.shape[-1]) for n in _pairs(q, k, call["is_causal"]))
    mask = call["attn_bias"] if call["attn_mask"] is None else call["attn_mask"]
    sums = (q.numel() * _WIDE,) if q.element_size() < _WIDE else ()
    back = Kernel(sizes(q, k, v, grad, q, k, v, grad, mask) + sums, products, Ceiling.ATTENTION_BACKWARD)
    return Kernel(sizes(grad, grad)), back


def _gathered(call: Call) -> tuple[Kernel, ...]:
    q, v = call["q"], call["v"]
    pairs = call.plans.get(call["handle"], 0) * q.shape[1]
    return (Kernel(call.moved(), (2 * pairs * (q.shape[-1] + v.shape[-1]),), Ceiling.ATTENTION),)


def _gathered_backward(call: Call) -> tuple[Kernel, ...]:
    """A plan goes by queries and by keys, one after the other, and makes scores and weights' gradients twice."""
    grad, q, v = call["grad"], call["q"], call["v"]
    products = (2 * call.plans.get(call["handle"], 0) * q.shape[1] * (4 * q.shape[-1] + 3 * v.shape[-1]),)
    return Kernel(sizes(grad, grad)), Kernel(call.moved(), products, Ceiling.ATTENTION_BACKWARD)


# ---------------------------------------------------------------------- the rest


def _norm_backward(call: Call) -> tuple[Kernel, ...]:
    """The input's gradient in one kernel, the scale's and shift's in another: both read x and the gradient."""
    grad, x = call.first[:2]
    kernels = [Kernel(sizes(grad, x, x))]
    if any(out is not None for out in call.out[1:]):
        kernels.append(Kernel(sizes(grad, x), ceiling=Ceiling.ROW_SUM))
    return tuple(kernels)


def _picked(call: Call) -> tuple[Kernel, ...]:
    """Reads of its first input no more than it gives back."""
    out = sizes(*call.outputs)
    return (Kernel(out + out + sizes(*(x for x in call.inputs if not x.is_floating_point()))),)


def _entries(x: Tensor, target: Tensor) -> Kernel:
    """Of each row one entry is read, or written."""
    return Kernel((target.numel() * x.element_size(), bytes_of_tensor(target)))


def _sum(call: Call) -> tuple[Kernel, ...]:
    x, over = call["self"], call["dim"]
    rows = bool(over) and x.dim() > 1 and all(d % x.dim() != x.dim() - 1 for d in over)
    return (Kernel(sizes(x), ceiling=Ceiling.ROW_SUM) if rows else Kernel(call.moved()),)


_RULES: dict[str, Callable[[Call], tuple[Kernel, ...]]] = {
    "mm": lambda c: _matrix(c, *c.first[:2], odd=True),
    "addmm": lambda c: _matrix(c, *c.first[1:3], odd=True),
    "bmm": lambda c: _matrix(c, *c.first[:2], odd=False),
    "baddbmm": lambda c: _matrix(c, *c.first[1:3], odd=False),
    **dict.fromkeys(("mv", "dot"), lambda c: (Kernel(c.moved(), (2 * c.first[0].numel(),)),)),
    "addmv": lambda c: (Kernel(c.moved(), (2 * c.first[1].numel(),)),),
    "_grouped_mm": _grouped,
    **dict.fromkeys(("convolution", "_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    "clearhead::gathered": _gathered,
    "clearhead::gathered_backward": _gathered_backward,
    "native_layer_norm_backward": _norm_backward,
    **dict.fromkeys(("embedding", "gather", "index_select", "index"), _picked),
    # The whole table is cleared; then rows are added to it, or entries written.
    "embedding_dense_backward": lambda c: (Kernel(sizes(c.out)), Kernel(3 * sizes(c.first[0]))),
    "nll_loss_forward": lambda c: (_entries(*c.first[:2]),),
    "nll_loss_backward": lambda c: (Kernel(sizes(c.out)), _entries(*c.first[1:3])),
    "sum": _sum,
}
for _way in ("flash_attention", "efficient_attention", "flash_attention_for_cpu", "cudnn_attention"):
    _RULES[f"_scaled_dot_product_{_way}"] = _attention
    _RULES[f"_scaled_dot_product_{_way}_backward"] = _attention_backward
