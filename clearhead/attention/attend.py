"""`attend`: the one way into attention.

It checks the call, picks an implementation, and runs it. The reference equation is in `kernels/reference.py`; every
other implementation gives the same answer, faster, for the calls it can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead.attention.inputs import AttentionInputs, Implementation
from clearhead.attention.normalizers import Normalizer, Softmax
from clearhead.attention.reference import REFERENCE
from clearhead.attention.scores import ScaledDot, Scores
from clearhead.attention.sdpa import SDPA
from clearhead.attention.sparse.kernel import SPARSE
from clearhead.errors import DtypeError, ImplementationError, ShapeError
from clearhead.masks import Full, Mask, as_mask

Impl = Literal["auto", "reference", "sdpa", "sparse"]

# In the order "auto" asks them: the first that is worth it, runs.
_IMPLEMENTATIONS: dict[str, Implementation] = {way.name: way for way in (SPARSE, SDPA, REFERENCE)}

_SCALED_DOT = ScaledDot()
_SOFTMAX = Softmax()
_DEVICES = ("cpu", "cuda", "hpu", "ipu", "mps", "mtia", "xla", "xpu")
# Asked once: a compiled graph could not, before torch 2.13. Not "meta", for one.
_WITH_AUTOCAST = tuple(device for device in _DEVICES if torch.amp.is_autocast_available(device))


def attend(
    q: Float[Tensor, "*B H T D"],
    k: Float[Tensor, "*B K S Dk"],
    v: Float[Tensor, "*B K S E"],
    mask: Mask | None = None,
    *,
    scores: Scores = _SCALED_DOT,
    normalizer: Normalizer = _SOFTMAX,
    bias: Tensor | None = None,
    query_offset: int | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "*B H T E"]:
    """Each query's average of the values, weighted by how well it matches their keys.

        out[i] = Σ_j w[i, j] v[j]        w[i] = normalizer(scores(q[i], k) + bias[i]) over the keys j that mask allows

    H must be a multiple of K: H/K query heads then share a key/value head. `bias` is added to the scores and broadcasts
    to (B, H, T, S); −∞ in it hides a key. Gradients beside a bias beyond about 1e7 may be off, because the scores' own
    digits are lost in it. `query_offset` is the position of the first query among the keys, needed where T ≠ S and the
    mask speaks of positions. A query that may attend to nothing gets zeros and passes zero gradient.

    `impl` is "auto" (the fastest that can run), "sparse", "sdpa" or "reference"; a name that cannot run the call
    raises and says why. On a GPU the fused kernels compute scores in float32 and do not look at the data first: |q|·|k|
    beyond 1e38 overflows there, and "reference" is the way for such inputs. Under autocast q, k and v are taken in its
    dtype, as torch's own attention takes them. On a CPU the data are
    looked at, also under torch.func's transforms, but `torch.compile` and `torch.export` cannot look: there |q|·|k|
    beyond 3e38 gives NaN, unless the inputs are float64. torch.func's transforms go through "sdpa";
    derivatives in forward mode go through "reference", and so must derivatives of gradients be asked for."""
    call = validate_inputs(q, k, v, mask, scores=scores, normalizer=normalizer, bias=bias, query_offset=query_offset)
    return choose(call, impl).run(call)


def validate_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scores: Scores = _SCALED_DOT,
    normalizer: Normalizer = _SOFTMAX,
    bias: Tensor | None = None,
    query_offset: int | None = None,
) -> AttentionInputs:
    """Return the validated arguments of one `attend`."""
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, scores, normalizer)
    if bias is not None:
        _check_bias(bias, (*q.shape[:-1], k.shape[-2]))
        bias = _narrowed(bias, q.dtype)
    mask, position = _resolve(mask, query_offset, q, k)
    return AttentionInputs(q, k, v, mask, scores, normalizer, bias, position)


def choose(call: AttentionInputs, impl: str = "auto") -> Implementation:
    """The implementation that will run this call."""
    if impl == "auto":
        for way in _IMPLEMENTATIONS.values():
            if way.is_preferred(call):
                return way
    if impl not in _IMPLEMENTATIONS:
        known = ", ".join(f'"{name}"' for name in ("auto", *_IMPLEMENTATIONS))
        raise ImplementationError(f'impl="{impl}" is unknown; choose one of {known}')
    reason = _IMPLEMENTATIONS[impl].unsupported_reason(call)
    if reason is not None:
        able = [name for name, way in _IMPLEMENTATIONS.items() if way.unsupported_reason(call) is None]
        raise ImplementationError(f'impl="{impl}" cannot run this call: {reason}; {" or ".join(able)} can')
    return _IMPLEMENTATIONS[impl]


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 bias in float32, where the scores are. What is finite stays so: only −∞ may hide a query's last key."""
    if bias.dtype != torch.float64 or dtype == torch.float64:
        return bias
    most = torch.finfo(torch.float32).max
    return torch.where(bias.isinf(), bias, bias.clamp(-most, most)).float()


def _autocast(*given: Tensor) -> tuple[Tensor, ...]:
    """In the dtype that autocast wants, where it is on: left to the kernels, each would do it in its own way."""
    device = given[0].device.type if isinstance(given[0], Tensor) else None
    if device not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device):
        return given
    wanted = torch.get_autocast_dtype(device)
    return tuple(
        x.to(wanted) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in given
    )


def _resolve(mask: Mask | None, query_offset: int | None, q: Tensor, k: Tensor) -> tuple[Mask | None, int]:
    """The mask (None if it forbids nothing) and the position of the first query."""
    if mask is None or isinstance(mask, Full):
        return None, 0 if query_offset is None else query_offset
    mask, front = as_mask(mask), q.shape[:-2]  # (B, H)
    position = mask.check(q.shape[-2], k.shape[-2], query_offset)
    if not _broadcasts(mask.batch_shape, front):
        own = f"the mask is made for (batch, heads) {mask.batch_shape}"
        raise ShapeError(f"{own} and the queries have {tuple(front)}; expected sizes that broadcast")
    return mask, position


def _check(q: Tensor, k: Tensor, v: Tensor, scores: Scores, normalizer: Normalizer) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} is a {type(x).__name__}; attend needs a floating-point tensor")
        if not x.is_floating_point():
            raise DtypeError(f"{name} is {x.dtype}; attend needs a floating-point tensor (embed ids before attending)")
        if x.dim() < 3:
            wanted = "(batch, heads, length, width), with any number of batch dimensions"
            raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected {wanted}")
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; convert them to one dtype")
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; all but the width must be equal")
    if q.shape[:-3] != k.shape[:-3]:
        raise ShapeError(f"q has a batch of {tuple(q.shape[:-3])} and k of {tuple(k.shape[:-3])}")
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ShapeError(f"{q.shape[-3]} query heads cannot be shared out over {k.shape[-3]} key/value heads")
    if q.shape[-1] != k.shape[-1] and not isinstance(scores, torch.nn.Module):
        raise ShapeError(
            f"queries are {q.shape[-1]} wide and keys {k.shape[-1]}; a dot product needs equal widths "
            f"(Bilinear and Additive scores do not)"
        )
    if not hasattr(scores, "as_dot"):
        raise DtypeError(f"scores is {scores!r}; expected a score function such as ScaledDot() or Dot()")
    if isinstance(normalizer, (str, type)) or not callable(normalizer):
        raise DtypeError(f"normalizer is {normalizer!r}; expected a normalizer such as Softmax() or HardMax()")


def _check_bias(bias: Tensor, wanted: Sequence[int]) -> None:
    if not isinstance(bias, Tensor):
        got = type(bias).__name__
        raise DtypeError(f"bias is a {got}; expected a floating-point tensor that broadcasts to the scores")
    if not bias.is_floating_point():
        raise DtypeError(
            f"bias is {bias.dtype}; it is added to the scores and must be floating-point "
            f"(a bool tensor is a mask: allow(tensor) or forbid(tensor))"
        )
    if not _broadcasts(bias.shape, wanted):
        raise ShapeError(f"bias has shape {tuple(bias.shape)}; it must broadcast to {tuple(wanted)}")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (m, 1) for n, m in zip(reversed(shape), reversed(to), strict=False))
