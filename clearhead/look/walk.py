"""A walk: what happens to one input in a Transformer, station by station, with the numbers of the run that happened.

walk = look.walk(pretrained.load("en-es"), "Hello world")
print(walk)                                     # in the terminal; in a notebook it draws itself
walk["encoder.blocks.0", "weights"].values      # (H, S, S): who attended to whom in the first block
walk.steps[0].likeliest                         # the five likeliest first words, with their probabilities

A text is written greedily first; then one pass over all that was read and written is watched, which under the causal
mask gives every step's numbers at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data.digits import prepare
from clearhead.errors import ConfigError, DataError
from clearhead.generation import Greedy, generate
from clearhead.generation.quiet import evaluating, parts_of
from clearhead.look.listen import first_tensor
from clearhead.look.page import filled, framed
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
from clearhead.look.walk_data import as_dict
from clearhead.look.walk_text import as_text
from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer
from clearhead.pretrained import Trained
from clearhead.pretrained.translate import translations

__all__ = ["Group", "Step", "Walk", "Word", "walk"]

LIKELIEST = 5
NEW_TOKENS = 8  # of a text that has no end of its own


@dataclass(frozen=True)
class Word:
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
    """Stations that belong together, the numbers `first` to `last`: the way in, a block, the way out."""

    where: str
    title: str
    first: int
    last: int
    block: int | None = None  # its number in its stack
    order: str = ""  # of a block: "pre-norm", "post-norm" or "parallel", as it was seen to run


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
        raise ConfigError(f"there is no station {role!r} in {where or 'the model'}; the kinds of stations are: {roles}")

    @property
    def groups(self) -> list[Group]:
        """The stations in groups, in order."""
        ends = [i for i, (a, b) in enumerate(zip(self.stations, self.stations[1:], strict=False)) if a.group != b.group]
        return [
            _group(self.stations, first, last)
            for first, last in zip([0, *(i + 1 for i in ends)], [*ends, len(self.stations) - 1], strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it for programs, as JSON takes it: of vectors the first numbers, of matrices all, up to 64 × 64."""
        return as_dict(self)

    def text(self, *, layer: str | int = 0, head: int = 0, width: int = 100, colour: bool = False) -> str:
        """The walk for a terminal: the blocks of this number (or this one block, by its path) in full."""
        return as_text(self, layer=layer, head=head, width=width, colour=colour)

    def html(self) -> str:
        """The walk as one self-contained page that needs no network."""
        return filled("walk.html", self.title, self.to_dict(), styles=("page.css", "walk.css"), scripts=("walk.js",))

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return framed(self.html(), self.title)


def walk(model: Trained | nn.Module, *given: Any, max_new: int | None = None, data: Path | None = None) -> Walk:
    """What happens to an input in a model: a sentence, a beginning, letters, or a picture of a digit.

        look.walk(pretrained.load("en-es"), "Hello world")

    `max_new` is how many tokens are written at most (by default to the end, or 8 of a text that has none); `data` is
    where pictures are that are given by number. Of a bare module the inputs are tensors, as it is called with them."""
    if isinstance(model, nn.Module):
        return _of_tensors(model, given)
    trained, text = model, given[0]
    if isinstance(trained.model, EncoderDecoder):
        return _of_pair(trained, text, max_new)
    if isinstance(trained.model, VisionTransformer):
        return _of_picture(trained, text, data)
    if isinstance(trained.model, (Decoder, Encoder)):
        return _of_text(trained, text, max_new)
    raise nothing_to_see(trained)


def _of_text(trained: Trained, text: str, max_new: int | None) -> Walk:
    """A text that a decoder goes on from, letters that it sorts, or a text that an encoder reads and no more."""
    made: list[int] = []
    if trained.task == "sort-dedup":
        ids, made = sorting_ids(trained, text, with_stop=True)
        made = made[:max_new]
    else:
        ids = text_ids(trained, text)
    if isinstance(trained.model, Decoder) and not made:
        room = min(max_new or NEW_TOKENS, trained.model.config.max_len - len(ids) + 1)  # the last is written, not read
        new = generate(trained.model, _ids(trained, ids), how=Greedy(), max_new=room, stop=trained.stops)
        made = new.sequence(0, with_stop=True).tolist()
    read = [*ids, *made[:-1]]
    run = _Run(trained.model, trained.name, {"": _line("T", trained, read, len(ids))}, text).watched(
        _ids(trained, read)
    )
    if not made:
        return run.walk(shortened(text))
    answer = trained.tokenizer.decode([i for i in made if i not in trained.stops])
    run.chosen(made, trained.tokenizer.tokens, first=len(ids) - 1)
    return run.walk(f"{shortened(text)} → {shortened(answer)}")


def _of_pair(trained: Trained, text: str, max_new: int | None) -> Walk:
    made = translations(trained, [text], how=Greedy(), max_new=max_new)[0]
    if not made.read:
        raise DataError("there is nothing to translate: give a sentence")
    target = [trained.tokenizer.bos_id, *made.written[:-1]]
    lines = {"encoder": _line("S", trained, made.read, len(made.read)), "": _line("T", trained, target, 1)}
    run = _Run(trained.model, trained.name, lines, text)
    run.watched(_ids(trained, made.read), _ids(trained, target)).chosen(made.written, trained.tokenizer.tokens)
    return run.walk(f"{shortened(text)} → {made.target}")


def _of_picture(trained: Trained, given: str, data: Path | None) -> Walk:
    pixels = read_picture(trained, given, data)
    config: Any = trained.model.config
    rows, columns = config.grid
    tokens = [*["[CLS]"] * config.pooling.n_extra, *(f"({i}, {j})" for i in range(rows) for j in range(columns))]
    run = _Run(trained.model, trained.name, {"": Line("T", tokens, len(tokens))}, pixels)
    run.watched(prepare(pixels[None], normalisation(trained)).to(device_of(trained)))
    run.chosen([int(run.gave[0].argmax())], lambda ids: [str(i) for i in ids])
    return run.walk(f"{Path(given).name} → {run.steps[0].taken.token}")


def _of_tensors(model: nn.Module, inputs: Sequence[Tensor]) -> Walk:
    """A module by itself: tokens are called by their numbers, and there is no text to begin and to end with."""
    lines = {"encoder": Line("S", (), 0), "": Line("T", (), 0)} if len(inputs) > 1 else {"": Line("T", (), 0)}
    name = type(model).__name__
    return _Run(model, name, lines, None).watched(*inputs).walk(f"A run of {name}")


class _Run:
    """One watched run on its way to a walk."""

    def __init__(self, model: nn.Module, name: str, lines: dict[str, Line], given: str | Tensor | None) -> None:
        self._model, self._name, self._lines, self._given = model, name, lines, given
        self.steps: list[Step] = []

    def watched(self, *inputs: Tensor) -> _Run:
        """Run the model on these inputs and note the stations, the input itself first."""
        model = self._model
        with torch.no_grad(), evaluating(parts_of(model)), trace(model) as seen, visiting(model) as visits:
            output = first_tensor(model(*inputs))
        if not seen.paths or output is None:
            raise ConfigError(f"{self._name} has not attended to anything that can be seen. {seen.report()}")
        self.gave: Tensor = output
        for start, line in self._lines.items():
            if not line.tokens:
                size = seen.given([path for path in seen.paths if path.startswith(start)][-1]).T
                self._lines[start] = Line(line.letter, [str(i) for i in range(size)], size)
        self._guide = guide = Guide(seen, self._lines)
        if isinstance(self._given, str):
            letters = self._given.strip()
            points = torch.tensor([ord(letter) for letter in letters])
            guide.note("characters", points, "characters", where="", group="", rows=tuple(letters))
        elif self._given is not None:
            guide.note("pixels", self._given, "height width", where="", group="")
        guide.walk(visits[0])
        return self

    def chosen(self, taken: Sequence[int], tokens: Callable[[list[int]], list[str]], first: int = 0) -> _Run:
        """What was taken of the outputs from row `first` on, and the last stations that say so."""
        line, guide = self._lines[""], self._guide
        logits = self.gave[0].reshape(-1, self.gave.shape[-1])  # (T, V), or (1, V) of classes
        one = logits.shape[0] == 1 and len(line.tokens) > 1
        chances = logits[first : first + len(taken)].float().softmax(-1).cpu()
        best = chances.topk(min(LIKELIEST, chances.shape[-1]), dim=-1)
        for i, id_ in enumerate(taken):
            ids, shares = best.indices[i].tolist(), best.values[i].tolist()
            words = tuple(Word(*parts) for parts in zip(tokens(ids), ids, shares, strict=True))
            word = Word(tokens([id_])[0], id_, float(chances[i, id_]))
            self.steps.append(Step(() if one else tuple(line.tokens[: first + i + 1]), words, word))
        before = len(guide.stations) - 1
        rows = () if one else tuple(line.tokens[first:])
        common: dict[str, Any] = {"where": guide.stations[-1].where, "group": guide.stations[-1].group, "rows": rows}
        letter = "1" if one else line.letter if first == 0 else "steps"
        cells = tuple(tuple(word.token for word in step.likeliest) for step in self.steps)
        rest = f"All the others together get {float(1 - best.values.sum(-1).mean()):.2g} on average."
        shown = {"cells": cells, "sources": (before,), "note": rest}
        at = guide.note("softmax", best.values, f"{letter} {best.values.shape[1]}", **shown, **common)
        shown = {"cells": tuple((step.taken.token,) for step in self.steps), "sources": (at,)}
        guide.note("answer" if one else "next", torch.tensor(taken), letter, **shown, **common)
        return self

    def walk(self, title: str) -> Walk:
        """All that was noted."""
        last = self._guide.stations[-1]
        if last.role == "norm" and last.shape == self.gave.shape[1:]:  # an encoder's vectors are its answer
            common = {"where": "", "group": "", "rows": last.rows, "sources": (len(self._guide.stations) - 1,)}
            self._guide.note("vectors", self.gave[0], " ".join(last.letters), **common)
        kind = type(self._model).__name__
        weights = f"{sum(p.numel() for p in self._model.parameters()):,}"
        facts = {"model": self._name if self._name == kind else f"{self._name}, {kind}", "weights": weights}
        if len(self.steps) > 1:
            facts["written"] = f"{len(self.steps)} tokens, each the likeliest"
        return Walk(
            title=title,
            model=self._name,
            kind=kind,
            stations=self._guide.stations,
            steps=self.steps,
            sizes=dict(self._guide.sizes),
            facts=facts,
        )


def _group(stations: Sequence[Station], first: int, last: int) -> Group:
    where, roles = stations[first].group, [one.role for one in stations[first : last + 1]]
    found = re.fullmatch(r"(?:(.*)\.)?([^.]+)\.(\d+)", where)
    if found is not None:
        stack = (found[1] or "").rpartition(".")[2]
        title = f"{stack} block {found[3]}".strip()
        return Group(where, title[0].upper() + title[1:], first, last, int(found[3]), _order(stations, first, last))
    name = where.rpartition(".")[2] or "model"
    way = "The input" if roles in (["characters"], ["pixels"]) else f"Into the {name}"
    return Group(where, way if first == 0 or "embedding" in roles else f"Out of the {name}", first, last)


def _order(stations: Sequence[Station], first: int, last: int) -> str:
    """Where the norms of a block stand, as it ran."""
    numbers = range(first, last + 1)
    norms = {i for i in numbers if stations[i].role == "norm"}
    adds = [stations[i] for i in numbers if stations[i].role == "add"]
    if not norms or not adds:
        return ""
    if last in norms or any(one.sources[0] in norms for one in adds):
        return "post-norm"
    return "parallel" if len(adds[-1].sources) > 2 else "pre-norm"


def _line(letter: str, trained: Trained, ids: Sequence[int], given: int) -> Line:
    return Line(letter, trained.tokenizer.tokens(list(ids)), given)


def _ids(trained: Trained, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=device_of(trained))
