"""Recover symbolic formulas from a second execution at prime sizes.

Every number in a log is a sum of products of sizes. If the sizes are distinct primes, a product determines its factors:
83 · 1951 · 248 · 101 is B · T · D · H and nothing else. The same module is therefore executed again at such sizes, each
number is factored into symbols, and equal terms of equal layers are combined. A formula is accepted only if it
reproduces the value recorded at the requested sizes, which is a second, independent point. If it does not (because of a
loop over tokens or a tile size), the result is the number itself.

The integers of a configuration have the shape letters of the design. Each is replaced by a prime, or by a prime times
its required divisor (heads divide the width, a rotary head width is even). A field that accepts no other value remains
a number in the formulas. For a module without a configuration only batch and tokens are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
from torch import nn

from clearhead._core.call_types import Kwargs
from clearhead._core.json_types import JSONObject
from clearhead.analysis.cost.dispatch import PAIR_SYMBOLS
from clearhead.analysis.cost.op_recorder import ExecutionLog, normalize_path
from clearhead.analysis.inputs.example import Tokens
from clearhead.errors import ClearheadError

TermSelector = Callable[[ExecutionLog], Iterable[tuple[str, int]]]
"""Selects terms of a log, each with the path of its module."""


@dataclass(frozen=True)
class SymbolicProbe:
    """The log of an execution at prime sizes, the expression of each prime, and the layer lists by path."""

    log: ExecutionLog
    expressions: dict[int, str]
    sizes: dict[str, int]  # values of the symbols in the execution whose formulas are recovered
    layer_lists: dict[str, tuple[str, int]]
    _products: dict[int, sympy.Expr] = field(default_factory=dict)

    @cached_property
    def symbols(self) -> dict[str, sympy.Symbol]:
        return {name: sympy.Symbol(name, positive=True, integer=True) for name in self.sizes}

    def sum(self, select: TermSelector) -> sympy.Expr:
        """Return the sum of the selected terms; equal terms of equal layers are multiplied by the layer count."""
        terms = []
        for (path, n), count in Counter((normalize_path(path), n) for path, n in select(self.log)).items():
            matches = (pair for prefix, pair in self.layer_lists.items() if path.startswith(f"{prefix}.*"))
            symbol, layers = next(matches, ("", 1))
            per_layer, remainder = divmod(count, layers)
            terms.append((per_layer * self.symbols.get(symbol, 1) + remainder) * self._product(n))
        return sympy.Add(*terms)

    def _product(self, n: int) -> sympy.Expr:
        """Factor a product of sizes into symbols."""
        if n not in self._products:
            remainder = n
            product = sympy.Integer(1)
            for prime, expression in self.expressions.items():
                while remainder and remainder % prime == 0:
                    remainder //= prime
                    product *= sympy.sympify(expression, locals=self.symbols)
            self._products[n] = product * remainder
        return self._products[n]


class SymbolicCount:
    """A whole number with a formula, which is computed when it is first read.

    Example:
        >>> ch.cost("tiny-decoder", tokens=7).parameters
        30,752 = M*(12*L*M + 13*L + N + V + 2)
    """

    __slots__ = ("_divisor", "_formula", "_select", "_solver", "value")

    def __init__(
        self,
        value: int,
        select: TermSelector | None = None,
        solver: FormulaSolver | None = None,
        divisor: int = 1,
    ) -> None:
        self.value = value
        self._select = select
        self._solver = solver
        self._divisor = divisor
        self._formula: sympy.Expr | None = None

    def __bool__(self) -> bool:
        return self.value != 0

    def __repr__(self) -> str:
        return f"{self.value:,} = {self.formula}"

    def __getstate__(self) -> tuple[int, sympy.Expr]:
        """Return value and formula, without the log that the formula is recovered from."""
        return self.value, self.formula

    def __setstate__(self, state: tuple[int, sympy.Expr]) -> None:
        value, formula = state
        self.__init__(value)  # type: ignore[misc]
        self._formula = formula

    @property
    def formula(self) -> sympy.Expr:
        """The sympy expression with common factors extracted, or the number itself if there is no formula."""
        if self._formula is None:
            if self._solver is None or self._select is None or not self.value:
                self._formula = sympy.Integer(self.value)
            else:
                self._formula = self._solver.formula(self._select, self.value * self._divisor) / self._divisor
        return self._formula

    def divide(self, n: int) -> SymbolicCount:
        """Return the count divided by `n`, which must divide it."""
        return SymbolicCount(self.value // n, self._select, self._solver, self._divisor * n)

    @property
    def latex(self) -> str:
        """The formula in LaTeX."""
        return str(sympy.latex(self.formula))


class FormulaSolver:
    """Creates counts from a log; executes the module a second time when the first formula is read.

    Args:
        log: The execution whose values are counted.
        execute_probe: Executes the same module at prime sizes.
    """

    def __init__(self, log: ExecutionLog, execute_probe: Callable[[], SymbolicProbe]) -> None:
        self.log = log
        self.failure_reason = ""  # why there are no formulas, or not for every number
        self._execute_probe: Callable[[], SymbolicProbe] | None = execute_probe

    def __getstate__(self) -> JSONObject:
        """Execute the probe, so that the state is data and does not contain the module."""
        _ = self.probe
        return vars(self) | {"_execute_probe": None}

    def count(self, select: TermSelector, divisor: int = 1) -> SymbolicCount:
        """Return the sum of the selected terms divided by `divisor`."""
        return SymbolicCount(sum(n for _, n in select(self.log)) // divisor, select, self, divisor)

    @cached_property
    def probe(self) -> SymbolicProbe | None:
        assert self._execute_probe is not None  # unpickled solvers have a probe
        try:
            probe = self._execute_probe()
        except (ValueError, RuntimeError, TypeError) as error:
            self.failure_reason = str(error).splitlines()[0]
            return None
        if probe.log.signature() == self.log.signature():
            return probe
        self.failure_reason = "the module runs other operators at other sizes (a loop over a size, or a plan)"
        return None

    def formula(self, select: TermSelector, value: int) -> sympy.Expr:
        """Return the formula of the selected terms, or `value` if no formula reproduces it."""
        if self.probe is None:
            return sympy.Integer(value)
        formula = sympy.factor_terms(sympy.expand(self.probe.sum(select)))
        if formula.subs({self.probe.symbols[name]: n for name, n in self.probe.sizes.items()}) == value:
            return formula
        self.failure_reason = self.failure_reason or "a size is rounded up or down"
        return sympy.Integer(value)


# ---------------------------------------------------------------------- symbols and their primes

_BATCH = 9973
_HEADS = 101
_GROUPS = 53
_WIDTH = 31
_FREE = 109
# Lengths, and their number of 32-query pieces rounded up: fused attention stores its statistics by such pieces.
_TARGETS = ((1951, 61), (991, 31), (223, 7), (61, 2))
_SOURCES = ((2143, 67), (863, 27), (251, 8), (59, 2))
_PATCHES = (2, 293, 19)  # two rows of 293; their 586 or 587 tokens are 19 pieces
_FIELD_SYMBOLS = {
    "d_ff": ("F", 1009),
    "vocab_size": ("V", 5003),
    "source_vocab_size": ("V_s", 5009),
    "max_len": ("N", 4001),
    "n_channels": ("C", 13),
    "patch_size": ("p", 17),
    "n_classes": ("n_c", 1013),
    "n_features": ("n_f", 1021),
    "d_latent": ("n_z", 1019),
}
_HEAD_SYMBOLS = {"d_model": "M", "n_heads": "H", "n_kv_heads": "K", "d_head": "D"}


def size_symbols(config: Any, tokens: Tokens, batch: int, has_source: bool) -> dict[str, int]:
    """Return the requested sizes by symbol."""
    source, target = tokens if isinstance(tokens, (tuple, list)) else (tokens, tokens)
    sizes = {"B": batch} | ({} if target is None else {"T": target})
    if source is not None and (has_source or source != target):
        sizes["S"] = source
    for name, symbol in (_HEAD_SYMBOLS | {name: symbol for name, (symbol, _) in _FIELD_SYMBOLS.items()}).items():
        value: Any = getattr(config, name, None)
        if _is_whole(value):
            sizes.setdefault(symbol, value)
    if _has_patches(config):
        sizes["N_p"] = config.grid[0] * config.grid[1]
    return sizes


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has_patches(config: object) -> bool:
    return hasattr(config, "grid") and hasattr(config, "patch_size")


def layer_lists(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return symbol and length of the outermost lists of equal layers by path."""
    lengths = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len({type(x) for x in module}) == 1
        and normalize_path(path) == path
    }
    lists = {}
    for path, n in lengths.items():
        side = next((f"L_{side[0]}" for side in ("encoder", "decoder") if side in path.split(".")), "L")
        lists[path] = ("L" if len(lengths) == 1 else side, n)
    uses = Counter(symbol for symbol, _ in set(lists.values()))
    return {path: pair for path, pair in lists.items() if uses[pair[0]] == 1}


def prime_sizes(config: Any, tokens: Tokens, max_len: int | None) -> tuple[Any, Tokens, int, dict[int, str]]:
    """Return configuration, tokens and batch with prime sizes, and the expression of each prime."""
    expressions = {_BATCH: "B", **PAIR_SYMBOLS}
    max_tokens = max_len or 10**9
    if config is not None:
        config, config_expressions = _with_prime_fields(config)
        expressions |= config_expressions
        max_tokens = 10**9 if max_len is None else getattr(config, "max_len", max_tokens)

    def prime(pairs: tuple[tuple[int, int], ...], symbol: str) -> int:
        n, pieces = next((pair for pair in pairs if pair[0] <= max_tokens), (0, 0))
        expressions.update({n: symbol} | ({pieces: f"ceiling({symbol}/32)"} if pieces > 5 else {}))
        return n

    length: Tokens = None if tokens is None else prime(_TARGETS, "T")
    if isinstance(tokens, (tuple, list)) and isinstance(length, int):
        length = (length if tokens[0] == tokens[1] else prime(_SOURCES, "S"), length)
    return config, length, _BATCH, dict(sorted(expressions.items(), reverse=True))


def _with_prime_fields(config: Any) -> tuple[Any, dict[int, str]]:
    """Replace the integers of a configuration by primes, as far as it accepts them."""
    changes: list[tuple[Kwargs, dict[int, str]]] = []
    if _is_whole(getattr(config, "n_heads", None)):
        changes.append(_prime_heads(config))
    elif _is_whole(getattr(config, "d_model", None)):
        changes.append(({"d_model": 2 * _FREE}, {_FREE: "M/2"}))
    if _has_patches(config):
        rows, columns, pieces = _PATCHES
        extra = getattr(getattr(config, "pooling", None), "n_extra", 0)
        patch_expressions = {17: "p", columns: f"(N_p/{rows})", pieces: f"ceiling((N_p + {extra})/32)"}
        patch_expressions |= {rows * columns + 1: "(N_p + 1)"} if extra == 1 else {}
        changes.append(({"image_size": (17 * rows, 17 * columns), "patch_size": 17}, patch_expressions))
    for name, (symbol, prime) in _FIELD_SYMBOLS.items():
        if _is_whole(getattr(config, name, None)):
            change: Kwargs = {name: prime}
            if name == "max_len" and getattr(getattr(config, "positions", None), "max_len", None) is not None:
                change["positions"] = replace(config.positions, max_len=prime)
            changes.append((change, {prime: symbol}))
    expressions: dict[int, str] = {}
    for change, change_expressions in changes:
        if not change_expressions.keys() <= expressions.keys():
            try:
                config = replace(config, **change)
            except ClearheadError:
                continue  # the field accepts no other value
            expressions |= change_expressions
    return config, expressions


def _prime_heads(config: Any) -> tuple[Kwargs, dict[int, str]]:
    """Return primes for width, heads, key heads and head width: M = H · D unless D is set, and K divides H."""
    is_grouped = config.n_kv_heads is not None
    has_head_width = config.d_head is not None
    width = config.d_head if has_head_width else config.d_model // config.n_heads
    even = 8 if width % 8 == 0 else 2 if width % 2 == 0 else 1
    heads = _GROUPS * _HEADS if is_grouped else _HEADS
    head_width = even * _WIDTH
    expressions = {_HEADS: "(H/K)", _GROUPS: "K"} if is_grouped else {_HEADS: "H"}
    expressions |= {_WIDTH: f"(D/{even})", _FREE: "(M/2)"} if has_head_width else {_WIDTH: f"(M/H/{even})"}
    changes = {"n_heads": heads, "d_model": 2 * _FREE if has_head_width else heads * head_width}
    if has_head_width:
        changes["d_head"] = head_width
    if is_grouped:
        changes["n_kv_heads"] = _GROUPS
    return changes, expressions
