"""Numbers that remember how they were computed: 2·T·M² is kept as a value and as a formula at once.

Everything the cost room predicts is an `Amount`. Arithmetic on amounts is plain integer arithmetic plus a small
tree; the tree becomes a sympy expression only when somebody asks for `formula`, so that predicting stays fast and
sympy stays unloaded until a formula is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from clearhead.errors import ConfigError

__all__ = ["ONE", "ZERO", "Amount", "exact_ratio", "product", "size", "total"]


class Amount:
    """A whole number and the formula it came from."""

    __slots__ = ("_parts", "_rule", "value")

    def __init__(self, value: int, rule: str = "number", parts: tuple[Any, ...] = ()) -> None:
        self.value = value
        self._rule = rule
        self._parts = parts

    # ------------------------------------------------------------------ arithmetic

    def __add__(self, other: Amount | int) -> Amount:
        other = _amount(other)
        if not self.value:
            return other
        return self if not other.value else Amount(self.value + other.value, "+", (self, other))

    def __mul__(self, other: Amount | int) -> Amount:
        other = _amount(other)
        if not self.value or not other.value:
            return ZERO
        if other.is_one:
            return self
        return other if self.is_one else Amount(self.value * other.value, "*", (self, other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: Amount | int) -> Amount:
        return self + -1 * _amount(other)

    def __int__(self) -> int:
        return self.value

    def __bool__(self) -> bool:
        return self.value != 0

    def __repr__(self) -> str:
        return f"{self.value:,} = {self.formula}"

    @property
    def is_one(self) -> bool:
        """The plain number 1 (a size that happens to be 1 keeps its letter)."""
        return self._rule == "number" and self.value == 1

    # ------------------------------------------------------------------ formula

    @property
    def formula(self) -> Any:
        """The sympy expression, with common factors taken out."""
        import sympy

        return sympy.factor_terms(sympy.expand(self._expression({})))

    @property
    def latex(self) -> str:
        """The formula for TeX."""
        import sympy

        return str(sympy.latex(self.formula))

    def _expression(self, known: dict[int, Any]) -> Any:
        import sympy

        if id(self) in known:
            return known[id(self)]
        if self._rule == "number":
            made: Any = sympy.Integer(self.value)
        elif self._rule == "size":
            made = sympy.Symbol(self._parts[0], positive=True, integer=True)
        elif self._rule == "sum":
            counts: dict[int, list[Any]] = {}
            for part in self._parts:
                counts.setdefault(id(part), [0, part])[0] += 1
            made = sympy.Add(*(n * part._expression(known) for n, part in counts.values()))
        else:
            left, right = (part._expression(known) for part in self._parts)
            made = left + right if self._rule == "+" else left * right if self._rule == "*" else left / right
        known[id(self)] = made
        return made


def _amount(value: Amount | int) -> Amount:
    return value if isinstance(value, Amount) else Amount(value)


ZERO = Amount(0)
ONE = Amount(1)


def size(letter: str, value: int) -> Amount:
    """A size with a letter of its own, such as `size("T", 1000)`."""
    return Amount(value, "size", (letter,))


def exact_ratio(left: Amount, right: Amount) -> Amount:
    """left / right, which must come out even: a head's width is M / H."""
    if right.value == 0 or left.value % right.value:
        raise ConfigError(f"{left.value} does not divide by {right.value}; choose sizes that do")
    return Amount(left.value // right.value, "/", (left, right))


def total(amounts: Iterable[Amount]) -> Amount:
    """The sum of many, flat, so that equal terms are gathered instead of nested."""
    parts = tuple(amount for amount in amounts if amount)
    if not parts:
        return ZERO
    return parts[0] if len(parts) == 1 else Amount(sum(part.value for part in parts), "sum", parts)


def product(*amounts: Amount | int) -> Amount:
    """All of them multiplied."""
    return reduce(lambda left, right: left * right, map(_amount, amounts), ONE)
