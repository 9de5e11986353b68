"""`attend`: the entry point of attention.

It validates the arguments, selects an implementation and runs it. `attention/reference.py` contains the equation; the
other implementations compute the same result faster, for the inputs that they support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from clearhead._core.keywords import reject_unknown_keywords
from clearhead._core.shapes import Float
from clearhead.attention.biases.base import Bias, TensorBias, check_heads, lower, short_text
from clearhead.attention.inputs import AttentionInputs, Execution, Implementation
from clearhead.attention.normalizers import Normalizer, Softmax
from clearhead.attention.observe import OBSERVERS, Impl, ObservedCall, observe_call
from clearhead.attention.reference import REFERENCE
from clearhead.attention.scores import ScaledDot, Scores
from clearhead.attention.sdpa import SDPA
from clearhead.attention.sparse.kernel import SPARSE
from clearhead.errors import DtypeError, ImplementationError, MaskError, ShapeError
from clearhead.masks import Full, Mask, as_mask

if TYPE_CHECKING:
    from typing import Never

    UnknownKeyword: TypeAlias = Never
else:
    UnknownKeyword = object  # checkers of types at run time accept Never for results only

# In the order in which impl="auto" tries them.
_IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation for implementation in (SPARSE, SDPA, REFERENCE)
}

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FULL = Full()
_SCALED_DOT = ScaledDot()
_SOFTMAX = Softmax()
_DEVICES = ("cpu", "cuda", "hpu", "ipu", "mps", "mtia", "xla", "xpu")
# Evaluated at import, because compiled graphs cannot call this function before torch 2.13.
_AUTOCAST_DEVICES = tuple(device for device in _DEVICES if torch.amp.is_autocast_available(device))

_KEYWORDS = ("q", "k", "v", "mask", "scores", "normalizer", "bias", "query_offset", "impl")


def attend(
    q: Float[Tensor, "*B H T D"],
    k: Float[Tensor, "*B K S Dk"],
    v: Float[Tensor, "*B K S E"],
    mask: Mask | None = None,
    *,
    scores: Scores = _SCALED_DOT,
    normalizer: Normalizer = _SOFTMAX,
    bias: Tensor | Bias | None = None,
    query_offset: int | None = None,
    impl: Impl = "auto",
    **unknown: UnknownKeyword,
) -> Float[Tensor, "*B H T E"]:
    """Compute attention: for each query, the average of the values weighted by the match of query and key.

        out[i] = Σ_j w[i, j] v[j]        w[i] = normalizer(scores(q[i], k) + bias[i]) over the keys j that mask allows

        attend(q, k, v, causal() & window(128, 0))

    A query that may not attend to any key gets zeros, with zero gradient. Under autocast, q, k and v are cast to its
    dtype, as in `scaled_dot_product_attention`.

    Extreme values: On a CPU the inputs are checked, and |q|·|k| beyond the range of float32 runs in float64, also under
    torch.func transforms. `torch.compile` and `torch.export` cannot check: |q|·|k| beyond 3e38 gives NaN, except in
    float64. On a GPU "sdpa" and "sparse" compute scores in float32 without a check; use "reference" if |q|·|k| exceeds
    1e38. If |bias| exceeds about 1e7, gradients are inaccurate, because the sum loses the digits of the scores.

    Derivatives: torch.func transforms run "sdpa", forward-mode derivatives run "reference". Second derivatives need
    impl="reference".

    Args:
        q: Queries, (B, H, T, D), with any number of batch dimensions.
        k: Keys, (B, K, S, D). H must be a multiple of K; H/K query heads share a key/value head.
        v: Values, (B, K, S, E).
        mask: Pairs that may attend. Default: all.
        scores: Score function.
        normalizer: Turns the scores of a query into weights.
        bias: Added to the scores: an expression such as `alibi(8)`, or a tensor that broadcasts to (B, H, T, S). −∞
            masks a key.
        query_offset: Position of the first query among the keys. Required if T ≠ S and the mask or the bias depends on
            positions.
        impl: "auto" (the fastest supported one), "sparse", "sdpa" or "reference".
        **unknown: Keywords of other libraries, such as `attn_mask`, which raise an error that names ours.

    Returns:
        Outputs, (B, H, T, E).

    Raises:
        KeywordError: If there is no such keyword.
        ShapeError: If shapes do not match.
        DtypeError: If an argument has the wrong type or dtype.
        MaskError: If `query_offset` is missing.
        ImplementationError: If `impl` does not support the arguments.
    """
    if unknown:
        reject_unknown_keywords(unknown, _KEYWORDS, "attend")
    if not torch.compiler.is_compiling() and OBSERVERS.get():
        return observe_call(ObservedCall(q, k, v, mask, scores, normalizer, bias, query_offset, impl), run_observed)
    inputs = validate_inputs(q, k, v, mask, scores=scores, normalizer=normalizer, bias=bias, query_offset=query_offset)
    return choose(inputs, impl).run(inputs)


def run_observed(call: ObservedCall) -> Tensor:
    """Run a call that all observers have received."""
    return attend(
        call.q,
        call.k,
        call.v,
        call.mask,
        scores=call.scores,
        normalizer=call.normalizer,
        bias=call.bias,
        query_offset=call.query_offset,
        impl=call.impl,
    )


def validate_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scores: Scores = _SCALED_DOT,
    normalizer: Normalizer = _SOFTMAX,
    bias: Tensor | Bias | None = None,
    query_offset: int | None = None,
) -> AttentionInputs:
    """Validate the arguments of an `attend` call."""
    _check_types(q, k, v)
    if q.device.type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    _check(q, k, v, scores, normalizer)
    distance_bias = None
    mask, position = _resolve_mask(mask, query_offset, q, k)
    if bias is not None:
        bias, distance_bias = lower_bias(bias, q, k, query_offset)
    return AttentionInputs(q, k, v, mask, scores, normalizer, bias, position, True, distance_bias)


def choose(inputs: AttentionInputs, impl: str = "auto") -> Execution:
    """Return how a call runs: the implementation, its plan and the reason.

    Args:
        inputs: The validated arguments of the call.
        impl: "auto" or the name of an implementation.

    Returns:
        The execution, whose `run` computes the output.

    Raises:
        ImplementationError: If `impl` does not support the arguments.
    """
    if impl == "auto":
        for implementation in _IMPLEMENTATIONS.values():
            execution = implementation.propose(inputs)
            if execution is not None:
                return execution
    if impl not in tuple(_IMPLEMENTATIONS):
        names = ", ".join(f'"{name}"' for name in ("auto", *_IMPLEMENTATIONS))
        raise ImplementationError(f'impl="{impl}" is unknown; choose one of {names}')
    reason = _IMPLEMENTATIONS[impl].unsupported_reason(inputs)
    if reason is not None:
        supported = [
            name
            for name, implementation in _IMPLEMENTATIONS.items()
            if implementation.unsupported_reason(inputs) is None
        ]
        raise ImplementationError(
            f'impl="{impl}" does not support these arguments: {reason}; use {" or ".join(supported)}'
        )
    implementation = _IMPLEMENTATIONS[impl]
    return Execution(implementation, implementation.plan_for(inputs), f'impl="{impl}" was requested')


def lower_bias(
    bias: Tensor | Bias | None, q: Tensor, k: Tensor, query_offset: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return a bias as a tensor that broadcasts to the scores, and as values by distance (H or 1, T + S).

    Raises:
        ShapeError: If the bias does not fit the scores.
        DtypeError: If it has the wrong type.
        MaskError: If it depends on positions and `query_offset` is missing.
    """
    if bias is None:
        return None, None
    T, S = q.shape[-2], k.shape[-2]
    if not isinstance(bias, Bias):
        _check_bias(bias, (*q.shape[:-1], S), q.device)
        return _to_float32(bias, q.dtype), None
    check_heads(bias, q.shape[-3])
    for term in bias.terms:
        if isinstance(term, TensorBias):
            _check_bias(term.tensor, (*q.shape[:-1], S), q.device)
        elif query_offset is None and T != S:
            raise MaskError(
                f"the bias {short_text(term)} depends on query positions, and T={T} queries with S={S} keys do not "
                "determine them; pass query_offset, the position of the first query among the keys"
            )
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    values, tensor = lower(bias, T, S, query_offset or 0, q.device, acc_dtype)
    return None if tensor is None else _to_float32(tensor, q.dtype), values


def _to_float32(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a float64 bias to float32 if the inputs are narrower; finite values stay finite, only −∞ masks a key."""
    if bias.dtype != torch.float64 or dtype == torch.float64:
        return bias
    limit = torch.finfo(torch.float32).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).float()


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to the autocast dtype, except from float64, so that all implementations get the same inputs."""
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _resolve_mask(mask: Mask | None, query_offset: int | None, q: Tensor, k: Tensor) -> tuple[Mask | None, int]:
    """Return the mask (None if it allows all pairs) and the position of the first query."""
    if mask is None or isinstance(mask, Full):
        return None, 0 if query_offset is None else _FULL.check(q.shape[-2], k.shape[-2], query_offset)
    if not isinstance(mask, Mask):
        mask = as_mask(mask)  # raises
    position = mask.check(q.shape[-2], k.shape[-2], query_offset)
    batch_shape = mask.batch_shape
    if batch_shape and not _broadcasts(batch_shape, q.shape[:-2]):
        raise ShapeError(
            f"the mask has (batch, heads) {batch_shape} and the queries have {tuple(q.shape[:-2])}; expected "
            "sizes that broadcast"
        )
    return mask, position


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are floating-point tensors of at least three dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} is a {type(x).__name__}; attend needs a floating-point tensor")
        if x.dtype not in _DTYPES:
            raise DtypeError(
                f"{name} is {x.dtype}; attend needs a floating-point tensor of 16, 32 or 64 bits (embed ids before "
                "attending)"
            )
        if x.dim() < 3:
            expected = "(batch, heads, length, width), with any number of batch dimensions"
            raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def _check(q: Tensor, k: Tensor, v: Tensor, scores: Scores, normalizer: Normalizer) -> None:
    """Raise unless dtypes, devices and shapes match."""
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; convert them to one dtype")
    if not q.device == k.device == v.device:
        raise DtypeError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device")
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; expected equal sizes except for the width"
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ShapeError(
            f"q has batch shape {tuple(q.shape[:-3])} and k {tuple(k.shape[:-3])}; expected equal batch shapes"
        )
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ShapeError(
            f"got {q.shape[-3]} query heads and {k.shape[-3]} key/value heads; expected a multiple of the key/value "
            "heads"
        )
    if q.shape[-1] != k.shape[-1] and not isinstance(scores, torch.nn.Module):
        raise ShapeError(
            f"queries have width {q.shape[-1]} and keys {k.shape[-1]}; a dot product needs equal widths "
            f"(Bilinear and Additive scores do not)"
        )
    if isinstance(scores, type) or not hasattr(scores, "as_dot"):
        raise DtypeError(f"scores is {scores!r}; expected a score function such as ScaledDot() or Dot()")
    if isinstance(normalizer, (str, type)) or not callable(normalizer):
        raise DtypeError(f"normalizer is {normalizer!r}; expected a normalizer such as Softmax() or HardMax()")


def _check_bias(bias: Tensor, scores_shape: Sequence[int], device: torch.device) -> None:
    """Raise unless the bias is a floating-point tensor on this device that broadcasts to the scores."""
    if not isinstance(bias, Tensor):
        got = type(bias).__name__
        raise DtypeError(
            f"bias is a {got}; expected a floating-point tensor that broadcasts to the scores, or a bias such as "
            "alibi(8)"
        )
    if not bias.is_floating_point():
        raise DtypeError(
            f"bias is {bias.dtype}; it is added to the scores and must be floating-point "
            f"(a bool tensor is a mask: allow(tensor) or forbid(tensor))"
        )
    if not _broadcasts(bias.shape, scores_shape):
        raise ShapeError(f"bias has shape {tuple(bias.shape)}; it must broadcast to {tuple(scores_shape)}")
    if bias.device != device and bias.dim():
        raise DtypeError(f"bias is on {bias.device} and q on {device}; move them to one device")


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether `shape` broadcasts to `target`."""
    return len(shape) <= len(target) and all(
        n in (m, 1) for n, m in zip(reversed(shape), reversed(target), strict=False)
    )
