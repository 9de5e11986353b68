"""Select the activations that a trace records, and store them.

Patterns over module paths select activations:

    blocks.*.attention.weights     the attention weights of these layers
    blocks.*.output                the outputs of these modules
    head.input                     the input of this module
    blocks.*.attention             without an ending: the weights of an attention layer, the output of other modules

`*` matches one name between dots (or a part of one), `**` any number of names. The model itself has the empty path:
`output` is its output. A module that is called `output` takes precedence over the ending.

Activations are stored as the steps of runs. Without a cache, every call of a module is one run. With a cache, the calls
that continue it are steps of the same run, and their rows are concatenated. If a search reorders the cache, recorded
rows are reordered too; rows that are dropped because they are finished keep their record.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.validation import did_you_mean
from clearhead.analysis.tracing.call_analysis import can_attend, is_attention_layer
from clearhead.errors import ConfigError, DtypeError
from clearhead.nn import KVCache

KINDS = ("weights", "output", "input")

RecordedPaths = dict[str, set[str]]
"""Module paths by the kind of activation to record, one of `KINDS`."""


def resolve_patterns(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> RecordedPaths:
    """Return the module paths that these patterns select; by default the weights of every module that attends."""
    recorded: RecordedPaths = {kind: set() for kind in KINDS}
    if not patterns:
        recorded["weights"].update(path for path, module in modules.items() if can_attend(module))
    for pattern in patterns:
        if not isinstance(pattern, str):
            kind = type(pattern).__name__
            raise DtypeError(f"got a {kind} as a pattern; expected module paths such as 'blocks.*.attention.weights'")
        paths = [path for path in modules if path_matches(pattern, path)]
        for path in paths:
            recorded["weights" if is_attention_layer(modules[path]) else "output"].add(path)
        front, _, ending = pattern.rpartition(".")
        if not paths and ending in KINDS:
            paths = [path for path in modules if path_matches(front, path)]
            if ending == "weights":
                paths = [path for path in paths if can_attend(modules[path])]
            recorded[ending].update(paths)
        if not paths:
            raise _unknown(pattern, front if ending in KINDS else pattern, modules)
    return recorded


def path_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern without an ending matches a module path.

    Within a name, `*` matches any characters, `?` one, `[01]` one of these, and `[!01]` any other.
    """
    return _matches_names(*(text.split(".") if text else [] for text in (pattern, path)))


def _matches_names(pattern_names: list[str], names: list[str]) -> bool:
    if pattern_names[:1] == ["**"]:
        return any(_matches_names(pattern_names[1:], names[i:]) for i in range(len(names) + 1))
    if not pattern_names or not names:
        return pattern_names == names
    return fnmatchcase(names[0], pattern_names[0]) and _matches_names(pattern_names[1:], names[1:])


def _unknown(pattern: str, front: str, modules: Mapping[str, nn.Module]) -> ConfigError:
    layers = [path for path, module in modules.items() if is_attention_layer(module)]
    if not layers:
        return ConfigError(f"no module of this model matches {pattern!r}, because it has no attention layers")
    near = did_you_mean(front, modules, fallback="")
    start = f"{near} Its" if near else "its"
    listing = ", ".join(layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    return ConfigError(
        f"no module of this model matches {pattern!r}; {start} attention layers are: {listing} "
        f"(* matches one name between dots, ** any number; endings are .weights, .output and .input)"
    )


# ---------------------------------------------------------------------- recorded runs


@dataclass(frozen=True)
class CallContext:
    """Which call of which module is running, and the length of its cache before the call."""

    path: str
    call: object  # its number, or another key of the run if there is no cache
    cache: KVCache | None = None
    past: int | None = 0  # length of the cache before this call; None: any


@dataclass
class RecordedStep:
    """The record of one call: `length` rows, starting at row `start` of its run."""

    value: Any
    start: int
    length: int
    batch_index: Tensor | None = (
        None  # (P,) index of each sequence in the batch of this call, −1 if absent; None: identity
    )

    def align_rows(self, x: Tensor) -> Tensor:
        """Map (batch, …) of this call to (P, …) of the run, with zeros for the sequences that were absent."""
        if self.batch_index is None:
            return x
        batch_index = self.batch_index.to(x.device)
        absent = (batch_index < 0).reshape(-1, *[1] * (x.dim() - 1))
        return x.index_select(0, batch_index.clamp(min=0)).masked_fill(absent, 0)


@dataclass
class RecordedRun:
    """The steps of one sequence, or of a batch of sequences."""

    call: object  # key of a run without a cache
    first: int = 0  # position of row 0; > 0 if the cache was not empty when the trace began
    steps: list[RecordedStep] = field(default_factory=list)
    cache: weakref.ref[KVCache] | None = None
    live: Tensor | None = None  # (current batch,) sequences of the run that are still active; None: all
    size: int = 0  # P, number of sequences

    @property
    def length(self) -> int:
        return self.steps[-1].start + self.steps[-1].length if self.steps else 0

    def continues(self, moment: CallContext) -> bool:
        if moment.cache is None:
            return self.cache is None and moment.call == self.call
        same = self.cache is not None and self.cache() is moment.cache
        return same and (moment.past is None or 0 < moment.past <= self.first + self.length)

    def add(self, value: object, *, length: int, batch: int, past: int | None) -> None:
        if past is not None and past > 0:
            # If the cache was cropped, discard the steps beyond its new end.
            while self.steps and self.steps[-1].start >= past - self.first:
                self.steps.pop()
            if self.steps and self.length > past - self.first:
                self.steps[-1].length = past - self.first - self.steps[-1].start
        if not self.steps:
            self.size = batch
        batch_index = None
        if self.live is not None:
            batch_index = torch.full((self.size,), -1).index_copy_(0, self.live, torch.arange(len(self.live)))
        self.steps.append(RecordedStep(value, self.length, length, batch_index))

    def reorder(self, rows: Tensor) -> None:
        """Apply `KVCache.reorder` to the record. Rows that are only left out have finished and keep their record."""
        parents = rows if self.live is None else self.live[rows]
        if bool((rows[1:] > rows[:-1]).all()):
            self.live = parents
            return
        for step in self.steps:
            step.batch_index = parents if step.batch_index is None else step.batch_index[parents]
        self.live = None
        self.size = len(rows)


class RecordStore:
    """The runs of every module, oldest first, by kind (`KINDS`) and path; at most the newest `limit` of each."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.runs: dict[str, dict[str, list[RecordedRun]]] = {kind: {} for kind in KINDS}

    def add(self, kind: str, value: object, x: Tensor, moment: CallContext) -> None:
        """Store a value whose batch and sequence dimensions are those of x."""
        runs = self.runs[kind].setdefault(moment.path, [])
        newest = runs[-1:] if moment.cache is None else reversed(runs)  # calls with several caches may alternate
        run = next((run for run in newest if run.continues(moment)), None)
        if run is None:
            cache = None if moment.cache is None else weakref.ref(moment.cache)
            runs.append(run := RecordedRun(moment.call, first=moment.past or 0, cache=cache))
            if self._limit is not None:
                del runs[: -self._limit]
        dim = _sequence(x)
        past = None if moment.cache is None else moment.past
        run.add(value, length=1 if dim is None else x.shape[dim], batch=x.shape[0] if x.dim() else 1, past=past)

    def reorder(self, cache: KVCache, rows: Tensor) -> None:
        """Apply the reordering of a cache's batch to its runs."""
        rows = rows.cpu().long()
        for run in (run for by_path in self.runs.values() for runs in by_path.values() for run in runs):
            if run.cache is not None and run.cache() is cache and run.steps:
                run.reorder(rows)


def split_by_step(run: RecordedRun, rows: list[int]) -> Iterator[tuple[RecordedStep, list[int], list[int]]]:
    """Group the rows of a run by step: the step, their indices in `rows`, and their indices in the step."""
    starts = [step.start for step in run.steps]
    rows_by_step: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        rows_by_step.setdefault(bisect.bisect_right(starts, row) - 1, []).append(place)
    for i, positions in sorted(rows_by_step.items()):
        yield run.steps[i], positions, [rows[place] - starts[i] for place in positions]


def concat_steps(run: RecordedRun, tensor: Callable[[Any], Tensor]) -> Tensor:
    """Concatenate the tensors of all steps along the sequence; without a sequence dimension, return the last."""
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
    """Return the sequence dimension of an output or input: (B, …, T, width), or (B, T) for ids."""
    if x.dim() > 2:
        return -2
    return -1 if x.dim() == 2 and not x.is_floating_point() else None
