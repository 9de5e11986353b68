"""Notify attention observers of the attention that modules of other libraries compute.

A torch function mode intercepts `F.scaled_dot_product_attention`, and products of the result of a softmax: attention
that is written out as softmax(q @ k.T) @ v. Functions of torch run without the modes that intercepted them, so
`F.multi_head_attention_forward`, which calls the function inside, runs with a substitute for its name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead._core.call_types import Args, Kwargs, TorchFunction
from clearhead.attention.attend import run_observed
from clearhead.attention.normalizers import Softmax
from clearhead.attention.observe import OBSERVERS, ObservedCall, observe_call, observe_written_out
from clearhead.attention.scores import Scaled, ScaledDot, Scores
from clearhead.masks import Mask, allow, causal

_SDPA = F.scaled_dot_product_attention
_SOFTMAX: set[Callable[..., object]] = {F.softmax, torch.softmax, Tensor.softmax}
_PRODUCTS: set[Callable[..., object]] = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
# Operations between the softmax and the product, whose results are the weights of the same attention.
_WEIGHT_OPERATIONS: set[Callable[..., object]] = {
    F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16,
    torch.nan_to_num, Tensor.nan_to_num, Tensor.contiguous,
}  # fmt: skip


class InterceptSDPA(TorchFunctionMode):
    """Passes calls of torch's attention function to the observers while it is active.

    Args:
        compiled: Replacement of the function in graphs of `torch.compile`, which notify no observers.
    """

    def __init__(self, compiled: Callable[..., Tensor] = _SDPA) -> None:
        super().__init__()
        self.compiled = compiled
        # Results of a softmax, and what was computed from one, with the result of the softmax (None: itself).
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self.compiled(*args, **kwargs) if torch.compiler.is_compiling() else observed_sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break()  # the substitute cannot be compiled, so the call runs eagerly
            return _with_observed_sdpa(func)(*args, **kwargs)
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        if self._weights and args and isinstance(args[0], Tensor) and args[0] in self._weights:
            return self._after_softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _softmax(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> Tensor:
        """Run a softmax, and remember its result if it is over the last dimension."""
        out: Tensor = func(*args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if out.dim() > 2 and dim in (-1, out.dim() - 1) and OBSERVERS.get():
            self._weights[out] = None
        return out

    def _after_softmax(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """Run an operation on weights: their product with the values is the output of attention."""
        weights: Tensor = args[0] if self._weights[args[0]] is None else self._weights[args[0]]
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        if func in _WEIGHT_OPERATIONS and out is not args[0]:
            self._weights[out] = weights
        elif func in _PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == weights.dim():
            return _observe_product(weights, args[1], out)
        return out


def _observe_product(weights: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Notify the observers of a product of weights and values; tensors without heads get one."""
    if weights.dim() > 3:
        return observe_written_out(weights, v, out)
    return observe_written_out(*(x.unsqueeze(-3) for x in (weights, v, out))).squeeze(-3)


def observed_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Call `F.scaled_dot_product_attention`, and notify the observers."""
    if not OBSERVERS.get():
        return _SDPA(*args, **kwargs)
    call = sdpa_call(*args, **kwargs)
    has_heads = (args[0] if args else kwargs["query"]).dim() > 3
    out = observe_call(call, _run)
    return out if has_heads else out.squeeze(-3)


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ObservedCall:
    """Convert the arguments of `F.scaled_dot_product_attention`; tensors without heads get one.

    Its causal flag aligns the first query with the first key. A bool mask is True at pairs that may attend, and a float
    mask is added to the scores.
    """
    q, k, v = (x if x.dim() > 3 else x.unsqueeze(-3) for x in (query, key, value))
    mask: Mask | None = causal() if is_causal else None
    bias: Tensor | None = None
    if attn_mask is not None:
        pairs = attn_mask.unsqueeze(-3) if query.dim() <= 3 and attn_mask.dim() > 2 else attn_mask
        pairs = pairs.expand(*pairs.shape[:-2], q.shape[-2], k.shape[-2])  # a view, not a (T, S) tensor
        if pairs.is_floating_point():
            bias = pairs
        else:
            mask = allow(pairs)
    scores: Scores = ScaledDot() if scale is None else Scaled(scale)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return ObservedCall(
        q,
        k,
        v,
        mask,
        scores,
        Softmax(dropout=dropout_p),
        bias,
        query_offset=0 if is_causal else None,
        sdpa_arguments=(arguments, options),
    )


def _run(call: ObservedCall) -> Tensor:
    """Run torch's function, or `attend` if an observer changed the call."""
    if call.sdpa_arguments is None:
        return run_observed(call)
    args, kwargs = call.sdpa_arguments
    out = _SDPA(*args, **kwargs)
    return out if out.dim() > 3 else out.unsqueeze(-3)


def _with_observed_sdpa(function: Any) -> Callable[..., object]:
    """Return a copy of a function of `torch.nn.functional` that calls `observed_sdpa`; torch's module is unchanged."""
    names = {**vars(F), "scaled_dot_product_attention": observed_sdpa}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
