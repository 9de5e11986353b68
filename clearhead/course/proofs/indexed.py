"""Normal forms of indexed expressions such as Σ_j exp(s_j) / Σ_l exp(s_l), for sums of any length.

Two expressions are equal if the normal form of their difference is 0. The normal form unfolds no size: sums keep their
symbolic length, and are split into independent factors, contracted with Kronecker deltas and renamed, so that the
order of summation and the names of bound indices do not matter.

Terms are sympy expressions. Indices are integer symbols whose name contains their range, as in "j:n"; the entries of an
array, deltas, sums, products and permutations of indices are applied undefined functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, permutations, product
from typing import Any

import sympy

Term = Any  # a sympy expression: sympy ships no types

_SUM = sympy.Function("Σ", real=True)
_PRODUCT = sympy.Function("Π", real=True)
_DELTA = sympy.Function("δ", integer=True, nonnegative=True)
_INDEXED = (_SUM, _PRODUCT, _DELTA)
_PERMUTED = sympy.Function("σ", integer=True)
_UNPERMUTED = sympy.Function("σ⁻¹", integer=True)
_MOST_INDICES = 5  # bound indices of one sum that are tried in every order
_fresh = count()


def size(name: str) -> Term:
    """Return a size, such as the number of tokens: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def scalar(name: str, positive: bool = False) -> Term:
    """Return a real number."""
    return sympy.Symbol(name, real=True, positive=positive or None)


def index(name: str, length: Term) -> Term:
    """Return an index that counts from 1 to a length."""
    return sympy.Symbol(f"{name}:{length}", integer=True, positive=True)


def fresh_index(length: Term) -> Term:
    """Return an unused index."""
    return index(f"'{next(_fresh)}", length)


def range_of(term: Term) -> str:
    """Return the range of an index, of a permuted index, or "" for other integers."""
    if term.func in (_PERMUTED, _UNPERMUTED):
        return range_of(term.args[0])
    return term.name.partition(":")[2] if term.is_Symbol else ""


def delta(i: Term, j: Term) -> Term:
    """Return the Kronecker delta, which is 1 for equal indices and 0 for others."""
    if i.func == j.func and i.func in (_PERMUTED, _UNPERMUTED):
        return delta(i.args[0], j.args[0])
    if j.func == _PERMUTED:
        i, j = j, i
    if i.func == _PERMUTED:  # δ(σ(i), j) = δ(i, σ⁻¹(j))
        i = i.args[0]
        j = _apply(_UNPERMUTED, j)
    difference = sympy.expand(i - j)
    if difference.is_Integer:
        return sympy.Integer(int(difference == 0))
    return _DELTA(*sorted((i, j), key=sympy.default_sort_key))


def permuted(i: Term) -> Term:
    """Return σ(i) for a permutation σ."""
    return _apply(_PERMUTED, i)


def total(body: Term, bound: Term) -> Term:
    """Return the sum of `body` over an index, not yet in normal form."""
    return _SUM(body, bound)


def iterated_product(body: Term, bound: Term) -> Term:
    """Return the product of `body` over an index, not yet in normal form."""
    return _PRODUCT(body, bound)


def is_zero(term: Term) -> bool:
    """Return whether an expression is 0 for all sizes and all values."""
    term = normalize(term)
    if term == 0:
        return True
    functions = {part: sympy.Dummy(real=True) for part in _outermost_functions(term)}
    term = term.xreplace(functions)
    # Roots become symbols with a known square, so that fractions can be brought to one denominator.
    roots = {power.base for power in term.atoms(sympy.Pow) if power.exp.is_Rational and power.exp.q == 2}
    names = {base: sympy.Dummy(positive=True) for base in roots}
    term = term.replace(
        lambda x: x.is_Pow and x.base in names and x.exp.is_Rational, lambda x: names[x.base] ** (2 * x.exp)
    )
    try:
        numerator = sympy.fraction(sympy.cancel(sympy.together(term)))[0]
        for base, name in names.items():
            square = sympy.fraction(sympy.together(name**2 - base))[0]
            numerator = sympy.rem(numerator, square, name) if numerator.has(name) else numerator
    except sympy.PolynomialError:  # roots of roots: not shown to be 0
        return False
    return bool(sympy.expand(numerator) == 0)


def _outermost_functions(term: Term) -> set[Term]:
    if term.is_Function:
        return {term}
    return set().union(*map(_outermost_functions, term.args))


def is_nonnegative(term: Term) -> bool:
    """Return whether an expression is visibly at least 0: sums and products of squares and of positive numbers."""
    if term.func in (_SUM, _PRODUCT):
        return is_nonnegative(term.args[0])
    if term.is_Pow and term.exp.is_Integer and term.exp.is_even:
        return True
    if term.is_Pow and term.exp.is_Rational:
        return is_nonnegative(term.base)
    if term.is_nonnegative:
        return True
    if term.is_Add and len(term.args) == 2 and 1 in term.args and (1 - term).func == _DELTA:
        return True
    return (term.is_Add or term.is_Mul) and all(is_nonnegative(part) for part in term.args)


def is_positive(term: Term) -> bool:
    """Return whether an expression is visibly above 0; a sum over an index has at least one term."""
    if term.is_positive:
        return True
    if term.func in (_SUM, _PRODUCT) or (term.is_Pow and term.exp.is_real):
        return is_positive(term.args[0])
    if term.is_Add:
        return any(map(is_positive, term.args)) and all(map(is_nonnegative, term.args))
    return bool(term.is_Mul) and all(map(is_positive, term.args))


def normalize(term: Term) -> Term:
    """Return the normal form of an expression."""
    if term.is_Atom:
        return term
    if term.func == _DELTA:
        return delta(*term.args)
    if term.func in (_PERMUTED, _UNPERMUTED):
        return _apply(term.func, normalize(term.args[0]))
    if term.func in (_SUM, _PRODUCT):
        # Fresh names keep the canonical names of inner sums from capturing an index of an outer one.
        renamed = {old: fresh_index(range_of(old)) for old in term.args[1:]}
        body = normalize(term.args[0].xreplace(renamed))
        bound = list(renamed.values())
        return _sum(body, bound) if term.func == _SUM else _iterated_product(body, bound[0])
    parts = [normalize(part) for part in term.args]
    return _expand(term.func(*parts))


def replace_equal(term: Term, lhs: Term, rhs: Term) -> Term:
    """Return an expression with the equation lhs = rhs used to remove one factor of the left side."""
    lhs = normalize(lhs)
    atom, power = removed_factor(lhs)
    return term.xreplace({atom: (rhs * atom**power / lhs) ** (1 / power)})


def removed_factor(lhs: Term) -> tuple[Term, Term]:
    """Return the factor of the left side of an equation that `replace_equal` removes, as a base and its exponent.

    Raises:
        ValueError: If there is no factor that occurs in other expressions as such.
    """
    factors = sorted(sympy.Mul.make_args(normalize(lhs)), key=lambda factor: factor.func not in _INDEXED)
    atom, power = factors[0].as_base_exp()
    if atom.is_Atom or atom.is_Add:
        raise ValueError("the left side of an assumption or claim must be an entry, a sum over an index or a delta")
    return atom, power


def derivative(term: Term, entry: Term) -> Term:
    """Return the derivative of an expression by one entry of an array, such as z_b."""
    if term.func == entry.func:
        pairs = zip(term.args, entry.args, strict=True)
        return sympy.Mul(*[delta(i, j) for i, j in pairs])
    if not term.has(entry.func):
        return sympy.S.Zero
    if term.func == _SUM:
        return _SUM(derivative(term.args[0], entry), *term.args[1:])
    result = sympy.S.Zero
    for k, part in enumerate(term.args):
        if part.has(entry.func):
            x = sympy.Dummy(real=True)
            outer = term.func(*[x if n == k else other for n, other in enumerate(term.args)]).diff(x)
            result += outer.xreplace({x: part}) * derivative(part, entry)
    return result


def expectation(term: Term, random: Iterable[str]) -> Term:
    """Return the expected value if all entries of the arrays named in `random` are independent.

    They have mean 0 and variance 1; products may contain each array at most twice.
    """
    names = set(random)
    result = sympy.S.Zero
    for part in sympy.Add.make_args(normalize(term)):
        factors, bound = _open_sums(part, lambda factor: _has_array(factor, names))
        entries = [factor for factor in factors if factor.func.__name__ in names]
        remaining = [factor for factor in factors if factor.func.__name__ not in names]
        if any(_has_array(factor, names) for factor in remaining):
            raise ValueError("the expected value of this expression is unknown; expected a polynomial")
        moments = [_moment([entry for entry in entries if entry.func.__name__ == name]) for name in sorted(names)]
        result += _SUM(sympy.Mul(*remaining, *moments), *bound) if bound else sympy.Mul(*remaining, *moments)
    return normalize(result)


def _moment(entries: Sequence[Term]) -> Term:
    """Return E[x_a x_b] = δ_ab and E[x_a] = 0."""
    if len(entries) > 2:
        raise ValueError("only moments up to the second are known here")
    if len(entries) == 1:
        return sympy.S.Zero
    if not entries:
        return sympy.S.One
    return sympy.Mul(*[delta(i, j) for i, j in zip(entries[0].args, entries[1].args, strict=True)])


def _has_array(term: Term, names: set[str]) -> bool:
    return any(part.func.__name__ in names for part in sympy.preorder_traversal(term))


def _apply(function: Any, i: Term) -> Term:
    """Return σ(i) or σ⁻¹(i); each undoes the other."""
    inverse = _UNPERMUTED if function == _PERMUTED else _PERMUTED
    return i.args[0] if i.func == inverse else function(i)


def _expand(term: Term) -> Term:
    """Return a sum of monomials: products, powers and trigonometric functions of sums are expanded."""
    term = sympy.expand(sympy.expand_trig(term) if term.has(sympy.sin, sympy.cos) else term)
    term = term.replace(_is_even_sine, lambda x: (1 - sympy.cos(x.base.args[0]) ** 2) ** (x.exp / 2))
    parts = [_apply_deltas(part) for part in sympy.Add.make_args(sympy.expand(term))]
    return sympy.Add(*parts)


def _is_even_sine(x: Term) -> bool:
    return bool(x.is_Pow and x.base.func == sympy.sin and x.exp.is_Integer and x.exp.is_even and x.exp > 0)


def _factors(monomial: Term) -> list[Term]:
    """Return the factors of a monomial; positive integer powers are repeated, except of deltas."""
    result: list[Term] = []
    for factor in sympy.Mul.make_args(monomial):
        base, power = factor.as_base_exp()
        if base.func == _DELTA and power.is_positive:
            result.append(base)
        elif power.is_Integer and power > 0:
            result += [base] * int(power)
        else:
            result.append(factor)
    return result


def _apply_deltas(monomial: Term) -> Term:
    """Return δ(a, b)·f(b) as δ(a, b)·f(a), so that equal products look equal."""
    if not monomial.has(_DELTA):
        return monomial
    factors = _factors(monomial)
    for position, factor in enumerate(factors):
        if factor.func == _DELTA and factor.args[1].is_Symbol:
            a, b = factor.args
            remaining = factors[:position] + factors[position + 1 :]
            if any(other.has(b) for other in remaining):
                return normalize(factor * sympy.Mul(*remaining).xreplace({b: a}))
    return sympy.Mul(*factors)


def _open_sums(monomial: Term, is_opened: Callable[[Term], bool]) -> tuple[list[Term], list[Term]]:
    """Return the factors of a monomial, with the sums for which `is_opened` is true opened, and their bound indices."""
    factors: list[Term] = []
    bound: list[Term] = []
    pending = _factors(monomial)
    while pending:
        factor = pending.pop()
        if factor.func == _SUM and is_opened(factor):
            renamed = {old: fresh_index(range_of(old)) for old in factor.args[1:]}
            bound += renamed.values()
            pending += _factors(factor.args[0].xreplace(renamed))
        else:
            factors.append(factor)
    return factors, bound


def _sum(body: Term, bound: Sequence[Term]) -> Term:
    """Return the normal form of a sum over several indices."""
    return sympy.Add(*[_monomial_sum(part, list(bound)) for part in sympy.Add.make_args(_expand(body))])


def _monomial_sum(monomial: Term, bound: list[Term]) -> Term:
    factors, more = _open_sums(monomial, lambda factor: factor.has(*bound))
    if more:
        return _sum(sympy.Mul(*factors), [*bound, *more])
    for position, factor in enumerate(factors):
        if factor.func == _DELTA:
            for old, new in _solutions(*factor.args):
                if old in bound and range_of(old) == range_of(new) and not new.has(old):
                    body_without_delta = sympy.Mul(*factors[:position], *factors[position + 1 :]).xreplace({old: new})
                    return _sum(normalize(body_without_delta), [i for i in bound if i != old])
    result = sympy.S.One
    remaining = list(factors)
    for old in bound:  # sums over an index that does not occur
        if not any(factor.has(old) for factor in remaining):
            result *= size(range_of(old))
    pending = [i for i in bound if any(factor.has(i) for factor in remaining)]
    while pending:
        group = {pending[0]}
        group_factors = []
        while connected := [factor for factor in remaining if factor.has(*group)]:
            group_factors += connected
            remaining = [factor for factor in remaining if factor not in connected]
            group |= {i for i in pending if any(factor.has(i) for factor in connected)}
        pending = [i for i in pending if i not in group]
        result *= _canonical(_SUM, sympy.Mul(*group_factors), sorted(group, key=str))
    return result * sympy.Mul(*remaining)


def _solutions(i: Term, j: Term) -> list[tuple[Term, Term]]:
    """Return the ways to write i = j as an index and its value; i = σ⁻¹(j) is also j = σ(i)."""
    pairs = [(i, j), (j, i)]
    return pairs + [(old.args[0], _apply(_PERMUTED, new)) for old, new in pairs if old.func == _UNPERMUTED]


def _canonical(function: Any, body: Term, bound: Sequence[Term]) -> Term:
    """Return a sum or product with canonical names of its bound indices, the least of all candidates."""
    inner = [part for part in sympy.preorder_traversal(body) if part.func in (_SUM, _PRODUCT)]
    level = 1 + max((_level(symbol) for part in inner for symbol in part.args[1:]), default=0)
    orders = permutations(bound) if len(bound) <= _MOST_INDICES else [tuple(bound)]
    candidates = []
    for order in orders:
        names = [index(f"#{level + k}", range_of(old)) for k, old in enumerate(order)]
        permuted_indices = [old for old in order if body.has(_PERMUTED(old))]
        for choices in product((False, True), repeat=len(permuted_indices)):
            # A permutation of a bound index may be undone: Σ_l f(σ(l)) = Σ_m f(m).
            undone = {old: _UNPERMUTED(old) for old, undo in zip(permuted_indices, choices, strict=True) if undo}
            renamed = _substitute(body, undone).xreplace(dict(zip(order, names, strict=True)))
            candidates.append((sympy.count_ops(renamed, visual=False), str(renamed), renamed, names))
    _, _, renamed, names = min(candidates, key=lambda candidate: candidate[:2])
    return function(renamed, *names)


def _substitute(body: Term, undone: dict[Term, Term]) -> Term:
    """Return a body with indices replaced; permutations of permutations cancel."""
    if not undone:
        return body
    return body.xreplace(undone).replace(
        lambda x: x.func in (_PERMUTED, _UNPERMUTED), lambda x: _apply(x.func, x.args[0])
    )


def _level(symbol: Term) -> int:
    name = symbol.name.partition(":")[0]
    return int(name[1:]) if name.startswith("#") else 0


def _iterated_product(body: Term, bound: Term) -> Term:
    """Return the normal form of a product: a product of the products of each factor."""
    result = sympy.S.One
    for factor in sympy.Mul.make_args(body):
        base, power = factor.as_base_exp()
        if not factor.has(bound):
            result *= factor ** size(range_of(bound))
        elif power.is_Integer:
            result *= _canonical(_PRODUCT, base, [bound]) ** power
        else:
            result *= _canonical(_PRODUCT, factor, [bound])
    return result
