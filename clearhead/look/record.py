"""What a trace is asked to keep, and what it has kept.

Patterns over module paths say what to keep:

    blocks.*.attention.weights     the attention weights of these layers
    blocks.*.output                what these modules return
    head.input                     what this module is given
    blocks.*.attention             no ending: weights of an attention layer, the output of anything else

`*` stands for one name between dots (or a part of one), `**` for any number of names. The model itself has the empty
path: `output` is what it returns. A module that is really called `output` is meant before the ending is.

What is kept are steps of runs, in order, so that generation with a cache makes one picture. A *run* is one sequence (or
batch of them) through a module. Without a cache every call is a run of its own. With one, the calls that go on from it
are steps of the same run, their rows one under another. When a search reorders the cache, the rows that were kept
follow it; those that are dropped because they have ended stay in the picture as they are."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.errors import ConfigError
from clearhead.values import did_you_mean

KINDS = ("weights", "output", "input")

RecordedPaths = dict[str, set[str]]
"""Module paths, by what is to be kept of them: one of `KINDS`."""


def is_attention_layer(module: nn.Module) -> bool:
    """Whether this is an attention layer by its type."""
    return isinstance(module, (MultiHeadAttention, nn.MultiheadAttention))


def can_attend(module: nn.Module) -> bool:
    """Whether its code may call attention: any class can, but of torch's own only `nn.MultiheadAttention` does."""
    return is_attention_layer(module) or not type(module).__module__.startswith("torch.nn.modules.")


def resolve_patterns(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> RecordedPaths:
    """The modules that these patterns name; without patterns, the weights of everything that attends."""
    asked: RecordedPaths = {kind: set() for kind in KINDS}
    if not patterns:
        asked["weights"].update(path for path, module in modules.items() if can_attend(module))
    for pattern in patterns:
        found = [path for path in modules if path_matches(pattern, path)]
        for path in found:
            asked["weights" if is_attention_layer(modules[path]) else "output"].add(path)
        front, _, ending = pattern.rpartition(".")
        if not found and ending in KINDS:
            found = [path for path in modules if path_matches(front, path)]
            if ending == "weights":
                found = [path for path in found if can_attend(modules[path])]
            asked[ending].update(found)
        if not found:
            raise _unknown(pattern, front if ending in KINDS else pattern, modules)
    return asked


def path_matches(pattern: str, path: str) -> bool:
    """Whether a module path is one of those that a pattern (without an ending) names.

    In one name, `*` is any characters, `?` one, `[01]` one of these, `[!01]` any other."""
    return _fit(*(text.split(".") if text else [] for text in (pattern, path)))


def _fit(wanted: list[str], names: list[str]) -> bool:
    if wanted[:1] == ["**"]:
        return any(_fit(wanted[1:], names[i:]) for i in range(len(names) + 1))
    if not wanted or not names:
        return wanted == names
    return fnmatchcase(names[0], wanted[0]) and _fit(wanted[1:], names[1:])


def _unknown(pattern: str, front: str, modules: Mapping[str, nn.Module]) -> ConfigError:
    layers = [path for path, module in modules.items() if is_attention_layer(module)]
    near = did_you_mean(front, modules, otherwise="")
    meant = f"{near} Its" if near else "its"
    shown = ", ".join(layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    return ConfigError(
        f"nothing in this model is called {pattern!r}; {meant} attention layers are: {shown or 'none'} "
        f"(* stands for one name between dots, ** for any number; endings are .weights, .output and .input)"
    )


# ---------------------------------------------------------------------- what was kept


@dataclass(frozen=True)
class CallContext:
    """When something happens: in which call of which module, and how far a cache had come by then."""

    path: str
    call: object  # its number, or what else is equal for all that belongs together although there is no cache
    cache: KVCache | None = None
    past: int | None = 0  # tokens seen before; None: as many as there are


@dataclass
class RecordedStep:
    """What one call left: `length` rows from row `start` of its run."""

    value: Any
    start: int
    length: int
    places: Tensor | None = None  # (P,) each sequence's place in this call's batch, −1: nowhere; None: as is

    def align_rows(self, x: Tensor) -> Tensor:
        """(batch, …) of this call → (P, …) of the run, zeros for the sequences that were not in it."""
        if self.places is None:
            return x
        places = self.places.to(x.device)
        absent = (places < 0).reshape(-1, *[1] * (x.dim() - 1))
        return x.index_select(0, places.clamp(min=0)).masked_fill(absent, 0)


@dataclass
class RecordedRun:
    """The steps of one sequence, or of a batch of them."""

    call: object  # what the calls of a run without a cache have in common
    first: int = 0  # the position of row 0: more than 0 where the cache was not empty when the trace began
    steps: list[RecordedStep] = field(default_factory=list)
    cache: weakref.ref[KVCache] | None = None
    live: Tensor | None = None  # (batch now,) which sequences of the run are still computed; None: all
    size: int = 0  # P, how many sequences the run has

    @property
    def length(self) -> int:
        return self.steps[-1].start + self.steps[-1].length if self.steps else 0

    def continues(self, moment: CallContext) -> bool:
        if moment.cache is None:
            return self.cache is None and moment.call == self.call
        same = self.cache is not None and self.cache() is moment.cache
        return same and (moment.past is None or 0 < moment.past <= self.first + self.length)

    def add(self, value: Any, *, length: int, batch: int, past: int | None) -> None:
        if past is not None and past > 0:
            # A cache that was truncated goes on earlier than it had come: what was kept beyond is void.
            while self.steps and self.steps[-1].start >= past - self.first:
                self.steps.pop()
            if self.steps and self.length > past - self.first:
                self.steps[-1].length = past - self.first - self.steps[-1].start
        if not self.steps:
            self.size = batch
        places = None
        if self.live is not None:
            places = torch.full((self.size,), -1).index_copy_(0, self.live, torch.arange(len(self.live)))
        self.steps.append(RecordedStep(value, self.length, length, places))

    def reorder(self, rows: Tensor) -> None:
        """What `KVCache.reorder` does to the batch. Rows that are only left out have ended, and stay in the picture."""
        parents = rows if self.live is None else self.live[rows]
        if bool((rows[1:] > rows[:-1]).all()):
            self.live = parents
            return
        for step in self.steps:
            step.places = parents if step.places is None else step.places[parents]
        self.live, self.size = None, len(rows)


class RecordStore:
    """The runs of every module, oldest first, by what is kept of them (`KINDS`) and its path; of each only the newest
    `limit` (None: all)."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.runs: dict[str, dict[str, list[RecordedRun]]] = {kind: {} for kind in KINDS}

    def add(self, kind: str, value: Any, x: Tensor, moment: CallContext) -> None:
        """Keep a value, whose sequences and rows are those of x."""
        runs = self.runs[kind].setdefault(moment.path, [])
        newest = runs[-1:] if moment.cache is None else reversed(runs)  # caches may take turns
        run = next((run for run in newest if run.continues(moment)), None)
        if run is None:
            cache = None if moment.cache is None else weakref.ref(moment.cache)
            runs.append(run := RecordedRun(moment.call, first=moment.past or 0, cache=cache))
            if self._limit is not None:
                del runs[: -self._limit]
        dim, past = _sequence(x), None if moment.cache is None else moment.past
        run.add(value, length=1 if dim is None else x.shape[dim], batch=x.shape[0] if x.dim() else 1, past=past)

    def reorder(self, cache: KVCache, rows: Tensor) -> None:
        """A search has reordered the batch of a cache."""
        rows = rows.cpu().long()
        for run in (run for by_path in self.runs.values() for runs in by_path.values() for run in runs):
            if run.cache is not None and run.cache() is cache and run.steps:
                run.reorder(rows)


def split_by_step(run: RecordedRun, rows: list[int]) -> Iterator[tuple[RecordedStep, list[int], list[int]]]:
    """Rows of a run, by the step that made them: the step, their places in `rows`, and their numbers in the step."""
    starts = [step.start for step in run.steps]
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(bisect.bisect_right(starts, row) - 1, []).append(place)
    for i, own in sorted(places.items()):
        yield run.steps[i], own, [rows[place] - starts[i] for place in own]


def concat_steps(run: RecordedRun, tensor: Callable[[Any], Tensor]) -> Tensor:
    """The tensors of all steps as one, along the sequence; of what has none, the last."""
    parts = []
    for step in run.steps:
        x = step.align_rows(tensor(step.value))
        dim = _sequence(x)
        if dim is None:
            parts = [x]
        else:
            parts.append(x if x.shape[dim] == step.length else x.narrow(dim, 0, step.length))
    return parts[0] if len(parts) == 1 else torch.cat(parts, _sequence(parts[0]) or 0)


def _sequence(x: Tensor) -> int | None:
    """Which dimension of a module's output (or input) is the sequence: (B, …, T, width), or (B, T) for ids."""
    if x.dim() > 2:
        return -2
    return -1 if x.dim() == 2 and not x.is_floating_point() else None
