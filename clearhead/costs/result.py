"""What a prediction says: parameters, operations, traffic, memory and kernels, part by part and in total, each a number
with its formula. A part is a module, by its path; the layers of a list are one part (`blocks.*.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from clearhead.costs.formulas import Amount, Reader, normal
from clearhead.costs.machine import Machine, dtype_name
from clearhead.costs.operators import Ceiling, Kernel
from clearhead.costs.watch import Log
from clearhead.costs.ways import Look, planned_pairs
from clearhead.masks import Mask

__all__ = ["Cost", "Memory", "Part", "Time", "readable_bytes", "readable_count"]

ADAM = 2  # numbers that AdamW keeps for each parameter


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
    """Pairs of a query and a key, over the batch, for one head: all there are, those allowed, those this way computes."""

    dense: Amount
    allowed: Amount
    computed: Amount
    mask: Mask | None
    gathers: bool  # the plan is what runs
    about: tuple[Look, torch.dtype, str] = field(repr=False)

    @property
    def heads(self) -> int:
        return self.about[0].heads

    @cached_property
    def planned(self) -> int:
        """What the mask's plan computes: the pairs allowed, and those beside them in a tile."""
        look, dtype, device = self.about
        if self.mask is None:
            return self.dense.value
        made = planned_pairs(self.mask, look.queries, look.keys, dtype=dtype, width=look.width, device=device)
        return made.computed * (look.batch if torch.Size(self.mask.batch_shape).numel() == 1 else 1)


@dataclass(frozen=True)
class Memory:
    """Bytes. `attention_reference` are the (T, S) weights of all layers as the equation builds them, in float32;
    `attention_fused` is what the fused kernel keeps in their place. `cache` is what a `KVCache` of this length holds; it
    is no part of `peak`, which is that of one training step, or of one forward pass without gradients."""

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
        for name in ("weights", "gradients", "optimiser", "activations"):
            yield name, getattr(self, name)
        yield "attention matrices, by the equation", self.attention_reference
        yield "attention matrices, fused", self.attention_fused
        yield "KV cache", self.cache
        yield "peak", self.peak


@dataclass(frozen=True)
class Time:
    """Predicted seconds, and how many of them go into arithmetic, into memory traffic and into launching kernels.

    `waiting` is the device's for its host: a kernel begins when it has been issued and the one before it is done.
    """

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
        spent = {
            "arithmetic": self.arithmetic,
            "memory traffic": self.traffic,
            "launching kernels": self.launches,
            "issuing kernels": self.waiting,
        }
        return max(spent, key=lambda what: spent[what])


@dataclass(frozen=True)
class Cost:
    """What was watched, and what follows from it."""

    subject: str
    batch: int
    dtype: torch.dtype
    training: bool
    impl: str
    device: str
    sizes: dict[str, int]
    log: Log = field(repr=False)
    reader: Reader = field(repr=False)
    caches: bool = False  # keys and values are worth keeping
    pair: bool = False  # it reads one sequence and writes another
    recompute: str | None = None

    # ------------------------------------------------------------------ totals

    def _steps(self, what: str, *phases: str, name: str | None = None) -> Amount:
        def select(log: Log) -> Iterator[tuple[str, int]]:
            for step in log.steps:
                if step.phase in phases and (name is None or normal(step.path) == name):
                    for kernel in step.kernels:
                        yield from ((step.path, n) for n in getattr(kernel, what))

        return self.reader.amount(select)

    @cached_property
    def parameters(self) -> Amount:
        return self.reader.amount(lambda log: [(p.path, p.elements) for p in log.parameters.values()])

    @cached_property
    def forward(self) -> Amount:
        return self._steps("products", "forward")

    @cached_property
    def backward(self) -> Amount:
        """With what is computed again, where blocks are."""
        return self._steps("products", "backward", "recompute")

    @cached_property
    def recomputed(self) -> Amount:
        return self._steps("products", "recompute")

    @cached_property
    def traffic(self) -> Amount:
        return self._steps("moved", "forward")

    @property
    def operations(self) -> Amount:
        """Forward, and in training backward too."""
        return self._steps("products", "forward", "backward", "recompute")

    @property
    def unknown(self) -> dict[str, int]:
        """Operators whose operations are not known, and how often they ran: their bytes are counted, no operations."""
        return self.log.unknown

    @property
    def why_no_formulas(self) -> str:
        """Why numbers stand where formulas were asked for; empty where none was missing."""
        return self.reader.why_none

    # ------------------------------------------------------------------ parts

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        paths = [step.path for step in self.log.steps] + [p.path for p in self.log.parameters.values()]
        return tuple(map(self._part, dict.fromkeys(map(normal, paths))))

    def _part(self, name: str) -> Part:
        def own(log: Log) -> Iterator[tuple[str, int]]:
            return ((p.path, p.elements) for p in log.parameters.values() if normal(p.path) == name)

        def kept(log: Log) -> Iterator[tuple[str, int]]:
            return ((s.path, s.n_bytes) for s in log.storages if s.kind == "activations" and normal(s.path) == name)

        return Part(
            name,
            self.reader.amount(own),
            self._steps("products", "forward", name=name),
            self._steps("products", "backward", "recompute", name=name),
            self._steps("moved", "forward", name=name),
            self.reader.amount(kept),
            sum(len(step.kernels) for step in self.log.steps if normal(step.path) == name),
        )

    @property
    def total(self) -> Part:
        """All parts together."""
        kept, kernels = self.memory.activations, self.n_launches
        return Part("total", self.parameters, self.forward, self.backward, self.traffic, kept, kernels)

    @property
    def bottleneck(self) -> str:
        """The part with the most operations of the forward pass."""
        return max(self.parts, key=lambda part: part.forward.value).name

    @property
    def odd_products(self) -> tuple[str, ...]:
        """Where a product has a width that is no multiple of 8, which a GPU multiplies slowly in half precision."""
        odd = (step.path for step in self.log.steps if any(k.ceiling is Ceiling.ODD for k in step.kernels))
        return tuple(dict.fromkeys(map(normal, odd)))

    def products(self) -> tuple[Part, ...]:
        """The parts of one attention layer, with its two products apart, as the equation has them."""
        rows: list[Part] = []
        here = {normal(look.path) for look in self.log.looks}
        for part in self.parts:
            if part.name not in here or not part.forward:
                rows.append(part)
                continue
            none = Amount(0)
            half = Amount(part.forward.value // 2)
            rows.append(replace(part, name="scores", forward=half, backward=none))
            rows.append(replace(part, name="weighted sum", forward=half, traffic=none, kept=none))
        return tuple(rows)

    @cached_property
    def pairs(self) -> Pairs | None:
        """Of the self-attention that a mask is added to, where there is one."""
        looks = [(i, look) for i, look in enumerate(self.log.looks) if not self.pair or "decoder" in look.path]
        if not looks:
            return None
        at, look = next(((i, look) for i, look in looks if look.mask is not None), looks[0])

        def pairs(which: str) -> Amount:
            def select(log: Log) -> list[tuple[str, int]]:
                other = log.looks[at]
                counted = getattr(other, which, None) if other.mask is not None and not other.is_causal else None
                if counted is not None:
                    return [("", 2 * counted)]
                diagonal = other.is_causal and which == "allowed" and other.queries == other.keys
                square = other.batch * other.queries * other.keys
                return [("", square), ("", other.batch * other.queries)] if diagonal else [("", 2 * square)]

            return self.reader.amount(select, over=2)

        computed = "allowed" if look.is_causal and self.impl != "reference" else "computed"
        about = (look, self.dtype, self.device)
        return Pairs(pairs("dense"), pairs("allowed"), pairs(computed), look.mask, look.gathers, about)

    # ------------------------------------------------------------------ memory

    @cached_property
    def memory(self) -> Memory:
        training, at = self.training, self._peak_at
        zero = Amount(0)
        kinds = dict.fromkeys(storage.kind for storage in self.log.alive(at))
        made_of = {kind: self.reader.amount(lambda log, kind=kind: _alive(log, at, kind)) for kind in kinds}
        if training:
            made_of["optimiser"] = self._weights(ADAM)
        return Memory(
            weights=self._weights(1),
            gradients=self._weights(1) if training else zero,
            optimiser=self._weights(ADAM) if training else zero,
            activations=self.reader.amount(
                lambda log: [(s.path, s.n_bytes) for s in log.storages if s.kind == "activations"]
            ),
            attention_reference=self._looks(lambda look: look.heads * look.dense * 4),
            attention_fused=self._looks(lambda look: look.batch * look.heads * look.queries * 4),
            cache=self._looks(
                lambda look: 2 * look.batch * look.keys * look.key_heads * look.width * look.itemsize,
                lambda look: self.caches and (not self.pair or "decoder" in look.path),
            ),
            peak=self.reader.amount(
                lambda log: [*_alive(log, at, None), *(_states(log, ADAM) if training else ())]
            ),
            peak_when=self.log.when(at),
            peak_made_of=made_of,
        )

    @cached_property
    def _peak_at(self) -> int:
        return self.log.peak()

    def _weights(self, times: int) -> Amount:
        return self.reader.amount(lambda log: _states(log, times))

    def _looks(self, size: Any, wanted: Any = lambda look: True) -> Amount:
        return self.reader.amount(lambda log: [(look.path, size(look)) for look in log.looks if wanted(look)])

    # ------------------------------------------------------------------ time

    def time(self, machine: Machine) -> Time:
        """How long it takes on this machine: every kernel its arithmetic, traffic and launch, one after the other as
        the host issues them."""
        mode = "training" if self.training else "forward"
        issue = machine.issue.get(mode, 0.0)
        issued = machine.begin.get(mode, 0.0)  # when the host has issued all so far; below, when they are done
        done = 0.0
        spent = {"forward": 0.0, "backward": 0.0, "optimiser": 0.0}
        by_limit = [0.0, 0.0, 0.0]
        for phase, _, kernel in self._in_order():
            parts = machine.seconds(kernel, self.dtype)
            issued += issue
            done = max(done, issued) + sum(parts)
            spent[phase] += sum(parts)
            by_limit = [before + more for before, more in zip(by_limit, parts, strict=True)]
        arithmetic, traffic, launches = by_limit
        waiting = max(0.0, done - sum(spent.values()))
        return Time(**spent, arithmetic=arithmetic, traffic=traffic, launches=launches, waiting=waiting)

    def ceilings(self, machine: Machine) -> dict[str, tuple[float, str]]:
        """Of each part the seconds it takes, and which ceiling of the machine binds it."""
        spent: dict[str, dict[str, float]] = {}
        for _, path, kernel in self._in_order():
            here = spent.setdefault(normal(path), {})
            names = (kernel.ceiling.value, "bandwidth", "launches")
            if kernel.ceiling is Ceiling.ROW_SUM:
                names = ("products", kernel.ceiling.value, "launches")
            for name, seconds in zip(names, machine.seconds(kernel, self.dtype), strict=True):
                here[name] = here.get(name, 0.0) + seconds
        return {name: (sum(here.values()), max(here, key=lambda n, h=here: h[n])) for name, here in spent.items()}

    @property
    def n_launches(self) -> int:
        """Kernels of one step."""
        return sum(1 for _ in self._in_order())

    def _in_order(self) -> Iterator[tuple[str, str, Kernel]]:
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
        found = {
            "parameters": self.parameters,
            "forward": self.forward,
            "backward": self.backward,
            "traffic": self.traffic,
        }
        found |= {f"memory.{name}": amount for name, amount in self.memory.rows()}
        for part in self.parts:
            found[f"{part.name}.parameters"] = part.parameters
            found[f"{part.name}.forward"] = part.forward
        return {name: amount.latex if latex else str(amount.formula) for name, amount in found.items() if amount.value}

    def to_dict(self, *, formulas: bool = True) -> dict[str, Any]:
        def both(amount: Amount) -> Any:
            return {"value": amount.value, "formula": str(amount.formula)} if formulas else amount.value

        pairs = self.pairs
        told = ("parameters", "forward", "backward", "traffic", "kept")
        return {
            "subject": self.subject,
            "batch": self.batch,
            "dtype": dtype_name(self.dtype),
            "training": self.training,
            "impl": self.impl,
            "device": self.device,
            "recompute": self.recompute,
            "sizes": self.sizes,
            "parameters": both(self.parameters),
            "operations": {"forward": both(self.forward), "backward": both(self.backward)},
            "recomputed": both(self.recomputed),
            "traffic": both(self.traffic),
            "kernels": self.n_launches,
            "memory": {name: both(amount) for name, amount in self.memory.rows()}
            | {"peak_when": self.memory.peak_when}
            | {"peak_made_of": {name: both(amount) for name, amount in self.memory.peak_made_of.items()}},
            "pairs": None
            if pairs is None
            else {name: getattr(pairs, name).value for name in ("dense", "allowed", "computed")},
            "parts": [
                {"part": part.name, **{name: both(getattr(part, name)) for name in told}, "kernels": part.kernels}
                for part in self.parts
            ],
            "bottleneck": self.bottleneck,
            "odd_products": list(self.odd_products),
            "unknown": self.unknown,
            "no_formulas": self.why_no_formulas if formulas else "",
        }

    def __str__(self) -> str:
        how = "training" if self.training else "inference"
        lines = [f"{self.subject}, batch {self.batch}, {dtype_name(self.dtype)}, {how}"]
        lines.append(f"{'part':<44}{'parameters':>15}{'forward':>12}{'traffic':>12}")
        whole = (("total", self.parameters, self.forward, self.traffic),)
        for name, parameters, forward, traffic in (
            *((part.name, part.parameters, part.forward, part.traffic) for part in self.parts), *whole,
        ):  # fmt: skip
            lines.append(
                f"{name:<44}{parameters.value:>15,}{readable_count(forward.value):>12}{readable_bytes(traffic.value):>12}"
            )
        lines += [f"{name:<59}{readable_bytes(amount.value):>12}" for name, amount in self.memory.rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _alive(log: Log, moment: int, kind: str | None) -> Iterator[tuple[str, int]]:
    return ((s.path, s.n_bytes) for s in log.alive(moment) if kind is None or s.kind == kind)


def _states(log: Log, times: int) -> Iterator[tuple[str, int]]:
    return ((p.path, times * p.n_bytes) for p in log.parameters.values())


def readable_bytes(n: float) -> str:
    """1,536 as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def readable_count(n: float) -> str:
    """1,500,000 as "1.5 M"."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(n) < 1000 or unit == "E":
            return f"{n:.4g} {unit}".rstrip()
        n /= 1000
    raise AssertionError("unreachable")
