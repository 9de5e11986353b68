"""The gathered way: each block of queries is computed with the keys it may see, and with no others.

The work follows the plan of the mask (`attention.plan`), for any mask at all: keys that every query sees go through a
dense kernel, the rest through a kernel that gathers columns. On a GPU that is Triton, on the CPU torch operations. A
bias that is learned gets its gradient from the torch operations; the Triton kernels give none, and leave such calls to
the fused kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from clearhead._core.tensor_state import HAS_TRITON, is_concrete
from clearhead.attention import sdpa
from clearhead.attention.inputs import AttentionInputs, Implementation, mask_to_bhts, to_bhtd
from clearhead.attention.normalizers import Softmax
from clearhead.attention.sparse.cost_model import WORTH_PLANNING, Rates, rates_for
from clearhead.attention.sparse.plan import Blocking, Plan, plan
from clearhead.masks import Atom, Causal, Mask, allow, as_mask, fold, leaves
from clearhead.masks import structural as kinds

_WIDEST = 256


class SparseImplementation(Implementation):
    """Only the pairs that the plan of the mask names."""

    name = "sparse"

    def unsupported_reason(self, call: AttentionInputs) -> str | None:
        if call.mask is None and not sdpa.needs_fp32_upcast(call):
            return "there is no mask, so nothing to skip"
        reason = sdpa.SDPA.unsupported_reason(call)
        if reason is not None:
            return reason
        assert isinstance(call.normalizer, Softmax)
        if call.normalizer.dropout:
            return "dropout of weights is not gathered"
        if not torch.compiler.is_compiling() and not _is_real(call):
            return "torch.func and FakeTensorMode cannot see through it"
        if _is_exporting():
            return "a plan belongs to this process, and what is exported runs in others"
        if torch.compiler.is_compiling() and _recipe(call) is None:
            return "a graph that is compiled plans only for sizes that do not change and masks without tensors"
        if call.q.is_cuda:
            return _triton_unsupported_reason(call)
        if call.q.device.type != "cpu":
            return f"there is no gathered kernel for {call.q.device.type}"
        return None

    def run(self, call: AttentionInputs) -> Tensor:
        from clearhead.attention.sparse.op import constant_handle, gathered

        assert isinstance(call.normalizer, Softmax)
        dot = call.scores.as_dot(call.q)
        assert dot is not None
        q, scale = dot
        lead = q.shape[:-3]
        mask = as_mask(call.mask)
        mask = mask if len(lead) == 1 or not mask.batch_shape else _folded(mask, call, lead)
        if torch.compiler.is_compiling():
            recipe = _recipe(call)
            assert recipe is not None  # unsupported_reason has said so
            handle = constant_handle(recipe)
        else:
            made = plan(
                mask, call.T, call.S, query_offset=call.query_offset, device=q.device, blocking=blocking_for(call)
            )
            handle = made.handle
        bias = None if call.bias is None else call.scaled_bias()
        if bias is not None and len(lead) != 1 and bias.requires_grad:
            bias = bias.to(
                call.acc_dtype
            )  # before it is shared out, so that what comes back is added up in wide numbers
        bias = None if bias is None else mask_to_bhts(bias, lead)
        out, _ = gathered(
            to_bhtd(q), to_bhtd(call.k), to_bhtd(call.v), bias, handle, scale / call.normalizer.temperature
        )
        return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])

    def is_preferred(self, call: AttentionInputs) -> bool:
        """Whether gathering can run this call and its plan predicts that it is faster than the fused kernel."""
        if call.T * call.S < WORTH_PLANNING:
            return False
        if (call.mask is None or isinstance(call.mask, Causal)) and not sdpa.needs_fp32_upcast(call):
            return False  # the fused kernel skips what there is to skip
        if (
            not isinstance(call.normalizer, Softmax)
            or call.normalizer.dropout
            or call.q.device.type not in ("cpu", "cuda")
        ):
            return False  # not worth a plan: it could not be followed
        if _is_exporting() or (not torch.compiler.is_compiling() and not _is_real(call)):
            return False
        # Last, because it may look at the data.
        return is_predicted_faster(call) and self.unsupported_reason(call) is None


SPARSE = SparseImplementation()


def _triton_unsupported_reason(call: AttentionInputs) -> str | None:
    if not HAS_TRITON:
        return "Triton is not installed"
    if call.bias is not None and call.bias.requires_grad:
        return "the bias needs a gradient, which the kernel does not give"
    if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel is for float16, bfloat16 and float32, not {call.q.dtype}"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    return f"heads are {widest} wide; the kernel takes up to {_WIDEST}" if widest > _WIDEST else None


def _is_exporting() -> bool:
    """Whether a graph is made for other processes. torch 2.11 takes its own function for true in every graph."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _is_real(call: AttentionInputs) -> bool:
    """Whether the call is computed as it comes, and is not transformed or only sized."""
    bias = [] if call.bias is None else [call.bias]
    held = [x for leaf, _ in leaves(as_mask(call.mask)) for x in getattr(leaf, "data", ())]
    return all([is_concrete(x) for x in (call.q, call.k, call.v, *bias, *call.score_parameters, *held)])


def is_predicted_faster(call: AttentionInputs) -> bool:
    """Whether the plan is predicted to be faster than the fused kernel."""
    heads = 1
    for n in call.q.shape[:-2]:
        heads = heads * n
    width = max(call.q.shape[-1], call.v.shape[-1])
    backward = torch.is_grad_enabled() and any([x.requires_grad for x in (call.q, call.k, call.v)])
    instead = call.acc_dtype if sdpa.needs_fp32_upcast(call) else call.q.dtype
    if not torch.compiler.is_compiling():
        # Without a count of their changes, tensors in a mask would have to be planned for in every call.
        if as_mask(call.mask).versions is None:
            return False
        ours, theirs = (rates_for(call.q.device, dtype) for dtype in (call.q.dtype, instead))
        return beats_sdpa(plan_for(call), heads, width, backward, ours, instead=theirs)
    from clearhead.attention.sparse.op import constant_beats_sdpa

    recipe = _recipe(call)
    if recipe is None or not _is_static(heads) or not _is_static(width):
        return False
    return constant_beats_sdpa(recipe, (call.q.dtype, instead), (heads, width, backward))


def beats_sdpa(
    made: Plan,
    heads: int,
    width: int,
    backward: bool,
    rates: Rates,
    device: torch.device | None = None,
    *,
    instead: Rates | None = None,
) -> bool:
    """Whether a plan should take less time than the fused kernel, for so many heads (with the batch) of this width.

    On `device`, if that is another one than the plan is on; the fused kernel at the rates `instead`, if it has others.
    """
    ours = made.predicted_ms(heads=heads, width=width, rates=rates, backward=backward)
    theirs = rates if instead is None else instead
    return ours < theirs.milliseconds(**made.fused_work(heads, device), width=width, backward=backward)


def plan_for(call: AttentionInputs) -> Plan:
    """The plan that `run` would follow."""
    return plan(
        call.mask, call.T, call.S, query_offset=call.query_offset, device=call.q.device, blocking=blocking_for(call)
    )


def blocking_for(call: AttentionInputs) -> Blocking:
    """Rows of a block as the kernels want them, and dense calls only where there is a dense kernel."""
    return blocking_on(call.q.device, call.q.dtype, call.q.shape[-1], call.v.shape[-1], dense=call.bias is None)


def blocking_on(device: torch.device, dtype: torch.dtype, D: int, E: int, *, dense: bool = True) -> Blocking:
    """The same for any device, whether it is here or not."""
    dense = dense and _has_dense(device, dtype, D, E)
    if device.type != "cuda":
        return Blocking(64, 64, 128 if dense else None, dense)
    from clearhead.attention.sparse.launch import tiles_for

    tiles = tiles_for(dtype, max(D, E))
    long = None if tiles.long is None else tiles.long.forward.M
    return Blocking(tiles.forward.M, tiles.key.M, 1024 if dense else None, dense, long)


def _has_dense(device: torch.device, dtype: torch.dtype, D: int, E: int) -> bool:
    """Whether torch has a kernel that gives its log-sum-exp, for queries of width D and values of width E."""
    if device.type != "cuda":
        return device.type == "cpu" and D == E
    if torch.are_deterministic_algorithms_enabled():
        return False  # its backward adds up in whatever order threads come
    return dtype in (torch.float16, torch.bfloat16) and D % 8 == 0 and E % 8 == 0 and max(D, E) <= 128


def _folded(mask: Mask, call: AttentionInputs, lead: torch.Size) -> Mask:
    """A mask with several batch dimensions as one with a single one, as the tensors are folded."""
    return allow(mask_to_bhts(mask.dense(call.T, call.S, query_offset=call.query_offset, device=call.q.device), lead))


# -- plans of a graph that is being compiled --------------------------------------------------------------------------
#
# Dynamo hands only constants to a function that runs at compile time. A mask that was put together inside the traced
# code is none, but its text is; of an object made there, such as a `Blocking`, only the defaults would be handed on.

_OURS = (
    kinds.Full,
    kinds.Causal,
    kinds.Window,
    kinds.Every,
    kinds.Dilated,
    kinds.Prefix,
    kinds.Blocks,
    kinds.Scattered,
)
_FIELDS = {kind.__name__: [field.name for field in fields(kind)] for kind in _OURS}
_Text = tuple[str, str]  # the operator that an expression ends in, if any, and the expression


def _recipe(call: AttentionInputs) -> tuple[Any, ...] | None:
    """What a plan is made of (see `gathered_ops.Recipe`), where mask and sizes are constants of the graph."""
    text = spell(as_mask(call.mask)) if all([_is_static(n) for n in (call.T, call.S, call.query_offset)]) else None
    if text is None:
        return None
    cut = blocking_for(call)
    blocking = (cut.query_rows, cut.key_rows, cut.min_dense_columns, cut.dense_causal, cut.long_rows)
    return call.q.device, text, call.T, call.S, call.query_offset, *blocking


def spell(mask: Mask) -> str | None:
    """The mask as `parse` reads it; None where it holds a tensor, or a number that is no constant of the graph."""
    if not fold(mask, leaf=_is_constant, both=operator.and_, either=operator.and_, inverse=bool):
        return None
    text = fold(
        mask,
        leaf=_leaf,
        both=_joined(" & "),
        either=_joined(" | "),
        inverse=lambda part: ("~", "~" + _inside(part)),
        transposed=lambda part: ("", _inside(part) + ".T"),
    )
    return text[1]


def _is_static(value: int) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def _is_constant(atom: Atom) -> bool:
    if type(atom.leaf) not in _OURS:
        return False
    return all([_is_static(getattr(atom.leaf, name)) for name in _FIELDS[type(atom.leaf).__name__]])


def _leaf(atom: Atom) -> _Text:
    name = type(atom.leaf).__name__
    numbers = [str(int(getattr(atom.leaf, field))) for field in _FIELDS[name]]
    return "", name.lower() + "(" + ", ".join(numbers) + ")"


def _joined(sign: str) -> Callable[[_Text, _Text], _Text]:
    # A row of one sign gets no brackets, however long: nested, it might be too deep.
    return lambda a, b: (sign, _inside(a, sign) + sign + _inside(b))


def _inside(part: _Text, sign: str = "") -> str:
    return part[1] if part[0] in ("", sign) else "(" + part[1] + ")"
