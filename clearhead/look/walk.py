"""A walk: what happens to one input in a Transformer, station by station, with the numbers of the run that happened.

walk = look.walk(pretrained.load("en-es"), "Hello world")
print(walk)                          # in the terminal; in a notebook it draws itself
walk["encoder.blocks.0", "weights"].values      # (H, S, S): who attended to whom in the first block
walk.steps[0].likeliest              # the five likeliest first words, with their probabilities

A text is written greedily first; then one pass over all that was read and written is watched, which under the causal
mask gives every step's numbers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.data.digits import prepare
from clearhead.errors import ConfigError, DataError
from clearhead.generation import Greedy, generate
from clearhead.look.stations import Guide, Line, Station
from clearhead.look.trace import trace
from clearhead.look.trained import (
    device_of,
    normalisation,
    nothing_to_see,
    read_picture,
    shortened,
    sorting_ids,
    text_ids,
)
from clearhead.look.visits import visiting
from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer
from clearhead.pretrained import Trained
from clearhead.pretrained.translate import translations

__all__ = ["Group", "Step", "Walk", "Word", "walk"]

LIKELIEST = 5
NEW_TOKENS = 8  # of a text that has no end of its own


class Word(NamedTuple):
    """A token or class that could come next, and how likely it is."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class Step:
    """One step of writing (or the one answer): what had been read, the likeliest to come, and what was taken."""

    read: tuple[str, ...]
    likeliest: tuple[Word, ...]
    taken: Word


@dataclass(frozen=True)
class Group:
    """Stations that belong together: the way in, a block, the way out."""

    where: str
    title: str
    stations: range
    block: int | None = None  # its number in its stack
    order: str = ""  # of a block: "pre-norm", "post-norm", "parallel", as it was seen to run


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """The stations of one run, in the order in which they happened."""

    title: str
    model: str
    kind: str
    stations: Sequence[Station]
    steps: Sequence[Step] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # by letter
    facts: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, at: tuple[str, str]) -> Station:
        """The first station of this kind (its `role`) in a module or block: `walk["decoder.blocks.0", "scores"]`."""
        where, role = at
        for station in self.stations:
            inside = where in ("", station.where, station.group) or station.where.startswith(f"{where}.")
            if inside and station.role == role:
                return station
        roles = ", ".join(dict.fromkeys(station.role for station in self.stations))
        raise ConfigError(
            f"there is no station {role!r} in {where or 'the model'!r}; the kinds of stations are: {roles}"
        )

    @property
    def groups(self) -> list[Group]:
        """The stations in groups, in order."""
        found: list[Group] = []
        start = 0
        for i, station in enumerate(self.stations):
            last = i + 1 == len(self.stations)
            if last or self.stations[i + 1].group != station.group:
                found.append(_group(self.stations, range(start, i + 1), first=not found, last=last))
                start = i + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it for programs, as JSON takes it: of vectors the first numbers, of matrices all, up to 64 × 64."""
        from clearhead.look.walk_data import as_dict

        return as_dict(self)

    def text(self, *, layer: str | int = 0, head: int = 0, width: int = 100, colour: bool = False) -> str:
        """The walk for a terminal: the blocks of this number (or this one block, by its path) in full."""
        from clearhead.look.walk_text import as_text

        return as_text(self, layer=layer, head=head, width=width, colour=colour)

    def html(self) -> str:
        """The walk as one self-contained page that needs no network."""
        from clearhead.look.walk_page import page

        return page(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from clearhead.look.page import framed

        return framed(self.html(), self.title)


def walk(trained: Trained, given: str, *, max_new: int | None = None, data: Path | None = None) -> Walk:
    """What happens to an input in a trained model: a sentence, a beginning, letters, or a picture of a digit.

        look.walk(pretrained.load("en-es"), "Hello world")

    `max_new` is how many tokens are written at most (by default to the end, or 8 of a text that has none); `data` is
    where pictures are that are given by number."""
    model = trained.model
    if isinstance(model, VisionTransformer):
        return _of_picture(trained, given, data)
    if isinstance(model, EncoderDecoder):
        return _of_pair(trained, given, max_new)
    if isinstance(model, Encoder):
        ids = text_ids(trained, given)
        return (
            _Run(trained, given, {"": _line("T", trained, ids)})
            .watched(_ids(trained, ids))
            .ended()
            .walk(shortened(given))
        )
    if not isinstance(model, Decoder):
        raise nothing_to_see(trained)
    if trained.task == "sort-dedup":
        ids, made = sorting_ids(trained, given, with_stop=True)
        made = made[:max_new]
    else:
        room = NEW_TOKENS if max_new is None else max_new
        ids = text_ids(trained, given, room)
        new = generate(model, _ids(trained, ids), how=Greedy(), max_new=room, stop=trained.stops)
        made = new.sequence(0, with_stop=True).tolist()
    read = [*ids, *made[:-1]]
    run = _Run(trained, given, {"": _line("T", trained, read, len(ids))}).watched(_ids(trained, read))
    return run.written(made, first=len(ids) - 1).walk(f"{shortened(given)} → {_said(trained, made)}")


def _of_pair(trained: Trained, given: str, max_new: int | None) -> Walk:
    made = translations(trained, [given], how=Greedy(), max_new=max_new)[0]
    if not made.read:
        raise DataError("there is nothing to translate: give a sentence")
    target = [trained.tokenizer.bos_id, *made.written[:-1]]
    lines = {"encoder": _line("S", trained, made.read), "": _line("T", trained, target)}
    run = _Run(trained, given, lines).watched(_ids(trained, made.read), _ids(trained, target))
    return run.written(made.written).walk(f"{shortened(given)} → {made.target}")


def _of_picture(trained: Trained, given: str, data: Path | None) -> Walk:
    pixels = read_picture(trained, given, data)
    config: Any = trained.model.config
    rows, columns = config.grid
    tokens = [*["[CLS]"] * config.pooling.n_extra, *(f"({i}, {j})" for i in range(rows) for j in range(columns))]
    run = _Run(trained, pixels, {"": Line("T", tokens, len(tokens))})
    run.watched(prepare(pixels[None], normalisation(trained)).to(device_of(trained))).classified()
    return run.walk(f"{Path(given).name} → {run.steps[0].taken.token}")


class _Run:
    """One watched run on its way to a walk."""

    def __init__(self, trained: Trained, given: str | Tensor, lines: Mapping[str, Line]) -> None:
        self._trained, self._lines = trained, lines
        self._given = given
        self.steps: list[Step] = []

    def watched(self, *inputs: Tensor) -> _Run:
        """Run the model on these inputs and note the stations."""
        model = self._trained.model
        with torch.no_grad(), trace(model) as seen, visiting(model) as visits:
            self._gave: Tensor = model(*inputs)
        if not seen.paths:
            raise nothing_to_see(self._trained)
        self._guide = Guide(seen, self._lines)
        self._enter(self._given)
        self._guide.walk(visits[0])
        return self

    def _enter(self, given: str | Tensor) -> None:
        """The input itself, before any module sees it."""
        if isinstance(given, str):
            points = torch.tensor([ord(letter) for letter in given.strip()])
            self._guide.note("characters", points, "characters", where="", group="", rows=tuple(given.strip()))
        else:
            self._guide.note("pixels", given, "height width", where="", group="")

    def written(self, ids: Sequence[int], first: int = 0) -> _Run:
        """The tokens that were taken, the first of them behind row `first` of the last line."""
        tokens, line = self._trained.tokenizer.tokens, self._lines[""]
        self._choose([*range(first, first + len(ids))], list(ids), tokens, lambda row: tuple(line.tokens[: row + 1]))
        self._exit("next", tuple(line.tokens[first:]), line.letter)
        return self

    def ended(self) -> _Run:
        """An encoder's vectors, which are its answer."""
        last, line = len(self._guide.stations) - 1, self._lines[""]
        common = {"where": "", "group": "", "rows": tuple(line.tokens), "sources": (last,)}
        self._guide.note("vectors", self._gave[0], f"{line.letter} M", **common)
        return self

    def classified(self) -> _Run:
        """The one class that was answered."""
        chances = self._gave[0].float().softmax(-1)
        self._choose([0], [int(chances.argmax())], lambda ids: [str(int(i)) for i in ids], lambda row: ())
        self._exit("answer", (), "1")
        return self

    def _choose(self, rows: list[int], taken: list[int], tokens: Any, read: Any) -> None:
        logits = self._gave[0].reshape(-1, self._gave.shape[-1])  # (T, V), or (1, V) of classes
        chances = logits.float().softmax(-1).cpu()
        best = chances.topk(min(LIKELIEST, chances.shape[-1]), dim=-1)
        for row, id_ in zip(rows, taken, strict=True):
            ids, shares = best.indices[row].tolist(), best.values[row].tolist()
            words = tuple(Word(*parts) for parts in zip(tokens(ids), ids, shares, strict=True))
            self.steps.append(Step(read(row), words, Word(tokens([id_])[0], id_, float(chances[row, id_]))))

    def _exit(self, role: str, rows: tuple[str, ...], letter: str) -> None:
        shares = torch.tensor([[word.probability for word in step.likeliest] for step in self.steps])
        last = self._guide.stations[-1]
        common: dict[str, Any] = {"where": last.where, "group": last.group, "rows": rows}
        words = tuple(tuple(word.token for word in step.likeliest) for step in self.steps)
        steps = letter if len(rows) == self._guide.sizes.get(letter) or letter == "1" else "steps"
        before = len(self._guide.stations) - 1
        rest = float(1 - shares.sum(-1).mean())
        note = f"All the others together get {rest:.2g} on average."
        at = self._guide.note(
            "softmax", shares, f"{steps} {shares.shape[1]}", cells=words, sources=(before,), note=note, **common
        )
        ids = torch.tensor([step.taken.id for step in self.steps])
        taken = tuple((step.taken.token,) for step in self.steps)
        self._guide.note(role, ids, steps, cells=taken, sources=(at,), **common)

    def walk(self, title: str) -> Walk:
        model = self._trained.model
        facts = {
            "model": f"{self._trained.name}, {type(model).__name__}",
            "weights": f"{sum(p.numel() for p in model.parameters()):,}",
        }
        if self._trained.task != "digits" and self.steps:
            facts["written"] = f"{len(self.steps)} tokens, each the likeliest"
        return Walk(
            title=title,
            model=self._trained.name,
            kind=type(model).__name__,
            stations=self._guide.stations,
            steps=self.steps,
            sizes=dict(self._guide.sizes),
            facts=facts,
        )


def _group(stations: Sequence[Station], which: range, *, first: bool, last: bool) -> Group:
    where = stations[which.start].group
    found = re.fullmatch(r"(?:(.*)\.)?([^.]+)\.(\d+)", where)
    if found is not None:
        stack = (found[1] or "").rpartition(".")[2]
        title = f"{stack} block {found[3]}".strip()
        return Group(
            where, title[0].upper() + title[1:], which, int(found[3]), _order([stations[i] for i in which], which)
        )
    name = where.rpartition(".")[2]
    if first and stations[which.start].role in ("characters", "pixels"):
        title = "The input" if name or len(which) == 1 else "The way in"
    elif any(stations[i].role in ("tokens", "start", "embedding", "patches") for i in which):
        title = f"Into the {name or 'model'}"
    else:
        title = f"Out of the {name or 'model'}" if name or not last else "The way out"
    return Group(where, title, which)


def _order(stations: Sequence[Station], which: range) -> str:
    """Where the norms of a block stand, as it ran."""
    norms = {number: one for number, one in zip(which, stations, strict=True) if one.role == "norm"}
    adds = [one for one in stations if one.role == "add"]
    if not norms or not adds:
        return ""
    if any(one.sources[0] in norms for one in adds) or which[-1] in norms:
        return "post-norm"
    if len(norms) > 1 and len({one.sources for one in norms.values()}) == 1 and len(adds[-1].sources) > 2:
        return "parallel"
    return "pre-norm"


def _line(letter: str, trained: Trained, ids: Sequence[int], given: int | None = None) -> Line:
    return Line(letter, trained.tokenizer.tokens(list(ids)), len(ids) if given is None else given)


def _ids(trained: Trained, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=device_of(trained))


def _said(trained: Trained, ids: Sequence[int]) -> str:
    return shortened(trained.tokenizer.decode([i for i in ids if i not in trained.stops]))
