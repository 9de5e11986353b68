"""The sparse implementation of `attend`: each block of queries is computed with the keys it may see only.

There are two kernels. If each query sees an interval of keys, as under `causal() & documents(ids)`, the intervals are
computed on the device (`row_intervals`) and a kernel iterates over consecutive keys. Nothing is read or built on the
host, so new data and new lengths cost little. For any other mask the work follows a plan (`attention.sparse.plan`):
keys that every query sees are computed by a dense kernel, all others by a kernel that gathers columns.

Both are Triton kernels on a GPU and torch operations on a CPU. A learned bias gets its gradient from the operations of
plans on a CPU; the Triton kernels compute none, so that SDPA handles such calls."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead._core.tensor_state import HAS_TRITON, are_concrete, runs_triton
from clearhead.attention import sdpa
from clearhead.attention.inputs import (
    HALF_PRECISION,
    AttentionInputs,
    Execution,
    Implementation,
    mask_to_bhts,
    to_bhtd,
)
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import SoftCapped
from clearhead.attention.sparse.cost_model import WORTH_PLANNING, Rates, rates_for
from clearhead.attention.sparse.interval_choice import (
    bias_bhts,
    intervals_beat_sdpa,
    intervals_beat_sdpa_on_cpu,
    row_intervals_for,
    run_intervals,
    usable_intervals,
)
from clearhead.attention.sparse.plan import Blocking, Plan, plan_checked, planned_length
from clearhead.attention.sparse.row_intervals import RowIntervals
from clearhead.masks import Causal, Full, Mask, allow, leaves
from clearhead.masks.data import DataMask
from clearhead.masks.pair_interval import PairIntervals

_MAX_WIDTH = 256
DENSE_MULTIPLE = 1024
"""On a GPU, a plan has a dense part only for lengths that are multiples of this number: the first call of cuDNN's
attention with a new length takes about 100 ms."""
_PREDICTED_FASTER = "its plan is predicted to be faster than SDPA"
_MODIFIES_SCORES = "its kernel adds the bias and applies the soft cap to a tile of scores at a time"
_SKIPS_KEYS = "each query sees an interval of keys, and skipping the others is predicted to be faster than SDPA"


class SparseImplementation(Implementation):
    """Compute only the pairs in the plan of the mask."""

    name = "sparse"

    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        if inputs.mask is None and not inputs.modifies_scores and not sdpa.needs_fp32_upcast(inputs):
            return "there is no mask, so nothing to skip"
        reason = sdpa.kernel_unsupported_reason(inputs)
        if reason is not None:
            return reason
        assert isinstance(inputs.normalizer, Softmax)
        if inputs.normalizer.dropout:
            return "dropout of attention weights is not supported"
        if _is_exporting():
            return "a plan exists in this process only, and exported programs run in others"
        if torch.compiler.is_compiling():
            from clearhead.attention.sparse.compile import plan_key

            if usable_intervals(inputs) is None and plan_key(inputs) is None:
                return "torch.compile needs static shapes and a mask without tensors, or a mask of intervals"
        elif not _is_concrete_call(inputs):
            return "torch.func transforms and FakeTensorMode are not supported"
        return self._kernel_unsupported_reason(inputs)

    def _kernel_unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        """Return why the kernel of the device does not support a call, or None."""
        if inputs.q.is_cuda:
            return triton_unsupported_reason(inputs)
        if inputs.q.device.type != "cpu":
            return f"there is no sparse kernel for {inputs.q.device.type}"
        return None

    def plan_for(self, inputs: AttentionInputs) -> Plan | RowIntervals | None:
        """Return the plan of a call; None while a graph is compiled, which contains the handle of its plan."""
        if torch.compiler.is_compiling():
            return None
        intervals = usable_intervals(inputs)
        if intervals is not None:
            return row_intervals_for(inputs, intervals)
        lead = inputs.q.shape[:-3]
        if len(lead) == 1 or inputs.mask is None or not inputs.mask.batch_shape:
            return plan_for(inputs)
        return plan_for(replace(inputs, mask=_fold_batch(inputs.mask, inputs, lead)))

    def propose(self, inputs: AttentionInputs) -> Execution | None:
        """Return an execution if the kernel supports the call and its plan is predicted to be faster than SDPA."""
        q, mask = inputs.q, inputs.mask
        if inputs.distance_bias is not None or type(inputs.scores) is SoftCapped:  # no call of a property
            return self._propose_modified_scores(inputs)
        if q.is_cuda and mask is not None and 1 < q.shape[-2] * inputs.k.shape[-2] < WORTH_PLANNING:
            return self._propose_short(inputs)
        if not may_be_faster(inputs) or _is_exporting():
            return None
        if q.is_cuda or not (mask is None or mask.is_structural):
            intervals = usable_intervals(inputs)
            if intervals is not None:
                return self._propose_intervals(inputs, intervals)
        if torch.compiler.is_compiling():
            if not _is_predicted_faster_in_graph(inputs) or self.unsupported_reason(inputs) is not None:
                return None
            return Execution(self, None, _PREDICTED_FASTER)
        # Plans of tensors without a modification count cannot be cached: every call would build one.
        if not _is_concrete_call(inputs):
            return None
        if mask is not None and not mask.is_structural and mask.versions is None:
            return None
        plan = plan_for(inputs)  # late, because it can read the mask's data
        if not is_predicted_faster(inputs, plan) or sdpa.kernel_unsupported_reason(inputs) is not None:
            return None
        if q.is_cuda and self._kernel_unsupported_reason(inputs) is not None:
            return None
        return Execution(self, plan if q.dim() == 4 else self.plan_for(inputs), _PREDICTED_FASTER)

    def _propose_modified_scores(self, inputs: AttentionInputs) -> Execution | None:
        """Return an execution of a call whose bias by distance or soft cap only these kernels compute tile by tile.

        For few pairs on a CPU, and for one query, SDPA with a bias as a tensor needs little memory."""
        q, T, S = inputs.q, inputs.q.shape[-2], inputs.k.shape[-2]
        if T == 1 or q.shape[-1] == 0 or (not q.is_cuda and T * S < WORTH_PLANNING):
            return None
        if self.unsupported_reason(inputs) is not None:
            return None
        return Execution(self, self.plan_for(inputs), _MODIFIES_SCORES)

    def _propose_short(self, inputs: AttentionInputs) -> Execution | None:
        """Return an execution of a call that is too short for a plan; row intervals need none."""
        if inputs.q.shape[-2] == 1 or isinstance(inputs.mask, Causal) or torch.compiler.is_compiling():
            return None
        if not isinstance(inputs.normalizer, Softmax) or inputs.normalizer.dropout or _is_exporting():
            return None
        intervals = usable_intervals(inputs)
        return None if intervals is None else self._propose_intervals(inputs, intervals)

    def _propose_intervals(self, inputs: AttentionInputs, intervals: PairIntervals) -> Execution | None:
        """Return an execution with the kernel of row intervals, unless SDPA is predicted to be faster."""
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and not _is_concrete_call(inputs):
            return None
        if is_compiling and not inputs.q.is_cuda:
            return None  # in a graph for a CPU, the operations of the fused kernel are fused with others
        if sdpa.kernel_unsupported_reason(inputs) is not None or self._kernel_unsupported_reason(inputs) is not None:
            return None
        if is_compiling:
            return Execution(self, None, _SKIPS_KEYS)
        if inputs.q.is_cuda:
            is_faster = intervals_beat_sdpa(inputs, intervals)
            return Execution(self, row_intervals_for(inputs, intervals), _SKIPS_KEYS) if is_faster else None
        rows = row_intervals_for(inputs, intervals)
        return Execution(self, rows, _SKIPS_KEYS) if intervals_beat_sdpa_on_cpu(inputs, rows) else None

    def run(self, inputs: AttentionInputs, plan: Plan | RowIntervals | None = None) -> Tensor:
        is_compiling = torch.compiler.is_compiling()
        if isinstance(plan, RowIntervals) or (is_compiling and usable_intervals(inputs) is not None):
            return run_intervals(inputs, plan if isinstance(plan, RowIntervals) else None)
        from clearhead.attention.sparse.op import attend_by_plan, gathered

        dot = inputs.dot_product()
        assert dot is not None
        q = dot.q
        lead = q.shape[:-3]
        bias = None if inputs.bias is None else bias_bhts(inputs, lead)
        k, v = inputs.k, inputs.v
        if q.dtype in HALF_PRECISION and not runs_triton(q):
            # Half precision would round the output from which the backward pass computes its row sums, and a low
            # temperature magnifies that error. The kernel for CPUs converts its inputs to this dtype anyway.
            q, k, v = q.float(), k.float(), v.float()
        if len(lead) != 1:
            q, k, v = to_bhtd(q), to_bhtd(k), to_bhtd(v)
        distance_bias = None if inputs.distance_bias is None else inputs.scaled_distance_bias()
        if is_compiling:
            from clearhead.attention.sparse.compile import constant_handle, plan_key

            key = plan_key(inputs)
            assert key is not None  # checked by unsupported_reason
            out: Tensor = gathered(q, k, v, bias, constant_handle(key), dot.scale, distance_bias, dot.cap)[0]
        else:
            assert plan is not None
            out = attend_by_plan(q, k, v, bias, plan, dot.scale, distance_bias, dot.cap)
        if out.dtype != inputs.q.dtype:
            out = out.to(inputs.q.dtype)
        return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


SPARSE = SparseImplementation()


def may_be_faster(inputs: AttentionInputs) -> bool:
    """Return whether a plan of this call may be faster than SDPA, without building one."""
    if inputs.q.shape[-2] * inputs.k.shape[-2] < WORTH_PLANNING:
        return False
    if (inputs.mask is None or isinstance(inputs.mask, Causal)) and not sdpa.needs_fp32_upcast(inputs):
        return False  # SDPA skips the hidden half itself
    if not isinstance(inputs.normalizer, Softmax) or inputs.normalizer.dropout:
        return False  # unsupported, so a plan would be useless
    return inputs.q.device.type in ("cpu", "cuda")


def triton_unsupported_reason(inputs: AttentionInputs) -> str | None:
    """Return why the Triton kernels do not support a call, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if inputs.bias is not None and inputs.bias.requires_grad:
        return "the bias needs a gradient, which the Triton kernels do not compute"
    if inputs.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the Triton kernels support float16, bfloat16 and float32, not {inputs.q.dtype}"
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    return f"the Triton kernels support heads up to {_MAX_WIDTH} wide, not {width}" if width > _MAX_WIDTH else None


def _is_exporting() -> bool:
    """Return whether torch.export is tracing. In torch 2.11, `torch.compiler.is_exporting()` is True in every graph."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _is_concrete_call(inputs: AttentionInputs) -> bool:
    """Return whether all tensors of the call have data, and no torch.func transform is active."""
    if not are_concrete(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.distance_bias):
        return False
    if isinstance(inputs.scores, nn.Module) and not are_concrete(*inputs.score_parameters):
        return False
    if inputs.mask is None or inputs.mask.is_structural:
        return True
    return are_concrete(*[x for leaf, _ in leaves(inputs.mask) if isinstance(leaf, DataMask) for x in leaf.data])


def is_predicted_faster(inputs: AttentionInputs, sparse_plan: Plan) -> bool:
    """Return whether the plan of a call is predicted to be faster than SDPA; stored with the plan."""
    work = work_key(inputs)
    if work not in sparse_plan.comparisons:
        heads, width, backward, dtype, sdpa_dtype = work
        sparse_rates, sdpa_rates = (rates_for(inputs.q.device, kind) for kind in (dtype, sdpa_dtype))
        is_faster = beats_sdpa(sparse_plan, heads, width, backward, sparse_rates, sdpa_rates=sdpa_rates)
        sparse_plan.comparisons[work] = is_faster
    return sparse_plan.comparisons[work]


def _is_predicted_faster_in_graph(inputs: AttentionInputs) -> bool:
    """Return whether the plan of a call is predicted to be faster than SDPA, while a graph is compiled."""
    # Not imported above, because its decorators import torch's compiler.
    from clearhead.attention.sparse.compile import constant_beats_sdpa, is_static, plan_key

    heads, width, backward, dtype, sdpa_dtype = work_key(inputs)
    key = plan_key(inputs)
    if key is None or not is_static(heads) or not is_static(width):
        return False
    is_faster: bool = constant_beats_sdpa(key, (dtype, sdpa_dtype), (heads, width, backward))
    return is_faster


def work_key(inputs: AttentionInputs) -> tuple[int, int, bool, torch.dtype, torch.dtype]:
    """Return heads (batch × heads), width, whether gradients are computed, and the dtypes of the kernel and of SDPA."""
    q, v = inputs.q, inputs.v
    heads = 1
    for n in q.shape[:-2]:
        heads = heads * n
    needs_grad = q.requires_grad or inputs.k.requires_grad or v.requires_grad
    sdpa_dtype = q.dtype if inputs.bias is None or not sdpa.needs_fp32_upcast(inputs) else inputs.acc_dtype
    return heads, max(q.shape[-1], v.shape[-1]), torch.is_grad_enabled() and needs_grad, q.dtype, sdpa_dtype


def beats_sdpa(
    sparse_plan: Plan,
    heads: int,
    width: int,
    backward: bool,
    rates: Rates,
    device: torch.device | None = None,
    *,
    sdpa_rates: Rates | None = None,
) -> bool:
    """Return whether a plan is predicted to be faster than SDPA.

    Args:
        sparse_plan: The plan.
        heads: Batch size times number of heads.
        width: Width of a head.
        backward: Whether gradients are computed too.
        rates: Rates of the device.
        device: Device of the call, if it differs from the plan's.
        sdpa_rates: Rates for SDPA if they differ, as for another dtype.

    Returns:
        True if the plan is predicted to be faster."""
    device_ms = sparse_plan.predicted_ms(heads=heads, width=width, rates=rates, backward=backward)
    sparse_ms = max(device_ms, (rates.training if backward else rates.forward).plan_host)
    sdpa_rates = rates if sdpa_rates is None else sdpa_rates
    return sparse_ms < sdpa_rates.sdpa_ms(sparse_plan.fused_work(heads, device), width=width, backward=backward)


def plan_for(inputs: AttentionInputs) -> Plan:
    """Return the plan of a validated call."""
    q, mask = inputs.q, Full() if inputs.mask is None else inputs.mask
    T, S = q.shape[-2], inputs.k.shape[-2]
    if q.is_cuda and T == S and mask.is_structural and not (mask.depends_on_length or mask.constrains_sizes):
        T = S = planned_length(T)  # the kernels ignore rows and columns beyond the length of the call
    return plan_checked(mask, T, S, inputs.query_offset, q.device, blocking_for(inputs))


def blocking_for(inputs: AttentionInputs) -> Blocking:
    """Return the blocking for a call: the tile sizes of its kernels, and dense calls if there is a dense kernel."""
    q = inputs.q
    dense = inputs.bias is None and inputs.distance_bias is None and type(inputs.scores) is not SoftCapped
    if q.is_cuda and not torch.compiler.is_compiling() and (q.shape[-2] | inputs.k.shape[-2]) % DENSE_MULTIPLE:
        dense = False
    return blocking_on(q.device, q.dtype, q.shape[-1], inputs.v.shape[-1], dense=dense)


def blocking_on(device: torch.device, dtype: torch.dtype, D: int, E: int, *, dense: bool = True) -> Blocking:
    """Return the blocking for queries of width D and values of width E on any device, available or not."""
    dense = dense and _has_dense_kernel(device, dtype, D, E)
    if device.type != "cuda":
        return Blocking(64, 64, 128 if dense else None, dense)
    from clearhead.attention.sparse.launch import tiles_for

    tiles = tiles_for(dtype, max(D, E))
    long_rows = None if tiles.long is None else tiles.long.forward.M
    return Blocking(tiles.forward.M, tiles.key.M, 1024 if dense else None, dense, long_rows)


def _has_dense_kernel(device: torch.device, dtype: torch.dtype, D: int, E: int) -> bool:
    """Return whether torch has a kernel that returns its log-sum-exp, for queries of width D and values of width E."""
    if device.type != "cuda":
        return device.type == "cpu" and D == E
    if torch.are_deterministic_algorithms_enabled():
        return False  # its backward sums in a varying order
    return dtype in (torch.float16, torch.bfloat16) and D % 8 == 0 and E % 8 == 0 and max(D, E) <= 128


def _fold_batch(mask: Mask, inputs: AttentionInputs, lead: torch.Size) -> Mask:
    """Return the mask with its batch dimensions folded into one, like the tensors."""
    return allow(
        mask_to_bhts(mask.dense(inputs.T, inputs.S, query_offset=inputs.query_offset, device=inputs.q.device), lead)
    )
