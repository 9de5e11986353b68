"""Memory, by walking a program: every tensor is put on the books when it is made and taken off when nobody holds it.

Python variables and autograd hold tensors; a tensor is freed with its last holder, as in torch. The way back is
walked too: gradients of tensors come and go, gradients of parameters stay. The highest balance is the peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from clearhead.costs.amounts import ONE, ZERO, Amount, total
from clearhead.costs.program import Alias, Drop, Op, Program, Stretch

__all__ = ["Balance", "Peak", "balance"]

Kind = Literal["weights", "gradients", "optimiser", "inputs", "activations", "passing"]


@dataclass
class Item:
    """A tensor on the books."""

    n_bytes: Amount
    kind: Kind
    holders: int = 1
    kept: int = 0  # how many of the holders are backward's
    needs_gradient: bool = False
    times: Amount = ONE  # how often the stretch that made it runs


@dataclass(frozen=True)
class Peak:
    """The highest balance: when it was reached, and what it was made of, in bytes."""

    n_bytes: Amount
    when: str
    made_of: dict[str, Amount]


@dataclass(frozen=True)
class Balance:
    """Memory of one pass: the peak, what backward keeps, and the gradients it adds up where a tensor was used twice."""

    peak: Peak
    activations: Amount
    joined: tuple[tuple[int, Amount], ...]  # how often, and of how many bytes


@dataclass
class _Step:
    op: Op
    taken: dict[str, Item]
    made: list[Item]
    held: list[Item]


@dataclass
class _Books:
    stop_at: int | None = None
    items: dict[int, Item] = field(default_factory=dict)
    now: int = 0
    events: int = 0
    peak: int = 0
    peak_event: int = 0
    peak_when: str = ""
    snapshot: list[Item] = field(default_factory=list)
    times: Amount = ONE

    def open(self, n_bytes: Amount, kind: Kind, when: str, holders: int = 1) -> Item:
        item = Item(n_bytes, kind, holders, times=self.times)
        self.items[id(item)] = item
        self.now += n_bytes.value
        self.note(when)
        return item

    def note(self, when: str) -> None:
        """Looks whether this is the highest balance so far."""
        self.events += 1
        if self.now > self.peak:
            self.peak, self.peak_event, self.peak_when = self.now, self.events, when
        if self.stop_at == self.events:
            self.snapshot = [replace(item) for item in self.items.values()]

    def pass_through(self, n_bytes: Amount, when: str) -> None:
        """Memory that is in use only for a moment."""
        self.release(self.open(n_bytes, "passing", when))

    def release(self, item: Item, *, kept: bool = False) -> None:
        item.holders -= 1
        item.kept -= kept
        if item.holders == 0:
            del self.items[id(item)]
            self.now -= item.n_bytes.value


def balance(program: Program, *, training: bool, optimiser_copies: int = 2) -> Balance:
    """Walks twice: once to find the peak, once to see what is on the books there."""
    first = _walk(program, training, optimiser_copies, None)
    second = _walk(program, training, optimiser_copies, first.books.peak_event)
    by_kind: dict[str, list[Item]] = {}
    for item in second.books.snapshot:
        by_kind.setdefault("activations" if item.kept else item.kind, []).append(item)
    made_of = {kind: _gathered(items) for kind, items in by_kind.items()}
    whole = total(made_of.values())
    return Balance(Peak(whole, first.books.peak_when, made_of), first.activations, _counted(first.joined))


def _counted(amounts: list[Amount]) -> tuple[tuple[int, Amount], ...]:
    known = {id(amount): amount for amount in amounts}
    return tuple((n, known[key]) for key, n in Counter(map(id, amounts)).items())


def _gathered(items: list[Item]) -> Amount:
    """Their sum, with the number of layers as a letter: what every layer made is counted once, times L."""
    counts: Counter[tuple[int, int]] = Counter()
    known: dict[int, Amount] = {}
    for item in items:
        known[id(item.n_bytes)], known[id(item.times)] = item.n_bytes, item.times
        counts[id(item.n_bytes), id(item.times)] += 1
    terms = []
    for (size_id, times_id), n in counts.items():
        n_bytes, times = known[size_id], known[times_id]
        each, over = divmod(n, times.value)
        terms += [times * n_bytes * each, n_bytes * over]
    return total(terms)


@dataclass
class _Walk:
    program: Program
    training: bool
    books: _Books
    activations: Amount = ZERO
    names: dict[str, Item] = field(default_factory=dict)
    done: list[_Step] = field(default_factory=list)
    sizes: dict[str, Amount] = field(default_factory=dict)
    joined: list[Amount] = field(default_factory=list)

    # ------------------------------------------------------------------ forward

    def forward(self) -> None:
        for stretch in self.program.stretches:
            self.books.times = stretch.times
            for _ in range(stretch.times.value):
                for step in stretch.steps:
                    if isinstance(step, Drop):
                        for name in step.names:
                            self._unbind(name)
                    elif isinstance(step, Alias):
                        item = self.names[step.old]
                        item.holders += 1
                        self._unbind(step.new)
                        self.names[step.new] = item
                    else:
                        self._run(step)
        if self.training:
            self.activations = _gathered([i for i in self.books.items.values() if i.kept and i.kind != "inputs"])
        self.books.times = ONE

    def _run(self, op: Op) -> None:
        books, when = self.books, f"forward, {op.part}: {op.name}"
        taken = {name: self.names[name] for name in op.takes}
        needs = bool(op.parameters) or any(item.needs_gradient for item in taken.values())
        made = []
        for tensor in op.makes:
            item = books.open(tensor.n_bytes, "passing", when)
            item.needs_gradient = needs
            made.append(item)
        keeps = self.training and needs
        notes = [books.open(note.n_bytes, "passing", when) for note in op.notes] if keeps else []
        books.pass_through(op.scratch, when)
        for tensor, item in zip(op.makes, made, strict=True):
            self._unbind(tensor.name)
            self.names[tensor.name] = item
        if not keeps:
            return
        held = [self.names[name] for name in op.keeps]
        for item in held:
            item.holders += 1
            item.kept += 1
        for note in notes:
            note.kept += 1
        self.done.append(_Step(op, taken, made, held + notes))

    def _unbind(self, name: str) -> None:
        item = self.names.pop(name, None)
        if item is not None:
            self.books.release(item)

    # ------------------------------------------------------------------ backward

    def backward(self) -> None:
        gradients: dict[int, Item] = {}
        owned: set[tuple[int, str]] = set()
        turn = self._turns()
        while self.done:
            step = self.done.pop()
            when = f"backward, {step.op.part}: {step.op.name}"
            incoming = [gradients.pop(id(item), None) for item in step.made]
            self._spread(step, incoming, gradients, when)
            self._parameter_gradients(step.op, turn(step.op), owned, when)
            for gradient in incoming:
                if gradient is not None:
                    self.books.release(gradient)
            for item in step.held:
                self.books.release(item, kept=True)

    def _spread(self, step: _Step, incoming: list[Item | None], gradients: dict[int, Item], when: str) -> None:
        """Gradients of what was taken: new tensors, or the incoming one where it passes through."""
        books = self.books
        through = incoming[0] if incoming else None
        fresh: list[tuple[Item, Item]] = []
        for name, item in step.taken.items():
            if not item.needs_gradient:
                continue
            if name in step.op.passes and through is not None:
                through.holders += 1
                fresh.append((item, through))
            else:
                fresh.append((item, books.open(item.n_bytes, "passing", when)))
        books.pass_through(step.op.backward_scratch, when)
        for item, gradient in fresh:
            there = gradients.get(id(item))
            if there is None:
                gradients[id(item)] = gradient
                continue
            self.joined.append(item.n_bytes)
            if there.holders == 1:
                books.release(gradient)  # added in place
            else:
                gradients[id(item)] = books.open(item.n_bytes, "passing", when)
                books.release(there)
                books.release(gradient)

    def _parameter_gradients(self, op: Op, turn: int, owned: set[tuple[int, str]], when: str) -> None:
        for name in op.parameters:
            stretch = next(s for s in self.program.stretches if name in s.parameters)
            key = (turn if stretch.times.value > 1 else 0, name)
            gradient = self.books.open(self._size_of(stretch, name), "gradients", when)
            gradient.times = stretch.times
            if key in owned:
                self.books.release(gradient)  # added to the one that is there
                self.joined.append(gradient.n_bytes)
            owned.add(key)

    def _size_of(self, stretch: Stretch, name: str) -> Amount:
        """A parameter's bytes, always as the same object, so that layers are gathered."""
        return self.sizes.setdefault(name, stretch.parameters[name] * self.program.itemsize)

    def _turns(self) -> Callable[[Op], int]:
        counts: Counter[int] = Counter()

        def turn(op: Op) -> int:
            counts[id(op)] += 1
            return counts[id(op)]

        return turn


def _walk(program: Program, training: bool, optimiser_copies: int, stop_at: int | None) -> _Walk:
    books = _Books(stop_at)
    walk = _Walk(program, training, books)
    weights = program.parameters * program.itemsize
    books.open(weights, "weights", "before")
    if training:
        books.open(weights * optimiser_copies, "optimiser", "before")
    for made in program.inputs:
        walk.names[made.name] = books.open(made.n_bytes, "inputs", "before")
        walk.names[made.name].needs_gradient = made.name in program.with_gradient
    walk.forward()
    if training:
        walk.backward()
        books.note("optimiser step")
    return walk
