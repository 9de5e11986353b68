"""Mask expressions as nested lists, `["and", ["causal"], ["window", 2, 0]]`: draw them, build masks, and evaluate them.

`table` evaluates an expression from its definition, in integer arithmetic over positions. It shares no code with the
package except for `scattered`, whose keys are chosen by a hash.
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
    """Shape of the batch, heads, queries, keys, and the position of the first query."""

    lead: tuple[int, ...]
    H: int
    T: int
    S: int
    offset: int

    @property
    def full(self) -> tuple[int, ...]:
        return (*self.lead, self.H, self.T, self.S)


def draw(chance: random.Random, *, data: bool, depth: int = 3) -> Spec:
    """Draw an expression with at most 2^depth leaves."""
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


def build(spec: Spec, sizes: Sizes, device: str = "cpu", *, swapped: bool = False) -> Mask:
    """Build the mask of an expression with clearhead."""
    name, *arguments = spec
    if name == "and":
        return build(arguments[0], sizes, device, swapped=swapped) & build(arguments[1], sizes, device, swapped=swapped)
    if name == "or":
        return build(arguments[0], sizes, device, swapped=swapped) | build(arguments[1], sizes, device, swapped=swapped)
    if name == "not":
        return ~build(arguments[0], sizes, device, swapped=swapped)
    if name == "T":
        return build(arguments[0], sizes, device, swapped=not swapped).T
    if name == "padding":
        lengths, before = (torch.tensor(x, dtype=torch.int64, device=device) for x in _padding(arguments, sizes))
        return masks.padding(lengths, left_pad=before) if arguments[2] else masks.padding(lengths)
    if name == "documents":
        return masks.documents(torch.tensor(_documents(arguments, sizes), dtype=torch.int64, device=device))
    if name in ("allow", "forbid"):
        return getattr(masks, name)(torch.tensor(_pairs(arguments, sizes, swapped), device=device))
    mask: Mask = getattr(masks, name)(*arguments)
    return mask


def table(spec: Spec, sizes: Sizes, *, swapped: bool = False) -> np.ndarray:
    """Evaluate which pairs may attend, in a shape that broadcasts to (lead, H, T, S)."""
    name, *arguments = spec
    if name == "and":
        return table(arguments[0], sizes, swapped=swapped) & table(arguments[1], sizes, swapped=swapped)
    if name == "or":
        return table(arguments[0], sizes, swapped=swapped) | table(arguments[1], sizes, swapped=swapped)
    if name == "not":
        return ~table(arguments[0], sizes, swapped=swapped)
    if name == "T":
        return table(arguments[0], sizes, swapped=not swapped)
    if name == "scattered":
        mask = masks.scattered(*arguments)
        return (mask.T if swapped else mask).dense(sizes.T, sizes.S, query_offset=sizes.offset).numpy()
    if name in ("allow", "forbid"):
        pairs = _pairs(arguments, sizes, swapped)
        pairs = np.swapaxes(pairs, -1, -2) if swapped else pairs
        return pairs if name == "allow" else ~pairs
    query, key = sizes.offset + np.arange(sizes.T)[:, None], np.arange(sizes.S)[None, :]
    p, j = (key, query) if swapped else (query, key)
    if name == "documents":
        ids = _documents(arguments, sizes)
        front = (*ids.shape[:-1], 1) if ids.ndim > 1 else ()
        query_ids, key_ids = (ids[..., x.ravel()].reshape(*front, *x.shape) for x in (p, j))
        return (query_ids == key_ids) & (query_ids >= 0)
    if name == "padding":
        lengths, before = _padding(arguments, sizes)
        if lengths.ndim:
            lengths, before = (x.reshape(*x.shape, 1, 1, 1) for x in (lengths, before))
        start = before if arguments[2] else 0 * before
        return (start <= j) & (j < start + lengths) & (p == p)
    return np.broadcast_to(_by_position(name, arguments, p, j), (sizes.T, sizes.S))


def _by_position(name: str, arguments: list[int], p: np.ndarray, j: np.ndarray) -> Any:
    """Evaluate a mask that depends on positions only."""
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


def _padding(arguments: list[int], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(arguments[0])
    shape = sizes.lead if arguments[1] else ()
    return g.integers(0, sizes.S + 2, shape), g.integers(0, 4, shape)


def _documents(arguments: list[int], sizes: Sizes) -> np.ndarray:
    g = np.random.default_rng(arguments[0])
    shape = (*(sizes.lead if arguments[1] else ()), max(sizes.S, sizes.offset + sizes.T))
    ids = g.integers(-1, 4, shape)
    return np.sort(ids, -1) if arguments[0] % 2 else ids


def _pairs(arguments: list[int], sizes: Sizes, swapped: bool) -> np.ndarray:
    g = np.random.default_rng(arguments[0])
    front = [(), (sizes.H,), (*sizes.lead, 1), (*sizes.lead, sizes.H)][arguments[1]]
    last = (sizes.S, sizes.T) if swapped else (sizes.T, sizes.S)
    return g.random((*front, *last)) < (0.03 if arguments[0] % 3 == 0 else 0.5)
