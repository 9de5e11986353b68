"""Mask expressions as nested lists, `["and", ["causal"], ["window", 2, 0]]`: drawn, built, and judged by definition.

`table` says what an expression allows from the words of the design, in integer arithmetic over positions. It shares no
code with the package, but for `scattered`, whose choice of keys is a hash and is taken from the package as it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clearhead import masks
from clearhead.masks import Mask

Spec = list[Any]
POSITIONAL = {"causal", "window", "dilated", "blocks", "documents"}
DATA = {"padding", "documents", "allow", "forbid"}


@dataclass(frozen=True)
class Sizes:
    """Where an expression stands: the batch's shape, heads, queries, keys, the first query's position."""

    lead: tuple[int, ...]
    H: int
    T: int
    S: int
    offset: int

    @property
    def full(self) -> tuple[int, ...]:
        return (*self.lead, self.H, self.T, self.S)


def draw(chance: random.Random, *, data: bool, depth: int = 3) -> Spec:
    """An expression of at most 2^depth leaves."""
    if depth and chance.random() < 0.55:
        operator = chance.choice(["and", "or", "not", "T", "and", "or"])
        n = 1 if operator in ("not", "T") else 2
        return [operator, *(draw(chance, data=data, depth=depth - 1) for _ in range(n))]
    names = ["full", "causal", "window", "every", "dilated", "prefix", "blocks", "scattered"]
    name = chance.choice(names + sorted(DATA) * data)
    small, positive = chance.randint(0, 7), chance.randint(1, 7)
    arguments: dict[str, list[int]] = {
        "window": [small, chance.randint(0, 7)],
        "every": [positive, small],
        "dilated": [positive],
        "prefix": [chance.randint(0, 20)],
        "blocks": [positive],
        "scattered": [positive, chance.randint(0, 3)],
        "padding": [chance.randint(0, 99), chance.randint(0, 1), chance.randint(0, 1)],  # seed, in a batch, on the left
        "documents": [chance.randint(0, 99), chance.randint(0, 1)],  # seed, in a batch
        "allow": [chance.randint(0, 99), chance.randint(0, 3)],  # seed, shape
        "forbid": [chance.randint(0, 99), chance.randint(0, 3)],
    }
    return [name, *arguments.get(name, [])]


def leaves(spec: Spec) -> set[str]:
    return {name for part in spec[1:] if isinstance(part, list) for name in leaves(part)} or {str(spec[0])}


def build(spec: Spec, at: Sizes, device: str = "cpu", *, swapped: bool = False) -> Mask:
    """The package's mask."""
    name, *rest = spec
    if name == "and":
        return build(rest[0], at, device, swapped=swapped) & build(rest[1], at, device, swapped=swapped)
    if name == "or":
        return build(rest[0], at, device, swapped=swapped) | build(rest[1], at, device, swapped=swapped)
    if name == "not":
        return ~build(rest[0], at, device, swapped=swapped)
    if name == "T":
        return build(rest[0], at, device, swapped=not swapped).T
    if name == "padding":
        lengths, before = (torch.tensor(x, dtype=torch.int64, device=device) for x in _padding(rest, at))
        return masks.padding(lengths, left_pad=before) if rest[2] else masks.padding(lengths)
    if name == "documents":
        return masks.documents(torch.tensor(_documents(rest, at), dtype=torch.int64, device=device))
    if name in ("allow", "forbid"):
        return getattr(masks, name)(torch.tensor(_pairs(rest, at, swapped), device=device))
    made: Mask = getattr(masks, name)(*rest)
    return made


def table(spec: Spec, at: Sizes, *, swapped: bool = False) -> np.ndarray:
    """What may attend, for all (lead, H, T, S) or what broadcasts to it."""
    name, *rest = spec
    if name == "and":
        return table(rest[0], at, swapped=swapped) & table(rest[1], at, swapped=swapped)
    if name == "or":
        return table(rest[0], at, swapped=swapped) | table(rest[1], at, swapped=swapped)
    if name == "not":
        return ~table(rest[0], at, swapped=swapped)
    if name == "T":
        return table(rest[0], at, swapped=not swapped)
    if name == "scattered":
        mask = masks.scattered(*rest)
        return (mask.T if swapped else mask).dense(at.T, at.S, query_offset=at.offset).numpy()
    if name in ("allow", "forbid"):
        pairs = _pairs(rest, at, swapped)
        pairs = np.swapaxes(pairs, -1, -2) if swapped else pairs
        return pairs if name == "allow" else ~pairs
    query, key = at.offset + np.arange(at.T)[:, None], np.arange(at.S)[None, :]
    p, j = (key, query) if swapped else (query, key)
    if name == "documents":
        ids = _documents(rest, at)
        front = (*ids.shape[:-1], 1) if ids.ndim > 1 else ()
        mine, theirs = (ids[..., x.ravel()].reshape(*front, *x.shape) for x in (p, j))
        return (mine == theirs) & (mine >= 0)
    if name == "padding":
        lengths, before = _padding(rest, at)
        if lengths.ndim:
            lengths, before = (x.reshape(*x.shape, 1, 1, 1) for x in (lengths, before))
        start = before if rest[2] else 0 * before
        return (start <= j) & (j < start + lengths) & (p == p)
    return np.broadcast_to(_by_position(name, rest, p, j), (at.T, at.S))


def _by_position(name: str, arguments: list[int], p: np.ndarray, j: np.ndarray) -> Any:
    """The definitions, straight from the words of the design."""
    match name, arguments:
        case "full", _:
            return p == p
        case "causal", _:
            return j <= p
        case "window", [before, after]:
            return (p - before <= j) & (j <= p + after)
        case "every", [step, start]:
            return (j >= start) & ((j - start) % step == 0)
        case "dilated", [step]:
            return abs(p - j) % step == 0
        case "prefix", [n]:
            return j < n
        case "blocks", [size]:
            return p // size == j // size
    raise AssertionError(f"no definition of {name}")


def _padding(rest: list[int], at: Sizes) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(rest[0])
    shape = at.lead if rest[1] else ()
    return g.integers(0, at.S + 2, shape), g.integers(0, 4, shape)


def _documents(rest: list[int], at: Sizes) -> np.ndarray:
    g = np.random.default_rng(rest[0])
    shape = (*(at.lead if rest[1] else ()), max(at.S, at.offset + at.T))
    found = g.integers(-1, 4, shape)
    return np.sort(found, -1) if rest[0] % 2 else found


def _pairs(rest: list[int], at: Sizes, swapped: bool) -> np.ndarray:
    g = np.random.default_rng(rest[0])
    front = [(), (at.H,), (*at.lead, 1), (*at.lead, at.H)][rest[1]]
    last = (at.S, at.T) if swapped else (at.T, at.S)
    return g.random((*front, *last)) < (0.03 if rest[0] % 3 == 0 else 0.5)
