"""What a prediction says: parameters, operations, traffic and memory, part by part and in total, each a number with
its formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clearhead.costs.amounts import ZERO, Amount, exact_ratio, total
from clearhead.costs.attention import Pairs
from clearhead.costs.ledger import Balance
from clearhead.costs.machine import Machine
from clearhead.costs.program import Ceiling, Kernel, Op, Program

__all__ = ["Cost", "Memory", "Part", "Time", "readable_bytes", "readable_count"]


@dataclass(frozen=True)
class Part:
    """One part of a model (or one operation of it), over all layers. Operations are those of matrix products, two for
    each multiplication with its addition; `elements` counts results of element-wise functions such as the softmax.
    """

    name: str
    parameters: Amount
    forward: Amount
    backward: Amount
    traffic: Amount
    elements: Amount


@dataclass(frozen=True)
class Memory:
    """Bytes. `attention_reference` are the (T, S) weights of all layers as the equation builds them, in float32;
    `attention_fused` is what the fused kernel keeps in their place. `cache` is what a `KVCache` of this length
    holds; it is no part of `peak`, which is that of one training step, or of one forward pass without gradients.
    """

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
        return max(spent, key=lambda name: spent[name])


@dataclass(frozen=True)
class Cost:
    """A prediction. `print(cost)` is a table, `cost.to_dict()` is JSON, `cost.memory.peak.formula` is sympy."""

    subject: str
    batch: int
    dtype: torch.dtype
    training: bool
    impl: str
    device: str
    sizes: dict[str, int]
    parts: tuple[Part, ...]
    items: tuple[Part, ...]
    parameters: Amount
    forward: Amount
    backward: Amount
    traffic: Amount
    memory: Memory
    pairs: Pairs | None
    program: Program = field(repr=False)
    joined: tuple[tuple[int, Amount], ...] = field(default=(), repr=False)

    @property
    def operations(self) -> Amount:
        """Forward, and in training backward too."""
        return self.forward + self.backward if self.training else self.forward

    @property
    def bottleneck(self) -> str:
        """The part with the most operations of the forward pass."""
        return max(self.parts, key=lambda part: part.forward.value).name

    @property
    def odd_products(self) -> tuple[str, ...]:
        """Products with a width that is no multiple of 8, which a GPU multiplies slowly in half precision."""
        odd = (op for _, op in self.program.ops() if any(k.ceiling is Ceiling.ODD for k in op.forward))
        return tuple(dict.fromkeys(op.name for op in odd))

    def products(self) -> tuple[Part, ...]:
        """The single operations, with short names, and a fused kernel's two products apart, as the equation
        has them."""
        rows: list[Part] = []
        for part in self.items:
            label = part.name.partition(": ")[2].removeprefix("attention.")
            if label != "attend":
                rows.append(replace(part, name=label))
                continue
            half = exact_ratio(part.forward, Amount(2))
            rows.append(replace(part, name="scores", forward=half, backward=ZERO, elements=ZERO))
            rows.append(replace(part, name="weighted sum", forward=half, traffic=ZERO))
        return tuple(rows)

    def time(self, machine: Machine) -> Time:
        """How long it takes on this machine: every kernel its arithmetic, traffic and launch, one after the other as
        the host issues them."""
        mode = "training" if self.training else "forward"
        issue = machine.issue.get(mode, 0.0)
        issued = machine.begin.get(mode, 0.0)  # when the host has issued all so far; below, when they are done
        done = 0.0
        spent = {"forward": 0.0, "backward": 0.0, "optimiser": 0.0}
        by_limit = [0.0, 0.0, 0.0]
        for phase, kernel in self._in_order():
            parts = machine.seconds(kernel, self.dtype)
            seconds, n = sum(parts), kernel.launches.value
            # Of n launches the first waits to be issued, and so may each of the others.
            done = max(done + seconds, issued + issue + seconds, issued + n * issue + seconds / n)
            issued += n * issue
            spent[phase] += seconds
            by_limit = [before + more for before, more in zip(by_limit, parts, strict=True)]
        arithmetic, traffic, launches = by_limit
        waiting = max(0.0, done - sum(spent.values()))
        return Time(**spent, arithmetic=arithmetic, traffic=traffic, launches=launches, waiting=waiting)

    @property
    def n_launches(self) -> int:
        """Kernels of one step."""
        return sum(kernel.launches.value for _, kernel in self._in_order())

    def _in_order(self) -> Iterator[tuple[str, Kernel]]:
        """Every kernel of a step, one after the other, and the phase it belongs to."""
        layers = [
            [step for step in stretch.steps if isinstance(step, Op)]
            for stretch in self.program.stretches
            for _ in range(stretch.times.value)
        ]
        for ops in layers:
            yield from (("forward", kernel) for op in ops for kernel in op.forward)
        if not self.training:
            return
        for ops in reversed(layers):
            yield from (("backward", kernel) for op in reversed(ops) for kernel in op.backward)
        for count, n_bytes in self.joined:
            # A tensor that was used twice gets two gradients: both are read, their sum is written.
            yield from [("backward", Kernel(n_bytes * 3))] * count
        # AdamW reads weight, gradient and two moments, and writes all but the gradient.
        yield "optimiser", Kernel(self.parameters * (7 * self.program.itemsize))

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
        return {
            "subject": self.subject,
            "batch": self.batch,
            "dtype": _name(self.dtype),
            "training": self.training,
            "impl": self.impl,
            "device": self.device,
            "sizes": self.sizes,
            "parameters": both(self.parameters),
            "operations": {"forward": both(self.forward), "backward": both(self.backward)},
            "traffic": both(self.traffic),
            "memory": {name: both(amount) for name, amount in self.memory.rows()}
            | {"peak_when": self.memory.peak_when},
            "pairs": None
            if pairs is None
            else {
                "dense": pairs.dense.value,
                "allowed": pairs.allowed.value,
                "computed": pairs.computed.value,
            },
            "parts": [
                {
                    "part": part.name,
                    "parameters": both(part.parameters),
                    "forward": both(part.forward),
                    "backward": both(part.backward),
                    "traffic": both(part.traffic),
                }
                for part in self.parts
            ],
            "bottleneck": self.bottleneck,
            "odd_products": list(self.odd_products),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.subject}, batch {self.batch}, {_name(self.dtype)}, {'training' if self.training else 'inference'}"
        ]
        lines.append(f"{'part':<28}{'parameters':>15}{'forward':>12}{'traffic':>12}")
        for part in self.parts:
            lines.append(
                f"{part.name:<28}{part.parameters.value:>15,}{readable_count(part.forward.value):>12}"
                f"{readable_bytes(part.traffic.value):>12}"
            )
        lines.append(
            f"{'total':<28}{self.parameters.value:>15,}{readable_count(self.forward.value):>12}"
            f"{readable_bytes(self.traffic.value):>12}"
        )
        lines += [f"{name:<43}{readable_bytes(amount.value):>12}" for name, amount in self.memory.rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def readable_bytes(n: float) -> str:
    """1,536 as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def readable_count(n: float) -> str:
    """1,500,000 as "1.5 M"."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(n) < 1000 or unit == "P":
            return f"{n:.4g} {unit}".rstrip()
        n /= 1000
    raise AssertionError("unreachable")


# ---------------------------------------------------------------------- from a program


def parts_of(program: Program, *, by_item: bool = False) -> tuple[Part, ...]:
    """Sums over the program, by part (in the order of their first op) or by single operation."""
    groups: dict[str, list[tuple[Amount, Op]]] = {}
    for times, op in program.ops():
        groups.setdefault(f"{op.part}: {op.name}" if by_item else op.part, []).append((times, op))
    return tuple(_part(program, name, ops, by_item=by_item) for name, ops in groups.items())


def _part(program: Program, name: str, ops: list[tuple[Amount, Op]], *, by_item: bool) -> Part:
    def over(kernels: str, what: str) -> Amount:
        return total(times * getattr(k, what) for times, op in ops for k in getattr(op, kernels))

    if by_item:
        owned = {parameter for _, op in ops for parameter in op.parameters}
        parameters = total(
            stretch.times * elements
            for stretch in program.stretches
            for key, elements in stretch.parameters.items()
            if key in owned and stretch.owner[key] == ops[0][1].part
        )
    else:
        parameters = program.parameters_of(name)
    return Part(
        name,
        parameters,
        over("forward", "operations"),
        over("backward", "operations"),
        over("forward", "n_bytes"),
        total(times * op.elements for times, op in ops),
    )


def memory_of(program: Program, found: Balance, *, training: bool) -> Memory:
    weights = program.parameters * program.itemsize
    looks = program.looks
    return Memory(
        weights=weights,
        gradients=weights if training else Amount(0),
        optimiser=weights * 2 if training else Amount(0),
        activations=found.activations,
        attention_reference=total(look.layers * look.cells * 4 for look in looks),
        attention_fused=total(look.layers * look.queries * 4 for look in looks),
        cache=total(look.layers * look.keys_values * program.itemsize for look in looks if look.writes),
        peak=found.peak.n_bytes,
        peak_when=found.peak.when,
        peak_made_of=found.peak.made_of,
    )
