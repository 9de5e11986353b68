"""The predicted cost of a module: parameters, FLOPs, bytes accessed, memory and kernels, by part and in total.

Every count has a formula. A part is a module path; the layers of a list are one part (`blocks.*.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial

import torch

from clearhead._core.json_types import JSONObject
from clearhead._core.text_tables import html_table, table
from clearhead.analysis.cost.dispatch import device_plan
from clearhead.analysis.cost.formulas import FormulaSolver, SymbolicCount
from clearhead.analysis.cost.machine import Machine, dtype_name
from clearhead.analysis.cost.op_recorder import ExecutionLog, TermKey, normalize_path
from clearhead.analysis.cost.operators import Ceiling, KernelCost
from clearhead.analysis.cost.quantities import (
    AttentionPairs,
    MemoryCost,
    PartCost,
    PredictedTime,
    readable_bytes,
    readable_count,
)

ADAM_STATES = 2  # values that AdamW stores per parameter
PathTerms = Iterator[tuple[str, int]]


@dataclass(frozen=True)
class LogTerms:
    """Selects the terms of a quantity in some phases, of all parts or of one; see `ExecutionLog.terms`."""

    quantity: str
    phases: tuple[str, ...] = ("",)
    part: str | None = None

    def __call__(self, log: ExecutionLog) -> PathTerms:
        if self.part is not None:
            for phase in self.phases:
                yield from log.terms.get(TermKey(self.quantity, phase, self.part), ())
            return
        for key, terms in log.terms.items():
            if key.quantity == self.quantity and key.phase in self.phases:
                yield from terms

    def of(self, part: str) -> LogTerms:
        """Return the selection of one part."""
        return replace(self, part=part)


_FORWARD = LogTerms("flops", ("forward",))
_BACKWARD = LogTerms("flops", ("backward", "recompute"))
_RECOMPUTED = LogTerms("flops", ("recompute",))
_FLOPS = LogTerms("flops", ("forward", "backward", "recompute"))
_BYTES_ACCESSED = LogTerms("bytes", ("forward",))
_PARAMETERS = LogTerms("parameters")
_SAVED = LogTerms("saved")


def _parameter_bytes(log: ExecutionLog, times: int) -> PathTerms:
    return ((p.path, times * p.n_bytes) for p in log.parameters.values())


def _live(log: ExecutionLog, time: int, kind: str | None = None) -> PathTerms:
    return ((s.path, s.n_bytes) for s in log.storages if s.is_live(time) and kind in (None, s.kind))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A predicted cost: the executed operators, and all quantities derived from them.

    FLOPs, bytes and parameters are `SymbolicCount`: read `.value`, `.formula` or `.latex`.

    Example:
        >>> c = ch.cost("gpt2", tokens=1024, batch=8, training=True)
        >>> c.forward.formula, c.memory.peak.value, c.time(Machine.read("h200")).seconds
    """

    name: str
    batch: int
    dtype: torch.dtype
    training: bool
    impl: str
    device: str
    activation_checkpointing: bool
    sizes: dict[str, int]
    log: ExecutionLog = field(repr=False)
    solver: FormulaSolver = field(repr=False)
    has_kv_cache: bool = False
    has_source: bool = False  # an encoder-decoder
    max_len: int | None = None  # most tokens that the model takes

    def __getstate__(self) -> JSONObject:
        """Return the fields without the cached counts, which are computed again."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    # ------------------------------------------------------------------ totals and parts

    @cached_property
    def parameters(self) -> SymbolicCount:
        """Number of parameters."""
        return self.solver.count(_PARAMETERS)

    @cached_property
    def forward(self) -> SymbolicCount:
        """FLOPs of the forward pass."""
        return self.solver.count(_FORWARD)

    @cached_property
    def backward(self) -> SymbolicCount:
        """FLOPs of backward, including recomputation."""
        return self.solver.count(_BACKWARD)

    @cached_property
    def recomputed(self) -> SymbolicCount:
        """FLOPs of recomputation in backward."""
        return self.solver.count(_RECOMPUTED)

    @cached_property
    def flops(self) -> SymbolicCount:
        """FLOPs of the whole step."""
        return self.solver.count(_FLOPS)

    @cached_property
    def bytes_accessed(self) -> SymbolicCount:
        """Bytes read and written by the kernels of the forward pass."""
        return self.solver.count(_BYTES_ACCESSED)

    @property
    def unknown_ops(self) -> dict[str, int]:
        """Operators of unknown FLOPs, with their number of calls; only their bytes are counted."""
        return self.log.unknown_ops

    @property
    def no_formula_reason(self) -> str:
        """Why a formula that was read is a plain number; empty if there is none."""
        return self.solver.failure_reason

    @cached_property
    def parts(self) -> tuple[PartCost, ...]:
        """The cost of each module, in order of execution."""
        with_parameters = (normalize_path(parameter.path) for parameter in self.log.parameters.values())
        return tuple(map(self._part, dict.fromkeys([*self.log.launches, *with_parameters])))

    def _part(self, name: str) -> PartCost:
        def count(terms: LogTerms) -> SymbolicCount:
            return self.solver.count(terms.of(name))

        return PartCost(
            name=name,
            parameters=count(_PARAMETERS),
            forward=count(_FORWARD),
            backward=count(_BACKWARD),
            bytes_accessed=count(_BYTES_ACCESSED),
            saved=count(_SAVED),
            kernel_launches=self.log.launches[name],
        )

    @property
    def total(self) -> PartCost:
        """The sum of all parts."""
        return PartCost(
            name="total",
            parameters=self.parameters,
            forward=self.forward,
            backward=self.backward,
            bytes_accessed=self.bytes_accessed,
            saved=self.memory.activations,
            kernel_launches=self.kernel_launches,
        )

    @property
    def bottleneck(self) -> str:
        """The part with the most FLOPs in the forward pass."""
        return max(self.parts, key=lambda part: part.forward.value).name

    @property
    def unaligned_gemms(self) -> tuple[str, ...]:
        """Parts with a product of a width that is not a multiple of 8, which is slow on a GPU in half precision."""
        paths = (r.path for r in self.log.ops if any(k.ceiling is Ceiling.UNALIGNED_GEMM for k in r.kernels))
        return tuple(dict.fromkeys(map(normalize_path, paths)))

    @cached_property
    def pairs(self) -> AttentionPairs | None:
        """Query-key pairs of the self-attention that a mask applies to, or None without attention."""
        records = [(i, r) for i, r in enumerate(self.log.attention) if not self.has_source or "decoder" in r.path]
        if not records:
            return None
        index, record = next(((i, r) for i, r in records if r.mask is not None), records[0])

        def pairs(kind: str) -> SymbolicCount:
            def select(log: ExecutionLog) -> list[tuple[str, int]]:  # doubled, because half a square can be fractional
                call = log.attention[index]
                if kind == "allowed" and call.is_causal and call.queries == call.keys:
                    return [("", call.dense), ("", call.batch * call.queries)]
                n_pairs = getattr(call, kind)
                return [("", 2 * (call.dense if n_pairs is None else n_pairs))]

            return self.solver.count(select, divisor=2)

        planned = record.dense
        if record.mask is not None:
            mask_plan = device_plan(self.device, record.mask, record, self.dtype)
            planned = record.mask_repeats * mask_plan.computed_pairs
        computed = "allowed" if record.is_causal and self.impl != "reference" else "computed"
        return AttentionPairs(pairs("dense"), pairs("allowed"), pairs(computed), record, planned)

    # ------------------------------------------------------------------ memory

    @cached_property
    def memory(self) -> MemoryCost:
        """Memory of parameters, gradients, optimizer, activations and KV cache, and the peak."""
        count = self.solver.count
        peak_time = self.log.peak_time()
        parameters = count(partial(_parameter_bytes, times=1))
        optimizer = count(partial(_parameter_bytes, times=ADAM_STATES))
        kinds = dict.fromkeys(storage.kind for storage in self.log.storages if storage.is_live(peak_time))
        breakdown = {kind: count(partial(_live, time=peak_time, kind=kind)) for kind in kinds}
        if self.training:
            breakdown["optimizer"] = optimizer

        def naive_weights(log: ExecutionLog) -> PathTerms:
            return ((r.path, r.heads * r.dense * 4) for r in log.attention)

        def fused_statistics(log: ExecutionLog) -> PathTerms:
            return ((r.path, r.batch * r.heads * r.queries * 4) for r in log.attention)

        is_cached = [self.has_kv_cache and (not self.has_source or "decoder" in r.path) for r in self.log.attention]

        def kv_cache(log: ExecutionLog) -> PathTerms:
            for r, cached in zip(log.attention, is_cached, strict=True):
                if cached:
                    yield r.path, 2 * r.batch * r.keys * r.key_heads * r.width * r.itemsize

        def peak(log: ExecutionLog) -> PathTerms:
            yield from _live(log, peak_time)
            if self.training:
                yield from _parameter_bytes(log, ADAM_STATES)

        return MemoryCost(
            parameters=parameters,
            gradients=parameters if self.training else SymbolicCount(0),
            optimizer=optimizer if self.training else SymbolicCount(0),
            activations=count(_SAVED),
            attention_weights_naive=count(naive_weights),
            attention_statistics_fused=count(fused_statistics),
            kv_cache=count(kv_cache),
            peak=count(peak),
            peak_op=self.log.describe(peak_time),
            peak_breakdown=breakdown,
        )

    # ------------------------------------------------------------------ time

    def time(self, machine: Machine) -> PredictedTime:
        """Predict the duration on a machine: arithmetic, memory traffic and launch of each kernel, and host time."""
        mode = "training" if self.training else "forward"
        launched = machine.host_pass_s.get(mode, 0.0)  # when the host has launched all kernels so far
        finished = 0.0
        phases = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        limits = {"arithmetic": 0.0, "memory_traffic": 0.0, "kernel_launches": 0.0}
        for phase, _, kernel in self.kernels():
            parts = machine.seconds(kernel, self.dtype)
            launched += machine.host_launch_s.get(mode, 0.0)
            finished = max(finished, launched) + sum(parts)
            phases[phase] += sum(parts)
            for limit, seconds in zip(limits, parts, strict=True):
                limits[limit] += seconds
        return PredictedTime(**phases, **limits, host_wait=max(0.0, finished - sum(phases.values())))

    def ceilings(self, machine: Machine) -> dict[str, tuple[float, str]]:
        """Return the seconds of each part on a machine, and the ceiling that limits the part most."""
        totals: dict[str, dict[str, float]] = {}
        for _, path, kernel in self.kernels():
            part = totals.setdefault(normalize_path(path), {})
            if kernel.ceiling is Ceiling.REDUCTION:
                names = (Ceiling.GEMM.value, kernel.ceiling.value, "kernel launches")
            else:
                names = (kernel.ceiling.value, "bandwidth", "kernel launches")
            for name, seconds in zip(names, machine.seconds(kernel, self.dtype), strict=True):
                part[name] = part.get(name, 0.0) + seconds
        return {name: (sum(part.values()), max(part, key=part.__getitem__)) for name, part in totals.items()}

    @property
    def kernel_launches(self) -> int:
        """Number of kernels of one step."""
        return sum(1 for _ in self.kernels())

    def kernels(self) -> Iterator[tuple[str, str, KernelCost]]:
        """Yield phase, path and cost of every kernel of a step, in order."""
        for record in self.log.ops:
            phase = "forward" if record.phase == "forward" else "backward"
            yield from ((phase, record.path, kernel) for kernel in record.kernels)
        if self.training:
            # AdamW reads parameter, gradient and two moments, and writes all but the gradient.
            yield "optimizer", "optimizer", KernelCost((7 * self.memory.parameters.value,))

    # ------------------------------------------------------------------ output

    def formulas(self, *, latex: bool = False) -> dict[str, str]:
        """Return the formula of every total and every part, as text or as LaTeX."""
        counts = {name: getattr(self, name) for name in ("parameters", "forward", "backward", "bytes_accessed")}
        counts |= {f"memory.{name}": count for name, count in self.memory.rows()}
        for part in self.parts:
            counts |= {f"{part.name}.parameters": part.parameters, f"{part.name}.forward": part.forward}
        return {name: count.latex if latex else str(count.formula) for name, count in counts.items() if count.value}

    def to_dict(self, *, formulas: bool = True) -> JSONObject:
        """Return the JSON document of `clearhead cost --json`, with formulas if they are available."""

        def plain(count: SymbolicCount) -> object:
            return {"value": count.value, "formula": str(count.formula)} if formulas else count.value

        def plain_fields(source: object, *names: str) -> JSONObject:
            return {name: plain(getattr(source, name)) for name in names}

        settings = ("name", "batch", "training", "impl", "device", "activation_checkpointing", "sizes")
        memory = {name: plain(count) for name, count in self.memory.rows()}
        breakdown = {name: plain(count) for name, count in self.memory.peak_breakdown.items()}
        pairs = {name: getattr(self.pairs, name).value for name in ("dense", "allowed", "computed") if self.pairs}
        columns = ("parameters", "forward", "backward", "bytes_accessed", "saved")
        return {
            **{name: getattr(self, name) for name in settings},
            "dtype": dtype_name(self.dtype),
            **plain_fields(self, "parameters", "recomputed", "bytes_accessed"),
            "flops": plain_fields(self, "forward", "backward"),
            "kernel_launches": self.kernel_launches,
            "memory": {**memory, "peak_op": self.memory.peak_op, "peak_breakdown": breakdown},
            "pairs": pairs or None,
            "parts": [
                {"part": part.name, **plain_fields(part, *columns), "kernel_launches": part.kernel_launches}
                for part in self.parts
            ],
            "bottleneck": self.bottleneck,
            "unaligned_gemms": list(self.unaligned_gemms),
            "unknown_ops": self.unknown_ops,
            "no_formula_reason": self.no_formula_reason if formulas else "",
        }

    @property
    def _title(self) -> str:
        mode = "training" if self.training else "inference"
        return f"{self.name}, batch {self.batch}, {dtype_name(self.dtype)}, {mode}"

    def _part_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("part", "parameters", "forward FLOPs", "bytes accessed")]
        for part in (*self.parts, self.total):
            counts = (readable_count(part.forward.value), readable_bytes(part.bytes_accessed.value))
            rows.append((part.name, f"{part.parameters.value:,}", *counts))
        return rows

    def _memory_rows(self) -> list[tuple[str, ...]]:
        rows = [(label, readable_bytes(count.value)) for label, count in self.memory.labeled_rows()]
        return [("memory", "bytes"), *rows]

    def __str__(self) -> str:
        parts = table(self._part_rows(), right=(1, 2, 3))
        memory = table(self._memory_rows(), right=(1,))
        return f"{self._title}\n{parts}\n\n{memory}"

    def _repr_html_(self) -> str:
        parts = html_table(self._part_rows(), right=(1, 2, 3), caption=self._title)
        return parts + html_table(self._memory_rows(), right=(1,))
