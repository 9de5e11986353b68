"""What a model does, written down: the tensor operations of one forward pass, in order, without running any.

An `Op` names the tensors it takes, makes and keeps for backward, and the kernels it runs; a `Drop` is the place
where Python lets go of a tensor. A `Program` is a list of stretches of these, each repeated as often as there are
layers. Parameters, operations and traffic are sums over it; memory is found by walking it (`ledger.py`), time by
adding its kernels up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from clearhead.costs.amounts import ONE, ZERO, Amount, total

__all__ = ["Alias", "Ceiling", "Drop", "Kernel", "Look", "Made", "Op", "Program", "Step", "Stretch"]


@dataclass(frozen=True)
class Made:
    """A tensor: its name and its size in bytes."""

    name: str
    n_bytes: Amount


class Ceiling(Enum):
    """What bounds a kernel: the two ordinary rates of a machine, or, in place of one of them, that of its own kind."""

    ORDINARY = auto()
    ODD = auto()  # a product with a width that is no multiple of 8: tensor cores cannot load its rows
    ODD_BACKWARD = auto()  # the two products of its gradients
    ATTENTION = auto()  # products around a softmax, in one kernel
    ATTENTION_BACKWARD = auto()
    ROW_SUM = auto()  # adds rows up into one, as a bias's gradient does


@dataclass(frozen=True)
class Kernel:
    """The multiplications and additions of its matrix products (if it has any), and the bytes it moves."""

    n_bytes: Amount
    operations: Amount = ZERO
    launches: Amount = ONE  # more than one where a step waits for the one before it
    ceiling: Ceiling = Ceiling.ORDINARY


@dataclass(frozen=True)
class Op:
    """One operation of the forward pass, and what its backward will need and do."""

    name: str
    part: str
    takes: tuple[str, ...]
    makes: tuple[Made, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...] = ()
    keeps: tuple[str, ...] = ()  # tensors, taken or made, that backward reads
    notes: tuple[Made, ...] = ()  # made for backward alone: statistics, dropout's draws
    passes: tuple[str, ...] = ()  # inputs whose gradient is the incoming one itself: no new memory
    parameters: tuple[str, ...] = ()
    scratch: Amount = ZERO  # bytes in use only while it runs
    backward_scratch: Amount = ZERO
    elements: Amount = ZERO  # results of an element-wise function such as the softmax, for the record


@dataclass(frozen=True)
class Drop:
    """Python lets go of these tensors here (they stay if backward needs them)."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Alias:
    """A second name for a tensor: another variable that holds on to it."""

    new: str
    old: str


Step: TypeAlias = Op | Drop | Alias


@dataclass
class Stretch:
    """Steps that run `times` times one after the other, each time with parameters of their own."""

    times: Amount
    steps: list[Step] = field(default_factory=list)
    parameters: dict[str, Amount] = field(default_factory=dict)  # name to number of elements
    owner: dict[str, str] = field(default_factory=dict)  # name to the part it belongs to


@dataclass(frozen=True)
class Look:
    """One kind of attention layer: how many there are, their (T, S) matrices, their queries, the keys and values they
    read.
    """

    layers: Amount
    cells: Amount  # B · H · T · S: entries of all weight matrices of one layer
    queries: Amount  # B · H · T
    keys_values: Amount  # elements of keys and values of one layer
    writes: bool = False  # in a decoder: keys and values are worth keeping in a cache


@dataclass
class Program:
    """All of a model's steps. `inputs` are there before it starts; `shared` parameters belong to no single stretch."""

    itemsize: int
    inputs: list[Made] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    with_gradient: set[str] = field(default_factory=set)  # inputs that something before this program learns from

    def __post_init__(self) -> None:
        self.stretches.append(Stretch(ONE))

    @property
    def here(self) -> Stretch:
        """The stretch that is being written."""
        return self.stretches[-1]

    @contextmanager
    def repeated(self, times: Amount) -> Iterator[None]:
        """What is added inside runs `times` times."""
        self.stretches.append(Stretch(times))
        yield
        self.stretches.append(Stretch(ONE))

    def add(self, op: Op) -> None:
        self.here.steps.append(op)

    def drop(self, *names: str) -> None:
        self.here.steps.append(Drop(names))

    def alias(self, new: str, old: str) -> None:
        self.here.steps.append(Alias(new, old))

    def parameter(self, name: str, part: str, elements: Amount) -> str:
        """Declares a parameter of this stretch; a name that an earlier stretch owns is shared, not declared again."""
        if not any(name in stretch.parameters for stretch in self.stretches if stretch is not self.here):
            self.here.parameters[name] = elements
            self.here.owner[name] = part
        return name

    def ops(self) -> Iterator[tuple[Amount, Op]]:
        """Every operation, with how often it runs."""
        for stretch in self.stretches:
            for step in stretch.steps:
                if isinstance(step, Op):
                    yield stretch.times, step

    @property
    def parameters(self) -> Amount:
        return total(stretch.times * elements for stretch in self.stretches for elements in stretch.parameters.values())

    def parameters_of(self, part: str) -> Amount:
        return total(
            stretch.times * elements
            for stretch in self.stretches
            for name, elements in stretch.parameters.items()
            if stretch.owner[name] == part
        )
