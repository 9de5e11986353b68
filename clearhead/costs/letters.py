"""Letters for sizes, and sizes that are primes to read formulas at.

A configuration's whole numbers get the letters of the design; each is given a prime of its own, or one times what it
must divide by (heads divide the width, a rotated head is even). A field that takes no other value keeps its own, and is
a number in the formulas. Of a module without a configuration the batch and the tokens alone can be changed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torch import nn

from clearhead.checks.example import Tokens
from clearhead.costs.formulas import normal
from clearhead.costs.subjects import Model
from clearhead.costs.ways import PAIR_LETTERS
from clearhead.errors import ClearheadError

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


def letters_of(model: Model, tokens: Tokens, batch: int, source: bool) -> dict[str, int]:
    """The sizes by their letters, as they were asked for."""
    reads, writes = tokens if isinstance(tokens, (tuple, list)) else (tokens, tokens)
    sizes = {"B": batch} | ({} if writes is None else {"T": writes})
    if reads is not None and (source or reads != writes):
        sizes["S"] = reads
    for name, letter in (_HEAD_NAMES | {name: letter for name, (letter, _) in _NAMES.items()}).items():
        value: Any = getattr(model.config, name, None)
        if _is_whole(value):
            sizes.setdefault(letter, value)
    if _has_patches(model.config):
        sizes["N_p"] = model.config.grid[0] * model.config.grid[1]
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


def probe_of(model: Model, tokens: Tokens, max_len: int | None) -> tuple[Model, Tokens, int, dict[int, str]]:
    """The same model with primes for sizes: it, its tokens and batch, and what each prime stands for."""
    letters = {_BATCH: "B", **PAIR_LETTERS}
    longest = max_len or 10**9
    if model.config is not None:
        config, own = _config(model.config)
        model = dataclasses.replace(model, build=config.build, config=config, is_fresh=True)
        letters |= own
        longest = 10**9 if max_len is None else getattr(config, "max_len", longest)

    def prime(pairs: tuple[tuple[int, int], ...], letter: str) -> int:
        n, pieces = next((pair for pair in pairs if pair[0] <= longest), (0, 0))
        letters.update({n: letter} | ({pieces: f"ceiling({letter}/32)"} if pieces > 5 else {}))
        return n

    length: Tokens = None if tokens is None else prime(_TARGETS, "T")
    if isinstance(tokens, (tuple, list)) and isinstance(length, int):
        length = (length if tokens[0] == tokens[1] else prime(_SOURCES, "S"), length)
    return model, length, _BATCH, dict(sorted(letters.items(), reverse=True))


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
                change["positions"] = dataclasses.replace(config.positions, max_len=prime)
            changes.append((change, {prime: letter}))
    letters: dict[int, str] = {}
    for change, own in changes:
        if not own.keys() <= letters.keys():
            try:
                config, letters = dataclasses.replace(config, **change), letters | own
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
