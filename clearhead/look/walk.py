"""A walk: what happens to one input in a Transformer, station by station, with the numbers of the run that happened.

walk = look.build_walkthrough(pretrained.load("en-es"), "Hello world")
print(walk)                                     # in the terminal; in a notebook it draws itself
walk["encoder.blocks.0", "weights"].values      # (H, S, S): who attended to whom in the first block
walk.steps[0].likeliest                         # the five likeliest first words, with their probabilities

A text is written greedily first; one pass over all of it is then watched, which under the causal mask gives every step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from clearhead.errors import ConfigError
from clearhead.generation import Greedy, generate
from clearhead.generation.quiet import eval_mode, iter_modules
from clearhead.look import trained as tasks
from clearhead.look.guide import TokenAxis, WalkthroughBuilder, record_calls
from clearhead.look.page import iframe, render_template
from clearhead.look.stations import WalkthroughStep, as_text, texts
from clearhead.look.trace import trace
from clearhead.look.watch import first_tensor
from clearhead.models import Decoder, Encoder, EncoderDecoder, VisionTransformer
from clearhead.pretrained import Trained
from clearhead.pretrained.translate import translations

LIKELIEST = 5
NEW_TOKENS = 8  # of a text that has no end of its own
SIDE = 64  # of what is told in JSON: cells of a matrix's side,
_NUMBERS = 1024  # numbers of the vectors of one station, all tokens together,
_LEAST, _MOST = 8, 64  # numbers of one vector,
_ROWS = 256  # tokens whose vectors are told


@dataclass(frozen=True)
class TokenProbability:
    """A token or class that could come next, and how likely it is."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """One step of writing (or the one answer): what had been read, the likeliest to come, and what was taken."""

    context: tuple[str, ...]
    top: tuple[TokenProbability, ...]
    token: TokenProbability


@dataclass(frozen=True)
class Section:
    """Stations that belong together, the numbers `first` to `last`: the way in, a block, the way out."""

    path: str
    title: str
    first: int
    last: int
    block: int | None = None  # its number in its stack
    order: str = ""  # of a block: "pre-norm", "post-norm" or "parallel", as it was seen to run


@dataclass(frozen=True, kw_only=True, eq=False)
class Walkthrough:
    """The stations of one run, in the order in which they happened."""

    title: str
    model: str
    kind: str
    steps: Sequence[WalkthroughStep]
    predictions: Sequence[Prediction] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # by letter
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, at: tuple[str, str]) -> WalkthroughStep:
        """The first station of this kind (its `role`) in a module or block: `walk["decoder.blocks.0", "scores"]`."""
        where, role = at
        for step in self.steps:
            inside = where in ("", step.module, step.section) or step.module.startswith(f"{where}.")
            if inside and step.role == role:
                return step
        roles = ", ".join(dict.fromkeys(step.role for step in self.steps))
        raise ConfigError(f"there is no station {role!r} in {where or 'the model'}; the kinds of stations are: {roles}")

    @property
    def sections(self) -> list[Section]:
        """The stations in groups, in order."""
        together = groupby(range(len(self.steps)), key=lambda i: self.steps[i].section)
        return [_section(self.steps, list(numbers)) for _, numbers in together]

    def to_dict(self) -> dict[str, Any]:
        """All of it for programs, as JSON takes it: of vectors the first numbers, of matrices all, up to 64 × 64."""
        return {"title": self.title, "model": self.model, "kind": self.kind} | {
            "metadata": dict(self.metadata),
            "sizes": dict(self.sizes),
            "symbols": texts()["symbols"],
            "sections": [asdict(section) for section in self.sections],
            "steps": [_told(step) for step in self.steps],
            "predictions": [asdict(prediction) for prediction in self.predictions],
        }

    def text(self, *, layer: str | int = 0, head: int = 0, width: int = 100, color: bool = False) -> str:
        """The walk for a terminal: the blocks of this number (or this one block, by its path) in full."""
        return as_text(self, layer=layer, head=head, width=width, color=color)

    def html(self) -> str:
        """The walk as one self-contained page that needs no network."""
        return render_template(
            "walk.html", self.title, self.to_dict(), styles=("page.css", "walk.css"), scripts=("walk.js",)
        )

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return iframe(self.html(), self.title)


def build_walkthrough(
    model: Trained | nn.Module, *given: Any, max_new_tokens: int | None = None, data: Path | None = None
) -> Walkthrough:
    """What happens to an input in a model: a sentence, a beginning, letters, or a picture of a digit.

        look.build_walkthrough(pretrained.load("en-es"), "Hello world")

    `max_new_tokens` is how many tokens are written at most (by default to the end, or 8 of a text that has none);
    `data` is where pictures are that are given by number; a picture may also be its bytes, (height, width). A bare
    module is given the tensors that it is called with."""
    if isinstance(model, nn.Module):  # tokens are called by their numbers, and there is no text at either end
        lines, name = {"encoder": TokenAxis("S", (), 0)} if len(given) > 1 else {}, type(model).__name__
        return _WalkthroughRun(model, name, lines | {"": TokenAxis("T", (), 0)}, None, *given).walk(f"A run of {name}")
    trained, text = model, given[0]
    if isinstance(trained.model, EncoderDecoder):
        return _of_pair(trained, text, max_new_tokens)
    if isinstance(trained.model, VisionTransformer):
        return _of_picture(trained, text, data)
    if isinstance(trained.model, (Decoder, Encoder)):
        return _of_text(trained, text, max_new_tokens)
    raise tasks.no_attention_error(trained)


def _of_text(trained: Trained, text: str, max_new_tokens: int | None) -> Walkthrough:
    """A text that a decoder goes on from, letters that it sorts, or a text that an encoder reads and no more."""
    sorts = trained.task == "sort-dedup"
    ids, made = tasks.sorting_ids(trained, text, with_stop=True) if sorts else (tasks.encode_prompt(trained, text), [])
    made = made[:max_new_tokens]
    if isinstance(trained.model, Decoder) and not made:
        room = min(
            max_new_tokens or NEW_TOKENS, trained.model.config.max_len - len(ids) + 1
        )  # the last is written, not read
        new = generate(
            trained.model,
            tasks.ids_tensor(trained, ids),
            strategy=Greedy(),
            max_new_tokens=room,
            stop_ids=trained.stops,
        )
        made = new.sequence(0, with_stop=True).tolist()
    read = [*ids, *made[:-1]]
    line = TokenAxis("T", trained.tokenizer.tokens(read), len(ids))
    run = _WalkthroughRun(trained.model, trained.name, {"": line}, text, tasks.ids_tensor(trained, read))
    if not made:
        return run.walk(tasks.shorten_text(text))
    answer = trained.tokenizer.decode([i for i in made if i not in trained.stops])
    run.add_predictions(made, trained.tokenizer.tokens, first=len(ids) - 1)
    return run.walk(f"{tasks.shorten_text(text)} → {tasks.shorten_text(answer)}")


def _of_pair(trained: Trained, text: str, max_new_tokens: int | None) -> Walkthrough:
    made = translations(trained, [text], strategy=Greedy(), max_new_tokens=max_new_tokens)[0]
    read, target = tasks.source_and_target_ids(trained, made)
    tokens = trained.tokenizer.tokens
    lines = {"encoder": TokenAxis("S", tokens(read), len(read)), "": TokenAxis("T", tokens(target), 1)}
    inputs = (tasks.ids_tensor(trained, half) for half in (read, target))
    run = _WalkthroughRun(trained.model, trained.name, lines, text, *inputs)
    run.add_predictions(made.written, tokens)
    return run.walk(f"{tasks.shorten_text(text)} → {made.target}")


def _of_picture(trained: Trained, given: str | Tensor, data: Path | None) -> Walkthrough:
    pixels = given if isinstance(given, Tensor) else tasks.read_image(trained, given, data)
    tokens = tasks.patch_labels(trained)
    line = TokenAxis("T", tokens, len(tokens))
    run = _WalkthroughRun(trained.model, trained.name, {"": line}, pixels, tasks.image_input(trained, pixels))
    run.add_predictions([int(run.gave[0].argmax())], lambda ids: [str(i) for i in ids])
    name = "a picture" if isinstance(given, Tensor) else Path(given).name
    return run.walk(f"{name} → {run.predictions[0].token.token}")


class _WalkthroughRun:
    """A run of the model on these inputs, watched, on its way to a walk: `given` is what a person gave."""

    def __init__(
        self, model: nn.Module, name: str, lines: dict[str, TokenAxis], given: str | Tensor | None, *inputs: Tensor
    ) -> None:
        self._model, self._name, self._lines = model, name, lines
        self.predictions: list[Prediction] = []
        with torch.no_grad(), eval_mode(iter_modules(model)), trace(model) as seen, record_calls(model) as visits:
            output = first_tensor(model(*inputs))
        if not seen.paths or output is None:
            raise ConfigError(f"{name} has not attended to anything that can be seen. {seen.report()}")
        self.gave: Tensor = output
        for start, line in lines.items():
            if not line.tokens:
                size = seen.attention_inputs([path for path in seen.paths if path.startswith(start)][-1]).T
                lines[start] = TokenAxis(line.letter, [str(i) for i in range(size)], size)
        self._guide = guide = WalkthroughBuilder(seen, lines)
        if isinstance(given, str):
            letters = tuple(given.strip())
            guide.note(
                "characters", torch.tensor(list(map(ord, letters))), "characters", module="", section="", rows=letters
            )
        elif given is not None:
            guide.note("pixels", given, "height width", module="", section="")
        guide.walk(visits[0])

    def add_predictions(self, taken: Sequence[int], tokens: Callable[[list[int]], list[str]], first: int = 0) -> None:
        """What was taken of the outputs from row `first` on, and the last stations that say so."""
        line, guide = self._lines[""], self._guide
        logits = self.gave[0].reshape(-1, self.gave.shape[-1])  # (T, V), or (1, V) of classes
        one = logits.shape[0] == 1 and len(line.tokens) > 1
        chances = logits[first : first + len(taken)].float().softmax(-1).cpu()
        best = chances.topk(min(LIKELIEST, chances.shape[-1]), dim=-1)
        for i, (id_, ids, shares) in enumerate(zip(taken, best.indices.tolist(), best.values.tolist(), strict=True)):
            words = tuple(TokenProbability(*parts) for parts in zip(tokens(ids), ids, shares, strict=True))
            word = TokenProbability(tokens([id_])[0], id_, float(chances[i, id_]))
            self.predictions.append(Prediction(() if one else tuple(line.tokens[: first + i + 1]), words, word))
        steps, rows = guide.steps, () if one else tuple(line.tokens[first:])
        common: dict[str, Any] = {"module": steps[-1].module, "section": steps[-1].section, "rows": rows}
        letter = "1" if one else line.letter if first == 0 else "steps"
        cells = tuple(tuple(word.token for word in prediction.top) for prediction in self.predictions)
        rest = f"All the others together get {float(1 - best.values.sum(-1).mean()):.2g} on average."
        shown = {"cells": cells, "sources": (len(steps) - 1,), "note": rest}
        at = guide.note("softmax", best.values, f"{letter} {best.values.shape[1]}", **shown, **common)
        shown = {"cells": tuple((prediction.token.token,) for prediction in self.predictions), "sources": (at,)}
        guide.note("answer" if one else "next", torch.tensor(taken), letter, **shown, **common)

    def walk(self, title: str) -> Walkthrough:
        """All that was noted."""
        guide, (*before, last) = self._guide, self._guide.steps
        if last.role == "norm" and last.shape == self.gave.shape[1:]:  # an encoder's vectors are its answer
            common = {"module": "", "section": "", "rows": last.rows, "sources": (len(before),)}
            guide.note("vectors", self.gave[0], " ".join(last.symbols), **common)
        kind = type(self._model).__name__
        parameters = f"{sum(p.numel() for p in self._model.parameters()):,}"
        metadata = {"model": self._name if self._name == kind else f"{self._name}, {kind}", "parameters": parameters}
        if len(self.predictions) > 1:
            metadata["generated"] = f"{len(self.predictions)} tokens, each the likeliest"
        made: dict[str, Any] = {"steps": guide.steps, "predictions": self.predictions, "sizes": guide.sizes}
        return Walkthrough(title=title, model=self._name, kind=kind, metadata=metadata, **made)


def _told(step: WalkthroughStep) -> dict[str, Any]:
    """A station for JSON: its fields, and its numbers with what of them was left out."""
    plain = {**vars(step), "kind": step.kind, "shape": step.shape}
    x = plain.pop("values")
    if step.kind == "maps":
        fits, (rows, columns) = max(x.shape[-2:]) <= SIDE, (min(n, SIDE) for n in x.shape[-2:])
        small = x if fits else adaptive_avg_pool2d(x.float(), (rows, columns))
        return plain | {"values": _rounded(small), "pooled": not fits}
    if step.kind != "vectors":
        return plain | {"values": _rounded(x)}
    numbers = max(_LEAST, min(_MOST, _NUMBERS // max(1, x[..., 0].numel())))
    x = x if x.dim() < 2 else x[..., :_ROWS, :]
    return plain | {"values": _rounded(x[..., :numbers]), "norms": _rounded(x.norm(dim=-1))}


def _rounded(x: Tensor) -> Any:
    """Nested lists of numbers with four digits; −∞ and the like as None, for JSON has none."""
    if not x.is_floating_point():
        return x.long().tolist()
    flat: list[Any] = [float(f"{v:.4g}") if math.isfinite(v) else None for v in x.flatten().tolist()]
    for n in reversed(x.shape[1:]):
        flat = [flat[i : i + n] for i in range(0, len(flat), n)]
    return flat if x.dim() else flat[0]


def _section(steps: Sequence[WalkthroughStep], numbers: list[int]) -> Section:
    first, last = numbers[0], numbers[-1]
    where, roles = steps[first].section, [steps[i].role for i in numbers]
    found = re.fullmatch(r"(?:(.*)\.)?([^.]+)\.(\d+)", where)
    if found is not None:
        stack = (found[1] or "").rpartition(".")[2]
        title = f"{stack} block {found[3]}".strip()
        return Section(where, title[0].upper() + title[1:], first, last, int(found[3]), _order(steps, numbers))
    name = where.rpartition(".")[2] or "model"
    way = "The input" if roles in (["characters"], ["pixels"]) else f"Into the {name}"
    return Section(where, way if first == 0 or "embedding" in roles else f"Out of the {name}", first, last)


def _order(steps: Sequence[WalkthroughStep], numbers: list[int]) -> str:
    """Where the norms of a block stand, as it ran."""
    norms = {i for i in numbers if steps[i].role == "norm"}
    adds = [steps[i] for i in numbers if steps[i].role == "add"]
    if not norms or not adds:
        return ""
    if numbers[-1] in norms or any(one.sources[0] in norms for one in adds):
        return "post-norm"
    return "parallel" if len(adds[-1].sources) > 2 else "pre-norm"
