"""The panel of runs: what a model reads, what it expects next, how it attends, its stations, and its beams.

A text is read anew for every request. What was written after it comes with the request, as ids, so that stepping
forward and going back are the same question with other ids."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from clearhead import analysis
from clearhead._core.validation import NonNegativeInt, PositiveInt, Range, did_you_mean, require
from clearhead.analysis.reports import (
    attention_layers,
    encode_prompt,
    ids_tensor,
    report_for_ids,
    report_for_image,
    shorten_text,
)
from clearhead.analysis.views.page import page_data
from clearhead.analysis.views.report import AttentionReport
from clearhead.config import Validated
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import DataError
from clearhead.explorer.actions import EmptyRequest, RequestContext, Seed
from clearhead.generation import BeamSearch, Sample, generate, search
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.sampling import probabilities, sample_inverse_cdf
from clearhead.hub import Pipeline, Translation
from clearhead.models import Decoder, EncoderDecoder, VisionTransformer

_SHOWN = 12  # tokens that may come next
_WALKED = 256  # tokens up to which stations are shown
_EXAMPLES = {
    "translation": ("How are you?", "The house is red.", "I would like a cup of coffee, please."),
    "text": ("First Citizen:\nBefore we proceed any further, hear me", "ROMEO:\n", "To be, or not to be"),
    "sort-dedup": ("D A A C B A", "Q W E R T Y", "H E L L O"),
}


@dataclass(frozen=True, kw_only=True)
class Text(Validated):
    model: str
    text: str = ""
    written: tuple[NonNegativeInt, ...] = ()
    pixels: str = ""  # of a picture: its grey bytes, in base64
    layer: str = ""  # whose attention is wanted; of a long text not all are made at once


@dataclass(frozen=True, kw_only=True)
class Chosen(Text):
    temperature: Annotated[float, Range(ge=0, le=100)] = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Range(gt=0, le=1)] | None = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Searched(Text):
    width: Annotated[int, Range(ge=1, le=8)] = 3
    max_new_tokens: Annotated[int, Range(ge=1, le=48)] = 12
    length_penalty: Annotated[float, Range(ge=-2, le=4)] = 1.0


@dataclass(frozen=True)
class Reading:
    """One text as a model reads it: `source` by its encoder, where it has one, and `ids`, of which it wrote all but the
    first `given`."""

    trained: Pipeline
    source: list[int]
    ids: list[int]
    given: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As the model is called with them."""
        return tuple(ids_tensor(self.trained, row) for row in (self.source, self.ids) if row)

    def logits(self) -> Tensor:
        """(V,) of the token after the last; the logits of all the others are never made."""
        model: Any = self.trained.model
        return (model.hidden_states(*self.inputs)[0, -1] @ model.lm_head_weight().T).float().cpu()

    def decoded(self, ids: Sequence[int]) -> str:
        """What these ids say, without those that end a text."""
        return self.trained.tokenizer.decode([i for i in ids if i not in self.trained.stops])

    def labels(self) -> dict[str, Any]:
        """Its tokens by name, for both halves."""
        names = self.trained.tokenizer.tokens
        about = {"tokens": names(self.ids), "ids": self.ids, "given": self.given}
        return about | {"source": names(self.source) if self.source else []}


def reading(given: Text, context: RequestContext) -> Reading:
    """What a model reads of a text, within what it takes."""
    trained, most = context.registry.model(given.model), context.registry.limits.max_tokens
    if not given.text.strip():
        raise DataError("there is nothing to read: write something")
    model: Any = trained.model
    tokenizer, source = trained.tokenizer, list[int]()
    if isinstance(model, EncoderDecoder):
        sources = encode_sources(tokenizer, [given.text.strip()])
        source = sources.padded(torch.tensor([0]), fill=tokenizer.pad_id)[0][0].tolist()
        ids = [tokenizer.bos_id]
    elif trained.task == "sort-dedup":
        ids = [*tokenizer.encode(given.text), tokenizer.bos_id]
    else:
        ids = encode_prompt(trained, given.text)
    known, longest = model.config.vocab_size, min(most, getattr(model.config, "max_len", most))
    require(all(i < known for i in given.written), f"a written id is beyond the vocabulary of {known:,}")
    length = max(len(source), len(ids) + len(given.written))
    if length > longest:
        raise DataError(f"this has {length:,} tokens and {trained.name} takes {longest:,} here: shorten it")
    return Reading(trained, source, [*ids, *given.written], len(ids))


def answered(now: Reading) -> Reading:
    """The same with the likeliest answer, of a model whose task has one; a text that goes on is left as it is."""
    if now.trained.task not in ("translation", "sort-dedup") or len(now.ids) > now.given:
        return now
    model: Any = now.trained.model
    room = max(1, min(2 * max(len(now.source), now.given) + 8, model.config.max_len - len(now.ids)))
    start = now.ids if now.source else None  # what a decoder goes on from, where its encoder reads the prompt
    made = generate(
        model, now.inputs[0], decoder_start_ids=start, stop_ids=now.trained.stops, max_new_tokens=room
    ).sequence(0)
    return replace(now, ids=[*now.ids, *made.tolist()])


def pixels_of(text: str, model: Any) -> Tensor:
    """A picture (height, width) of bytes, in the size that a model takes."""
    height, width = model.config.image_size
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    require(len(raw) == height * width, f"the picture has {len(raw)} bytes; expected {height} × {width}, in base64")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(height, width)


# ---------------------------------------------------------------------- actions


def models(given: EmptyRequest, context: RequestContext) -> dict[str, Any]:
    """The models of this page, what each does, and how it is built."""
    registry = context.registry
    return {"models": [_about(registry.model(name), name, registry.limits.max_tokens) for name in registry.names]}


def _about(trained: Pipeline, name: str, most: int) -> dict[str, Any]:
    model: Any = trained.model
    layers = attention_layers(model)
    return {
        "name": name,
        "task": trained.task,
        "kind": type(model).__name__,
        "about": trained.card.get("description", ""),
        "weights": sum(p.numel() for p in model.parameters()),
        "layers": [{"path": path, "heads": layer.n_heads} for path, layer in layers.items()],
        "blocks": list(dict.fromkeys(path.rpartition(".")[0] for path in layers)),
        "writes": isinstance(model, (Decoder, EncoderDecoder)),
        "longest": min(most, getattr(model.config, "max_len", most)),
        "size": getattr(model.config, "image_size", None),
        "examples": _EXAMPLES.get(trained.task, ("The cat sat on the mat.",)),
    }


@torch.no_grad()
def step(given: Chosen, context: RequestContext) -> dict[str, Any]:
    """The tokens of a text, what may come next, and what would be taken."""
    now = reading(given, context)
    about = now.labels()
    if not isinstance(now.trained.model, (Decoder, EncoderDecoder)):
        return about | {"next": [], "taken": None, "text": "", "ends": True}
    logits = now.logits()
    context.checkpoint()
    raw = logits.double().softmax(-1)
    p = torch.zeros_like(raw).index_fill_(0, raw.argmax(), 1.0)
    if given.temperature > 0:
        how = Sample(given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed)
        p = probabilities(logits[None], how)[0]
    luck = torch.Generator().manual_seed(given.seed + len(given.written))
    taken = int(sample_inverse_cdf(p[None], torch.rand(1, generator=luck, dtype=torch.float64)))
    best = (p + 1e-9 * raw).topk(min(_SHOWN, len(p))).indices.tolist()
    names = now.trained.tokenizer.tokens([*best, taken])
    return about | {
        "next": [{"id": i, "token": names[k], "raw": float(raw[i]), "p": float(p[i])} for k, i in enumerate(best)],
        "kept": int((p > 0).sum()),
        "of": len(p),
        "entropy": float(-(p * p.clamp(min=1e-300).log()).sum()),
        "taken": {"id": taken, "token": names[-1]},
        "ends": taken in now.trained.stops,
        "text": now.decoded(now.ids[now.given :]),
    }


def _album(given: Text, context: RequestContext) -> AttentionReport:
    trained = context.registry.model(given.model)
    if isinstance(trained.model, VisionTransformer):
        return report_for_image(trained, pixels_of(given.pixels, trained.model), name="a drawing")
    now = answered(reading(given, context))
    if not now.source:
        layers = attention_layers(trained.model)
        require(given.layer in ("", *layers), f"there is no layer {given.layer!r}; {did_you_mean(given.layer, layers)}")
        return report_for_ids(trained, now.ids, title=shorten_text(given.text), layer=given.layer or None)
    last = int(now.logits().argmax())  # what the last row would write
    made = Translation(given.text, now.decoded(now.ids[1:]), tuple(now.source), (*now.ids[1:], last))
    return analysis.translation_report(trained, made)


@torch.no_grad()
def attention(given: Text, context: RequestContext) -> dict[str, Any]:
    """Who attends to whom, in every layer: what the panel of `look` shows."""
    made = _album(given, context)
    context.checkpoint()
    many = len(made.default_map.rows) > _WALKED
    return page_data(made, on_layer=lambda i, n: context.checkpoint(i, n if many else 0, f"layer {i + 1} of {n}"))


@torch.no_grad()
def page(given: Text, context: RequestContext) -> dict[str, Any]:
    """The same run as the one-file page of `look`."""
    return {"html": _album(given, context).html()}


@torch.no_grad()
def walk(given: Text, context: RequestContext) -> dict[str, Any]:
    """The model drawn from its run, and every station of it."""
    trained = context.registry.model(given.model)
    if isinstance(trained.model, VisionTransformer):
        return analysis.build_walkthrough(trained, pixels_of(given.pixels, trained.model)).to_dict()
    now = reading(given, context)
    length = max(len(now.ids), len(now.source))
    require(length < _WALKED, f"stations are shown up to {_WALKED} tokens and this has {length}; shorten it")
    is_text = isinstance(trained.model, Decoder) and trained.task != "sort-dedup"
    text = given.text + trained.tokenizer.decode(now.ids[now.given :]) if is_text else given.text
    return analysis.build_walkthrough(trained, text, max_new_tokens=1 if is_text else None).to_dict()


class _Tree:
    """A stepper that notes every beginning which a search kept alive, and passes everything on."""

    def __init__(self, stepper: Any, context: RequestContext, most: int) -> None:
        self._stepper, self._context, self._most, self._made = stepper, context, most, 0
        self.nodes: list[dict[str, Any]] = []
        self._rows: list[int | None] = []
        self._known: dict[tuple[int | None, int], int] = {}

    def prefill(self) -> Tensor:
        self._logits: Tensor = self._stepper.prefill()
        self._rows = [None] * len(self._logits)
        return self._logits

    def decode_step(self, ids: Tensor) -> Tensor:
        self._made += 1
        self._context.checkpoint(self._made, self._most, f"{self._made} tokens")
        chances = self._logits.float().log_softmax(-1)
        taken = enumerate(zip(self._rows, ids.tolist(), strict=True))
        self._rows = [self.node(above, i, float(chances[row, i])) for row, (above, i) in taken]
        self._logits = self._stepper.decode_step(ids)
        return self._logits

    def reorder_cache(self, rows: Tensor) -> None:
        self._rows = [self._rows[i] for i in rows.tolist()]
        self._logits = self._logits.index_select(0, rows.to(self._logits.device))
        self._stepper.reorder_cache(rows)

    def node(self, above: int | None, id_: int, chance: float) -> int:
        """The number of a node, which is made where it is new."""
        if (above, id_) not in self._known:
            self._known[above, id_] = len(self.nodes)
            self.nodes.append({"above": above, "id": id_, "log_p": chance})
        return self._known[above, id_]


@torch.no_grad()
def beams(given: Searched, context: RequestContext) -> dict[str, Any]:
    """Beam search as the tree of all beginnings that were alive, and what came out of it."""
    now = reading(given, context)
    model: Any = now.trained.model
    require(isinstance(model, (Decoder, EncoderDecoder)), f"{given.model} writes nothing: choose a model that does")
    room = min(given.max_new_tokens, getattr(model.config, "max_len", 1 << 30) - len(now.ids))
    require(room >= 1, "there is no room for another token: go back, or shorten the text")
    start = now.ids if now.source else None
    stepper = incremental_decoder(
        model, now.inputs[0], decoder_start_ids=start, max_new_tokens=room, use_cache=True, sliding_context=False
    )
    tree = _Tree(stepper, context, room)
    how = BeamSearch(given.width, length_penalty=given.length_penalty, n_best=given.width)
    made = search(tree, strategy=how, max_new_tokens=room, stop_ids=now.trained.stops)
    found = []
    for rank in range(given.width):
        ids = made.sequence(0, rank, with_stop=True).tolist()
        path: list[int] = []
        for i, chance in zip(ids, made.log_probs[0, rank].tolist(), strict=False):
            path.append(tree.node(path[-1] if path else None, i, chance))
        if ids:
            told = {"score": float(made.scores[0, rank]), "ended": bool(made.finished[0, rank])}
            found.append({"path": path, "text": now.decoded(ids), **told})
    names = now.trained.tokenizer.tokens([node["id"] for node in tree.nodes]) if tree.nodes else []
    return {"nodes": [node | {"token": name} for node, name in zip(tree.nodes, names, strict=True)], "found": found}
