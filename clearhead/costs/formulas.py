"""Formulas, read off a second run at sizes that are primes.

Everything a log holds is a sum of products of sizes. At sizes that are distinct primes a product says which sizes it
is made of: 83 · 1951 · 248 · 101 is B · T · D · H and nothing else. So the same module is watched again at such sizes,
each number is taken apart into its letters, and equal terms of equal layers are gathered. A formula counts only if it
gives, at the sizes that were asked for, exactly the number that was watched there, which is a second point that it was
not made from; where it does not (a loop over the tokens, a kernel's tile), the number stands for itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from clearhead.costs.watch import Log

Select = Callable[[Log], Iterable[tuple[str, int]]]
"""Picks terms out of a log: each with the path of the module it belongs to."""


@dataclass(frozen=True)
class Probe:
    """A log at sizes that are primes, what each prime stands for, and the letters of lists of layers by their path."""

    log: Log
    letters: dict[int, str]
    sizes: dict[str, int]  # the letters' values in the run whose formulas are wanted
    repeats: dict[str, tuple[str, int]]


class Amount:
    """A whole number and, if asked for, its formula."""

    __slots__ = ("_over", "_reader", "_select", "value")

    def __init__(self, value: int, select: Select | None = None, reader: Reader | None = None, over: int = 1) -> None:
        self.value, self._select, self._reader, self._over = value, select, reader, over

    def __bool__(self) -> bool:
        return self.value != 0

    def __repr__(self) -> str:
        return f"{self.value:,} = {self.formula}"

    @property
    def formula(self) -> Any:
        """The sympy expression, with common factors taken out; the number itself where there is no formula."""
        import sympy

        if self._reader is None or self._select is None or not self.value:
            return sympy.Integer(self.value)
        return self._reader.formula(self._select, self.value * self._over) / self._over

    def part(self, n: int) -> Amount:
        """Its n-th part, which must be a whole number."""
        return Amount(self.value // n, self._select, self._reader, self._over * n)

    @property
    def latex(self) -> str:
        """The formula for TeX."""
        import sympy

        return str(sympy.latex(self.formula))


@dataclass
class Reader:
    """Makes amounts of a log, and watches the module a second time when the first formula is asked for."""

    log: Log
    watch_again: Callable[[], Probe]
    why_none: str = ""  # why there are no formulas, or not for every number
    _probe: Probe | None = None
    _asked: bool = False
    _known: dict[int, Any] = field(default_factory=dict)

    def amount(self, select: Select, over: int = 1) -> Amount:
        """The sum of what is selected, divided by `over`."""
        return Amount(sum(n for _, n in select(self.log)) // over, select, self, over)

    @property
    def probe(self) -> Probe | None:
        if not self._asked:
            self._asked = True
            try:
                found = self.watch_again()
            except (ValueError, RuntimeError, TypeError) as error:
                self.why_none = str(error).splitlines()[0]
            else:
                if found.log.shape() == self.log.shape():
                    self._probe = found
                else:
                    other = "at other sizes the module runs other operators"
                    self.why_none = f"{other} (it loops over a size, or plans by it)"
        return self._probe

    def formula(self, select: Select, value: int) -> Any:
        import sympy

        if self.probe is None:
            return sympy.Integer(value)
        terms: dict[Any, Any] = {}
        for (path, n), count in Counter((normal(path), n) for path, n in select(self.probe.log)).items():
            times, size = self._times(path)
            each, over = divmod(count, size)
            terms[path, n] = (each * times + over) * self._product(n)
        found = sympy.factor_terms(sympy.expand(sympy.Add(*terms.values())))
        letters = {_symbol(name): n for name, n in self.probe.sizes.items()}
        if found.subs(letters) == value:
            return found
        self.why_none = self.why_none or "a size is rounded up or down on the way"
        return sympy.Integer(value)

    def _times(self, path: str) -> tuple[Any, int]:
        """How often a path with its layers' numbers taken out stands for a layer: letter and number."""
        assert self.probe is not None
        found = (pair for place, pair in self.probe.repeats.items() if path.startswith(f"{place}.*"))
        letter, n = next(found, ("", 1))
        return _symbol(letter) if letter else 1, n

    def _product(self, n: int) -> Any:
        """A product of sizes, taken apart into its letters."""
        import sympy

        assert self.probe is not None
        if n not in self._known:
            names = {name: _symbol(name) for name in self.probe.sizes}
            rest, made = n, sympy.Integer(1)
            for prime, words in self.probe.letters.items():
                while rest and rest % prime == 0:
                    rest //= prime
                    made *= sympy.sympify(words, locals=names)
            self._known[n] = made * rest
        return self._known[n]


def _symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, positive=True, integer=True)


def normal(path: str) -> str:
    """A module's path with the numbers of layers taken out: blocks.*.attention."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
