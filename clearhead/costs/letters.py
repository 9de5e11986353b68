"""Letters for sizes, and sizes that are primes to read formulas at.

A configuration's whole numbers get the letters of the design; each is given a prime of its own, or one times what it
must divide by (heads divide the width, a rotated head is even). A field that takes no other value keeps its own, and is
a number in the formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn

from clearhead.costs.formulas import normal
from clearhead.costs.subjects import Model, Tokens
from clearhead.errors import ClearheadError

__all__ = ["letters_of", "probe_of", "repeats_of"]

_BATCH, _HEADS, _GROUPS, _WIDTH, _FREE = 9973, 101, 53, 31, 109
# Lengths, and what their 32nd part is rounded up to: fused attention keeps its sums in pieces of 32 queries.
_TARGETS = ((1951, 61), (991, 31), (479, 15), (223, 7), (127, 4), (61, 2))
_SOURCES = ((2143, 67), (863, 27), (499, 16), (251, 8), (113, 4), (59, 2))
_PATCHES = (2, 293, 19)  # two rows of 293; their 586 or 587 tokens are 19 pieces
_NAMES = {
    "d_ff": ("F", 1009), "vocab_size": ("V", 5003), "source_vocab_size": ("V_s", 5009), "max_len": ("N", 4001),
    "n_channels": ("C", 13), "patch_size": ("p", 17), "n_classes": ("n_c", 1013),
    "n_features": ("n_f", 1021), "d_latent": ("n_z", 1019),
}  # fmt: skip


def letters_of(model: Model, tokens: Tokens, batch: int, source: bool) -> dict[str, int]:
    """The sizes by their letters, as they were asked for."""
    sizes = {"B": batch}
    if isinstance(tokens, (tuple, list)):
        sizes |= {"T": tokens[1]} | ({"S": tokens[0]} if tokens[0] != tokens[1] or source else {})
    elif tokens is not None:
        sizes |= {"T": tokens} | ({"S": tokens} if source else {})
    config = model.config
    if config is None:
        return sizes
    named = {"d_model": "M", "n_heads": "H", "n_kv_heads": "K", "d_head": "D"} | {k: v for k, (v, _) in _NAMES.items()}
    for name, letter in named.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and letter not in sizes:
            sizes[letter] = value
    if hasattr(config, "grid") and hasattr(config, "patch_size"):
        sizes["N_p"] = config.grid[0] * config.grid[1]
    return sizes


def repeats_of(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The lists of layers by their path: letter and length."""
    lists = {
        normal(path): len(part)
        for path, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) and len({type(x) for x in part}) == 1
    }
    outer = {path: n for path, n in lists.items() if "*" not in path}
    found = {}
    for path, n in outer.items():
        side = next((f"L_{side[0]}" for side in ("encoder", "decoder") if side in path.split(".")), "L")
        found[path] = ("L" if len(outer) == 1 else side, n)
    clash: dict[str, set[int]] = {}
    for letter, n in found.values():
        clash.setdefault(letter, set()).add(n)
    return {path: (letter, n) for path, (letter, n) in found.items() if len(clash[letter]) == 1}


def probe_of(model: Model, tokens: Tokens, max_len: int | None) -> tuple[Model, Tokens, int, dict[int, str]]:
    """The same model with primes for sizes: it, its tokens and batch, and what each prime stands for."""
    letters = {_BATCH: "B", 10_007: "P", 10_009: "P_g"}
    longest = max_len if model.config is None and max_len is not None else 10**9
    config, own = (None, {}) if model.config is None else _config(model.config)
    letters |= own
    if model.config is not None and max_len is not None:
        longest = getattr(config, "max_len", 10**9)
    length: Tokens = None
    if tokens is not None:
        target = next((pair for pair in _TARGETS if pair[0] <= longest), (0, 0))
        letters |= {target[0]: "T", target[1]: "ceiling(T/32)"} if target[1] > 5 else {target[0]: "T"}
        length = target[0]
        if isinstance(tokens, (tuple, list)):
            if tokens[0] == tokens[1]:
                length = (target[0], target[0])
            else:
                source = next((pair for pair in _SOURCES if pair[0] <= longest), (0, 0))
                letters |= {source[0]: "S", source[1]: "ceiling(S/32)"} if source[1] > 5 else {source[0]: "S"}
                length = (source[0], target[0])
    made = model if config is None else dataclasses.replace(model, build=config.build, config=config)
    return made, length, _BATCH, dict(sorted(letters.items(), reverse=True))


def _config(config: Any) -> tuple[Any, dict[int, str]]:
    """A configuration with primes for its whole numbers, as far as it takes them."""
    letters: dict[int, str] = {}
    if isinstance(getattr(config, "n_heads", None), int):
        changes, own = _heads(config)
        config, letters = _changed(config, changes, own, letters)
    elif isinstance(getattr(config, "d_model", None), int):
        config, letters = _changed(config, {"d_model": 2 * _FREE}, {_FREE: "M/2"}, letters)
    if hasattr(config, "grid") and hasattr(config, "patch_size"):
        rows, columns, pieces = _PATCHES
        size = (17 * rows, 17 * columns)
        extra = getattr(getattr(config, "pooling", None), "n_extra", 0)
        own = {17: "p", columns: f"(N_p/{rows})", pieces: f"ceiling((N_p + {extra})/32)"}
        own |= {rows * columns + 1: "(N_p + 1)"} if extra == 1 else {}
        config, letters = _changed(config, {"image_size": size, "patch_size": 17}, own, letters)
    for name, (letter, prime) in _NAMES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and prime not in letters:
            changes = {name: prime}
            if name == "max_len" and getattr(getattr(config, "positions", None), "max_len", None) is not None:
                changes["positions"] = dataclasses.replace(config.positions, max_len=prime)
            config, letters = _changed(config, changes, {prime: letter}, letters)
    return config, letters


def _heads(config: Any) -> tuple[dict[str, int], dict[int, str]]:
    """Width, heads, key heads and their width: M = H · D unless D is given, and K divides H."""
    grouped, free = config.n_kv_heads is not None, config.d_head is not None
    width = config.d_head if free else config.d_model // config.n_heads
    even = 8 if width % 8 == 0 else 2 if width % 2 == 0 else 1
    heads, D = (_GROUPS * _HEADS if grouped else _HEADS), even * _WIDTH
    letters = {_HEADS: "(H/K)", _GROUPS: "K"} if grouped else {_HEADS: "H"}
    letters |= {_WIDTH: f"(D/{even})", _FREE: "(M/2)"} if free else {_WIDTH: f"(M/H/{even})"}
    changes = {"n_heads": heads, "d_model": 2 * _FREE if free else heads * D}
    changes |= {"d_head": D} if free else {}
    return changes | ({"n_kv_heads": _GROUPS} if grouped else {}), letters


def _changed(config: Any, changes: dict[str, Any], own: dict[int, str], letters: dict[int, str]) -> Iterable[Any]:
    """Changed, where it allows that."""
    try:
        return dataclasses.replace(config, **changes), letters | own
    except ClearheadError:
        return config, letters
