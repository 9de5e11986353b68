"""What a prediction says: parameters, operations, traffic, memory and kernels, part by part and in total, each a number
with its formula. A part is a module, by its path; the layers of a list are one part (`blocks.*.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from clearhead.costs.formulas import Amount, Reader, Select, normal
from clearhead.costs.machine import Machine, dtype_name
from clearhead.costs.operators import Ceiling, Kernel
from clearhead.costs.watch import Log
from clearhead.costs.ways import Look, plan_on
from clearhead.masks import Mask
from clearhead.tables import html_table, table

ADAM = 2  # numbers that AdamW keeps for each parameter
Terms = Iterator[tuple[str, int]]


@dataclass(frozen=True)
class Part:
    """One module of a model, over all layers of its list. Operations are those of matrix products, two for each
    multiplication with its addition; `kept` are bytes that wait for the backward pass."""

    name: str
    parameters: Amount
    forward: Amount
    backward: Amount
    traffic: Amount
    kept: Amount
    kernels: int


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and a key, over the batch, for one head: all there are, those allowed, those computed here."""

    dense: Amount
    allowed: Amount
    computed: Amount
    look: Look = field(repr=False)
    planned: int  # what the mask's plan computes: the pairs allowed, and those beside them in a tile

    @property
    def mask(self) -> Mask | None:
        return self.look.mask

    @property
    def gathers(self) -> bool:
        """Whether the plan is what runs."""
        return self.look.plan is not None


@dataclass(frozen=True)
class Memory:
    """Bytes. `attention_reference` are the (T, S) weights of all layers as the equation builds them, in float32;
    `attention_fused` is what the fused kernel keeps in their place. `cache` is what a `KVCache` of this length holds;
    it is no part of `peak`, which is that of one training step, or of one forward pass without gradients."""

    weights: Amount
    gradients: Amount
    optimiser: Amount
    activations: Amount
    attention_reference: Amount
    attention_fused: Amount
    cache: Amount
    peak: Amount
    peak_when: str
    peak_made_of: dict[str, Amount]

    def rows(self) -> Iterator[tuple[str, Amount]]:
        yield from ((name, getattr(self, name)) for name in ("weights", "gradients", "optimiser", "activations"))
        yield "attention matrices, by the equation", self.attention_reference
        yield "attention matrices, fused", self.attention_fused
        yield from (("KV cache", self.cache), ("peak", self.peak))


@dataclass(frozen=True)
class Time:
    """Predicted seconds, and how many of them go into arithmetic, into memory traffic and into launching kernels.

    `waiting` is the device's for its host: a kernel begins when it has been issued and the one before it is done."""

    forward: float
    backward: float
    optimiser: float
    arithmetic: float
    traffic: float
    launches: float
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimiser + self.waiting

    @property
    def limit(self) -> str:
        """What the time is mostly spent on."""
        words = {"traffic": "memory traffic", "launches": "launching kernels", "waiting": "issuing kernels"}
        most = max(("arithmetic", *words), key=lambda name: getattr(self, name))
        return words.get(most, most)


def _steps(what: str, *phases: str) -> Select:
    """What kernels of these phases move, or multiply."""

    def select(log: Log) -> Terms:
        for step in log.steps:
            if step.phase in phases:
                yield from ((step.path, n) for kernel in step.kernels for n in getattr(kernel, what))

    return select


_FORWARD = _steps("products", "forward")
_BACKWARD = _steps("products", "backward", "recompute")
_TRAFFIC = _steps("moved", "forward")


def _amount(says: str, select: Select) -> Any:
    """A property of `Cost`: the sum of what is selected."""
    made = cached_property(lambda self: self.reader.amount(select))
    made.__doc__ = says
    return made


def _learnt(log: Log) -> Terms:
    return ((p.path, p.elements) for p in log.parameters.values())


def _states(log: Log, times: int) -> Terms:
    return ((p.path, times * p.n_bytes) for p in log.parameters.values())


def _kept(log: Log) -> Terms:
    return ((storage.path, storage.n_bytes) for storage in log.storages if storage.kind == "activations")


def _alive(log: Log, at: int, kind: str | None = None) -> Terms:
    return ((s.path, s.n_bytes) for s in log.storages if s.lives(at) and kind in (None, s.kind))


@dataclass(frozen=True)
class Cost:
    """What was watched, and what follows from it."""

    subject: str
    batch: int
    dtype: torch.dtype
    training: bool
    impl: str
    device: str
    recompute: str | None
    sizes: dict[str, int]
    log: Log = field(repr=False)
    reader: Reader = field(repr=False)
    caches: bool = False  # keys and values are worth keeping
    pair: bool = False  # it reads one sequence and writes another
    longest: int | None = None  # tokens that it takes at most

    # ------------------------------------------------------------------ totals and parts

    parameters = _amount("How many numbers the module learns.", _learnt)
    forward = _amount("Operations of the forward pass.", _FORWARD)
    backward = _amount("Operations of the way back, with what is run again.", _BACKWARD)
    recomputed = _amount("Operations of what is run again on the way back.", _steps("products", "recompute"))
    operations = _amount("All operations.", _steps("products", "forward", "backward", "recompute"))
    traffic = _amount("Bytes that the forward pass moves.", _TRAFFIC)

    @property
    def unknown(self) -> dict[str, int]:
        """Operators whose operations are not known, and how often they ran: their bytes are counted, no operations."""
        return self.log.unknown

    @property
    def why_no_formulas(self) -> str:
        """Why numbers stand where formulas were asked for; empty where none was missing."""
        return self.reader.why_none

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What each module takes of the whole, in the order in which they ran."""
        paths = [step.path for step in self.log.steps] + [p.path for p in self.log.parameters.values()]
        return tuple(map(self._part, dict.fromkeys(map(normal, paths))))

    def _part(self, name: str) -> Part:
        def own(select: Select) -> Amount:
            return self.reader.amount(lambda log: ((path, n) for path, n in select(log) if normal(path) == name))

        kernels = sum(len(step.kernels) for step in self.log.steps if normal(step.path) == name)
        return Part(name, own(_learnt), own(_FORWARD), own(_BACKWARD), own(_TRAFFIC), own(_kept), kernels)

    @property
    def total(self) -> Part:
        """All parts together."""
        sums = (self.parameters, self.forward, self.backward, self.traffic, self.memory.activations)
        return Part("total", *sums, self.n_launches)

    @property
    def bottleneck(self) -> str:
        """The part with the most operations of the forward pass."""
        return max(self.parts, key=lambda part: part.forward.value).name

    @property
    def odd_products(self) -> tuple[str, ...]:
        """Where a product has a width that is no multiple of 8, which a GPU multiplies slowly in half precision."""
        odd = (step.path for step in self.log.steps if any(k.ceiling is Ceiling.ODD for k in step.kernels))
        return tuple(dict.fromkeys(map(normal, odd)))

    @cached_property
    def pairs(self) -> Pairs | None:
        """Of the self-attention that a mask is added to, where there is one."""
        looks = [(i, look) for i, look in enumerate(self.log.looks) if not self.pair or "decoder" in look.path]
        if not looks:
            return None
        at, look = next(((i, look) for i, look in looks if look.mask is not None), looks[0])

        def pairs(which: str) -> Amount:
            def select(log: Log) -> list[tuple[str, int]]:  # twice as many: half of the square is no whole number
                here = log.looks[at]
                if which == "allowed" and here.is_causal and here.queries == here.keys:
                    return [("", here.dense), ("", here.batch * here.queries)]
                counted = getattr(here, which)
                return [("", 2 * (here.dense if counted is None else counted))]

            return self.reader.amount(select, over=2)

        planned = look.dense
        if look.mask is not None:
            planned = look.sequences * plan_on(self.device, look.mask, look, self.dtype).computed
        computed = "allowed" if look.is_causal and self.impl != "reference" else "computed"
        return Pairs(pairs("dense"), pairs("allowed"), pairs(computed), look, planned)

    # ------------------------------------------------------------------ memory

    @cached_property
    def memory(self) -> Memory:
        """Weights, activations and the rest, and the moment at which they take most."""
        amount, at, zero = self.reader.amount, self.log.peak(), Amount(0)
        weights, states = (amount(partial(_states, times=n)) for n in (1, ADAM))
        kinds = dict.fromkeys(storage.kind for storage in self.log.storages if storage.lives(at))
        made_of = {kind: amount(partial(_alive, at=at, kind=kind)) for kind in kinds}
        cached = [self.caches and (not self.pair or "decoder" in look.path) for look in self.log.looks]
        return Memory(
            weights=weights,
            gradients=weights if self.training else zero,
            optimiser=states if self.training else zero,
            activations=amount(_kept),
            attention_reference=amount(lambda log: ((x.path, x.heads * x.dense * 4) for x in log.looks)),
            attention_fused=amount(lambda log: ((x.path, x.batch * x.heads * x.queries * 4) for x in log.looks)),
            cache=amount(
                lambda log: (
                    (x.path, 2 * x.batch * x.keys * x.key_heads * x.width * x.itemsize)
                    for x, is_cached in zip(log.looks, cached, strict=True)
                    if is_cached
                )
            ),
            peak=amount(lambda log: [*_alive(log, at), *(_states(log, ADAM) if self.training else ())]),
            peak_when=self.log.when(at),
            peak_made_of=made_of | ({"optimiser": states} if self.training else {}),
        )

    # ------------------------------------------------------------------ time

    def time(self, machine: Machine) -> Time:
        """How long it takes on this machine: of each kernel arithmetic, traffic and launch, as the host issues them."""
        mode = "training" if self.training else "forward"
        issued = machine.begin.get(mode, 0.0)  # when the host has issued all so far; `done`: when they are done
        done = 0.0
        spent = {"forward": 0.0, "backward": 0.0, "optimiser": 0.0}
        limits = {"arithmetic": 0.0, "traffic": 0.0, "launches": 0.0}
        for phase, _, kernel in self.in_order():
            parts = machine.seconds(kernel, self.dtype)
            issued += machine.issue.get(mode, 0.0)
            done = max(done, issued) + sum(parts)
            spent[phase] += sum(parts)
            for limit, seconds in zip(limits, parts, strict=True):
                limits[limit] += seconds
        return Time(**spent, **limits, waiting=max(0.0, done - sum(spent.values())))

    def ceilings(self, machine: Machine) -> dict[str, tuple[float, str]]:
        """Of each part the seconds it takes, and which ceiling of the machine binds it."""
        spent: dict[str, dict[str, float]] = {}
        for _, path, kernel in self.in_order():
            here, own = spent.setdefault(normal(path), {}), kernel.ceiling
            is_sum = own is Ceiling.ROW_SUM
            names = (Ceiling.ORDINARY.value if is_sum else own.value, own.value if is_sum else "bandwidth", "launches")
            for name, seconds in zip(names, machine.seconds(kernel, self.dtype), strict=True):
                here[name] = here.get(name, 0.0) + seconds
        return {name: (sum(here.values()), max(here, key=here.__getitem__)) for name, here in spent.items()}

    @property
    def n_launches(self) -> int:
        """Kernels of one step."""
        return sum(1 for _ in self.in_order())

    def in_order(self) -> Iterator[tuple[str, str, Kernel]]:
        """Every kernel of a step, one after the other, with its phase and path."""
        for step in self.log.steps:
            phase = "forward" if step.phase == "forward" else "backward"
            yield from ((phase, step.path, kernel) for kernel in step.kernels)
        if self.training:
            # AdamW reads weight, gradient and two moments, and writes all but the gradient.
            yield "optimiser", "optimiser", Kernel((7 * self.memory.weights.value,))

    # ------------------------------------------------------------------ for people and programs

    def formulas(self, *, latex: bool = False) -> dict[str, str]:
        """Every total and every part's formula, as text or as TeX."""
        found = {name: getattr(self, name) for name in ("parameters", "forward", "backward", "traffic")}
        found |= {f"memory.{name}": amount for name, amount in self.memory.rows()}
        for part in self.parts:
            found |= {f"{part.name}.parameters": part.parameters, f"{part.name}.forward": part.forward}
        return {name: amount.latex if latex else str(amount.formula) for name, amount in found.items() if amount.value}

    def to_dict(self, *, formulas: bool = True) -> dict[str, Any]:
        """As `clearhead cost --json` prints it, with formulas where they are known."""

        def both(amount: Amount) -> Any:
            return {"value": amount.value, "formula": str(amount.formula)} if formulas else amount.value

        def all_of(holder: Any, *names: str) -> dict[str, Any]:
            return {name: both(getattr(holder, name)) for name in names}

        names = ("subject", "batch", "training", "impl", "device", "recompute", "sizes")
        memory = {name: both(amount) for name, amount in self.memory.rows()}
        made_of = {name: both(amount) for name, amount in self.memory.peak_made_of.items()}
        counted = {name: getattr(self.pairs, name).value for name in ("dense", "allowed", "computed") if self.pairs}
        told = ("parameters", "forward", "backward", "traffic", "kept")
        return {
            **{name: getattr(self, name) for name in names},
            "dtype": dtype_name(self.dtype),
            **all_of(self, "parameters", "recomputed", "traffic"),
            "operations": all_of(self, "forward", "backward"),
            "kernels": self.n_launches,
            "memory": {**memory, "peak_when": self.memory.peak_when, "peak_made_of": made_of},
            "pairs": counted or None,
            "parts": [{"part": part.name, **all_of(part, *told), "kernels": part.kernels} for part in self.parts],
            "bottleneck": self.bottleneck,
            "odd_products": list(self.odd_products),
            "unknown": self.unknown,
            "no_formulas": self.why_no_formulas if formulas else "",
        }

    @property
    def _title(self) -> str:
        how = "training" if self.training else "inference"
        return f"{self.subject}, batch {self.batch}, {dtype_name(self.dtype)}, {how}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("part", "parameters", "forward", "traffic")]
        for part in (*self.parts, self.total):
            sums = (readable_count(part.forward.value), readable_bytes(part.traffic.value))
            rows.append((part.name, f"{part.parameters.value:,}", *sums))
        return rows

    def _memory(self) -> list[tuple[str, ...]]:
        return [("memory", "bytes"), *((name, readable_bytes(n.value)) for name, n in self.memory.rows())]

    def __str__(self) -> str:
        parts, memory = table(self._rows(), right=(1, 2, 3)), table(self._memory(), right=(1,))
        return f"{self._title}\n{parts}\n\n{memory}"

    def _repr_html_(self) -> str:
        parts = html_table(self._rows(), right=(1, 2, 3), caption=self._title)
        return parts + html_table(self._memory(), right=(1,))


def readable_bytes(n: float) -> str:
    """1,536 as "1.5 KiB"."""
    return _readable(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])


def readable_count(n: float) -> str:
    """1,500,000 as "1.5 M"."""
    return _readable(n, 1000, ["", "k", "M", "G", "T", "P", "E"])


def _readable(n: float, step: int, units: list[str]) -> str:
    while abs(n) >= step and len(units) > 1:
        n, units = n / step, units[1:]
    return f"{n:.4g} {units[0]}".rstrip()
