"""Formulas, read off a second run at sizes that are primes.

Everything a log holds is a sum of products of sizes. At sizes that are distinct primes a product says which sizes it
is made of: 83 · 1951 · 248 · 101 is B · T · D · H and nothing else. So the same module is watched again at such sizes,
each number is taken apart into its letters, and equal terms of equal layers are gathered. A formula counts only if it
gives, at the sizes that were asked for, exactly the number that was watched there, which is a second point that it was
not made from; where it does not (a loop over the tokens, a kernel's tile), the number stands for itself.

A configuration's whole numbers get the letters of the design; each is given a prime of its own, or one times what it
must divide by (heads divide the width, a rotated head is even). A field that takes no other value keeps its own, and is
a number in the formulas. Of a module without a configuration the batch and the tokens alone can be changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import sympy
from torch import nn

from clearhead.checks.example import Tokens
from clearhead.costs.watch import Log
from clearhead.costs.ways import PAIR_LETTERS
from clearhead.errors import ClearheadError

Select = Callable[[Log], Iterable[tuple[str, int]]]
"""Picks terms out of a log: each with the path of the module it belongs to."""


@dataclass(frozen=True)
class Probe:
    """A log at sizes that are primes, what each prime stands for, and the letters of lists of layers by their path."""

    log: Log
    letters: dict[int, str]
    sizes: dict[str, int]  # the letters' values in the run whose formulas are wanted
    repeats: dict[str, tuple[str, int]]
    _known: dict[int, Any] = field(default_factory=dict)

    @cached_property
    def symbols(self) -> dict[str, Any]:
        return {name: sympy.Symbol(name, positive=True, integer=True) for name in self.sizes}

    def sum(self, select: Select) -> Any:
        """The sum of what is selected: equal terms of equal layers as often as there are layers."""
        terms = []
        for (path, n), count in Counter((normal(path), n) for path, n in select(self.log)).items():
            found = (pair for place, pair in self.repeats.items() if path.startswith(f"{place}.*"))
            letter, layers = next(found, ("", 1))
            each, over = divmod(count, layers)
            terms.append((each * self.symbols.get(letter, 1) + over) * self._product(n))
        return sympy.Add(*terms)

    def _product(self, n: int) -> Any:
        """A product of sizes, taken apart into its letters."""
        if n not in self._known:
            rest, made = n, sympy.Integer(1)
            for prime, words in self.letters.items():
                while rest and rest % prime == 0:
                    rest //= prime
                    made *= sympy.sympify(words, locals=self.symbols)
            self._known[n] = made * rest
        return self._known[n]


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
        if self._reader is None or self._select is None or not self.value:
            return sympy.Integer(self.value)
        return self._reader.formula(self._select, self.value * self._over) / self._over

    def part(self, n: int) -> Amount:
        """Its n-th part, which must be a whole number."""
        return Amount(self.value // n, self._select, self._reader, self._over * n)

    @property
    def latex(self) -> str:
        """The formula for TeX."""
        return str(sympy.latex(self.formula))


@dataclass
class Reader:
    """Makes amounts of a log, and watches the module a second time when the first formula is asked for."""

    log: Log
    watch_again: Callable[[], Probe]
    why_none: str = ""  # why there are no formulas, or not for every number

    def amount(self, select: Select, over: int = 1) -> Amount:
        """The sum of what is selected, divided by `over`."""
        return Amount(sum(n for _, n in select(self.log)) // over, select, self, over)

    @cached_property
    def probe(self) -> Probe | None:
        try:
            found = self.watch_again()
        except (ValueError, RuntimeError, TypeError) as error:
            self.why_none = str(error).splitlines()[0]
            return None
        if found.log.shape() == self.log.shape():
            return found
        self.why_none = "at other sizes the module runs other operators (it loops over a size, or plans by it)"
        return None

    def formula(self, select: Select, value: int) -> Any:
        if self.probe is None:
            return sympy.Integer(value)
        found = sympy.factor_terms(sympy.expand(self.probe.sum(select)))
        if found.subs({self.probe.symbols[name]: n for name, n in self.probe.sizes.items()}) == value:
            return found
        self.why_none = self.why_none or "a size is rounded up or down on the way"
        return sympy.Integer(value)


@cache
def normal(path: str) -> str:
    """A module's path with the numbers of layers taken out: blocks.*.attention."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


# ---------------------------------------------------------------------- letters, and primes for them

_BATCH, _HEADS, _GROUPS, _WIDTH, _FREE = 9973, 101, 53, 31, 109
# Lengths, and what their 32nd part is rounded up to: fused attention keeps its sums in pieces of 32 queries.
_TARGETS = ((1951, 61), (991, 31), (223, 7), (61, 2))
_SOURCES = ((2143, 67), (863, 27), (251, 8), (59, 2))
_PATCHES = (2, 293, 19)  # two rows of 293; their 586 or 587 tokens are 19 pieces
_NAMES = {
    "d_ff": ("F", 1009), "vocab_size": ("V", 5003), "source_vocab_size": ("V_s", 5009), "max_len": ("N", 4001),
    "n_channels": ("C", 13), "patch_size": ("p", 17), "n_classes": ("n_c", 1013), "n_features": ("n_f", 1021),
    "d_latent": ("n_z", 1019),
}  # fmt: skip
_HEAD_NAMES = {"d_model": "M", "n_heads": "H", "n_kv_heads": "K", "d_head": "D"}


def letters_of(config: Any, tokens: Tokens, batch: int, source: bool) -> dict[str, int]:
    """The sizes by their letters, as they were asked for."""
    reads, writes = tokens if isinstance(tokens, (tuple, list)) else (tokens, tokens)
    sizes = {"B": batch} | ({} if writes is None else {"T": writes})
    if reads is not None and (source or reads != writes):
        sizes["S"] = reads
    for name, letter in (_HEAD_NAMES | {name: letter for name, (letter, _) in _NAMES.items()}).items():
        value: Any = getattr(config, name, None)
        if _is_whole(value):
            sizes.setdefault(letter, value)
    if _has_patches(config):
        sizes["N_p"] = config.grid[0] * config.grid[1]
    return sizes


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has_patches(config: Any) -> bool:
    return hasattr(config, "grid") and hasattr(config, "patch_size")


def repeats_of(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The outermost lists of equal layers by their path: letter and length."""
    lists = {
        path: len(part)
        for path, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential))
        and len({type(x) for x in part}) == 1
        and normal(path) == path
    }
    found = {}
    for path, n in lists.items():
        side = next((f"L_{side[0]}" for side in ("encoder", "decoder") if side in path.split(".")), "L")
        found[path] = ("L" if len(lists) == 1 else side, n)
    lengths = Counter(letter for letter, _ in set(found.values()))
    return {path: pair for path, pair in found.items() if lengths[pair[0]] == 1}


def probe_of(config: Any, tokens: Tokens, max_len: int | None) -> tuple[Any, Tokens, int, dict[int, str]]:
    """The same model with primes for sizes: its configuration, tokens and batch, and what each prime stands for."""
    letters = {_BATCH: "B", **PAIR_LETTERS}
    longest = max_len or 10**9
    if config is not None:
        config, own = _config(config)
        letters |= own
        longest = 10**9 if max_len is None else getattr(config, "max_len", longest)

    def prime(pairs: tuple[tuple[int, int], ...], letter: str) -> int:
        n, pieces = next((pair for pair in pairs if pair[0] <= longest), (0, 0))
        letters.update({n: letter} | ({pieces: f"ceiling({letter}/32)"} if pieces > 5 else {}))
        return n

    length: Tokens = None if tokens is None else prime(_TARGETS, "T")
    if isinstance(tokens, (tuple, list)) and isinstance(length, int):
        length = (length if tokens[0] == tokens[1] else prime(_SOURCES, "S"), length)
    return config, length, _BATCH, dict(sorted(letters.items(), reverse=True))


def _config(config: Any) -> tuple[Any, dict[int, str]]:
    """A configuration with primes for its whole numbers, as far as it takes them."""
    changes: list[tuple[dict[str, Any], dict[int, str]]] = []
    if _is_whole(getattr(config, "n_heads", None)):
        changes.append(_heads(config))
    elif _is_whole(getattr(config, "d_model", None)):
        changes.append(({"d_model": 2 * _FREE}, {_FREE: "M/2"}))
    if _has_patches(config):
        rows, columns, pieces = _PATCHES
        extra = getattr(getattr(config, "pooling", None), "n_extra", 0)
        own = {17: "p", columns: f"(N_p/{rows})", pieces: f"ceiling((N_p + {extra})/32)"}
        own |= {rows * columns + 1: "(N_p + 1)"} if extra == 1 else {}
        changes.append(({"image_size": (17 * rows, 17 * columns), "patch_size": 17}, own))
    for name, (letter, prime) in _NAMES.items():
        if _is_whole(getattr(config, name, None)):
            change: dict[str, Any] = {name: prime}
            if name == "max_len" and getattr(getattr(config, "positions", None), "max_len", None) is not None:
                change["positions"] = replace(config.positions, max_len=prime)
            changes.append((change, {prime: letter}))
    letters: dict[int, str] = {}
    for change, own in changes:
        if not own.keys() <= letters.keys():
            try:
                config, letters = replace(config, **change), letters | own
            except ClearheadError:
                continue  # it takes no other value
    return config, letters


def _heads(config: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Width, heads, key heads and their width: M = H · D unless D is given, and K divides H."""
    grouped, free = config.n_kv_heads is not None, config.d_head is not None
    width = config.d_head if free else config.d_model // config.n_heads
    even = 8 if width % 8 == 0 else 2 if width % 2 == 0 else 1
    heads, D = (_GROUPS * _HEADS if grouped else _HEADS), even * _WIDTH
    letters = {_HEADS: "(H/K)", _GROUPS: "K"} if grouped else {_HEADS: "H"}
    letters |= {_WIDTH: f"(D/{even})", _FREE: "(M/2)"} if free else {_WIDTH: f"(M/H/{even})"}
    changes = {"n_heads": heads, "d_model": 2 * _FREE if free else heads * D} | ({"d_head": D} if free else {})
    return changes | ({"n_kv_heads": _GROUPS} if grouped else {}), letters
