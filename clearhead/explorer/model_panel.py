"""The model panel: tokens, next-token probabilities, attention, walkthrough and beam search of one input.

Every request encodes its text again. The tokens generated so far are part of the request, as ids, so generating a token
and removing one are the same action with other ids."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, PositiveInt, Range, did_you_mean, require
from clearhead.analysis.inputs.pipelines import encode_prompt, ids_tensor, shorten_text
from clearhead.analysis.reports import attention_layers, report_for_ids, report_for_image
from clearhead.analysis.views.page import page_data
from clearhead.analysis.views.report import AttentionReport
from clearhead.config import Validated
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import DataError
from clearhead.explorer.request import EmptyRequest, RequestContext, Seed, action
from clearhead.generation import BeamSearch, Sample, generate, search
from clearhead.generation.decoder import IncrementalDecoder
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.request import SearchRequest
from clearhead.generation.sampling import probabilities, sample_inverse_cdf
from clearhead.hub import Pipeline, Translation
from clearhead.models import Decoder, EncoderDecoder, VisionTransformer

_N_CANDIDATES = 12
_MAX_WALKTHROUGH_TOKENS = 256
_EXAMPLES = {
    "translation": ("How are you?", "The house is red.", "I would like a cup of coffee, please."),
    "text": ("First Citizen:\nBefore we proceed any further, hear me", "ROMEO:\n", "To be, or not to be"),
    "sort-dedup": ("D A A C B A", "Q W E R T Y", "H E L L O"),
}


@dataclass(frozen=True, kw_only=True)
class ModelRequest(Validated):
    """A model and its input: a text with the ids generated so far, or an image."""

    model: str
    text: str = ""
    generated_ids: tuple[NonNegativeInt, ...] = ()
    pixels: str = ""  # grey bytes of an image, in base64
    layer: str = ""  # of a long text, the report contains this layer only


@dataclass(frozen=True, kw_only=True)
class NextTokenRequest(ModelRequest):
    """An input and the settings of sampling."""

    temperature: Annotated[float, Range(ge=0, le=100)] = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Range(gt=0, le=1)] | None = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class BeamSearchRequest(ModelRequest):
    """An input and the settings of beam search."""

    width: Annotated[int, Range(ge=1, le=8)] = 3
    max_new_tokens: Annotated[int, Range(ge=1, le=48)] = 12
    length_penalty: Annotated[float, Range(ge=-2, le=4)] = 1.0


@dataclass(frozen=True)
class EncodedInput:
    """One text as ids.

    Attributes:
        pipeline: The model.
        source_ids: Input of the encoder; empty for decoder-only models and encoders.
        ids: Input of the decoder, or of the only stack.
        n_prompt: Number of `ids` that were not generated.
    """

    pipeline: Pipeline
    source_ids: list[int]
    ids: list[int]
    n_prompt: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of the model."""
        return tuple(ids_tensor(self.pipeline, row) for row in (self.source_ids, self.ids) if row)

    def next_logits(self) -> Tensor:
        """Return the logits (V,) after the last token; those of the other positions are not computed."""
        model: Any = self.pipeline.model
        return (model.hidden_states(*self.inputs)[0, -1] @ model.lm_head_weight().T).float().cpu()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids without stop tokens."""
        return self.pipeline.tokenizer.decode([i for i in ids if i not in self.pipeline.stop_ids])

    def to_dict(self) -> JSONObject:
        """Return the tokens as plain data for JSON."""
        names = self.pipeline.tokenizer.tokens
        tokens = {"tokens": names(self.ids), "ids": self.ids, "n_prompt": self.n_prompt}
        return tokens | {"source": names(self.source_ids) if self.source_ids else []}


def encode_input(request: ModelRequest, context: RequestContext) -> EncodedInput:
    """Return the ids of a request; raise DataError if it is empty or too long."""
    pipeline = context.registry.model(request.model)
    if not request.text.strip():
        raise DataError("the input is empty; enter a text")
    model: Any = pipeline.model
    tokenizer = pipeline.tokenizer
    source_ids: list[int] = []
    if isinstance(model, EncoderDecoder):
        sources = encode_sources(tokenizer, [request.text.strip()])
        source_ids = sources.padded(torch.tensor([0]), fill=tokenizer.pad_id)[0][0].tolist()
        ids = [tokenizer.bos_id]
    elif pipeline.task == "sort-dedup":
        ids = [*tokenizer.encode(request.text), tokenizer.bos_id]
    else:
        ids = encode_prompt(pipeline, request.text)
    vocab_size = model.config.vocab_size
    require(
        all(i < vocab_size for i in request.generated_ids),
        f"generated_ids contains an id outside the vocabulary (0 … {vocab_size - 1:,})",
    )
    length = max(len(source_ids), len(ids) + len(request.generated_ids))
    limit = _max_tokens(model, context.registry.limits.max_tokens)
    if length > limit:
        raise DataError(f"the input has {length:,} tokens but {pipeline.name} takes at most {limit:,} here; shorten it")
    return EncodedInput(pipeline, source_ids, [*ids, *request.generated_ids], len(ids))


def _max_tokens(model: Any, limit: int) -> int:
    """Return the number of tokens that the page passes to a model at most."""
    return min(limit, getattr(model.config, "max_len", limit))


def with_answer(encoded: EncodedInput) -> EncodedInput:
    """Append the greedy answer if the task has one and nothing was generated yet."""
    if encoded.pipeline.task not in ("translation", "sort-dedup") or len(encoded.ids) > encoded.n_prompt:
        return encoded
    model: Any = encoded.pipeline.model
    length = 2 * max(len(encoded.source_ids), encoded.n_prompt) + 8
    output = generate(
        model,
        encoded.inputs[0],
        decoder_start_ids=encoded.ids if encoded.source_ids else None,
        stop_ids=encoded.pipeline.stop_ids,
        max_new_tokens=max(1, min(length, model.config.max_len - len(encoded.ids))),
    )
    return replace(encoded, ids=[*encoded.ids, *output.sequence(0).tolist()])


def decode_pixels(text: str, model: Any) -> Tensor:
    """Return an image (height, width) of bytes, in the size that a model takes."""
    height, width = model.config.image_size
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    require(len(data) == height * width, f"the image has {len(data)} bytes; expected {height} × {width}, in base64")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(height, width)


# ---------------------------------------------------------------------- actions


@action(EmptyRequest)
def models(request: EmptyRequest, context: RequestContext) -> JSONObject:
    """Return the models of this page: task, architecture and size of each."""
    registry = context.registry
    limit = registry.limits.max_tokens
    return {"models": [_describe_model(registry.model(name), name, limit) for name in registry.names]}


def _describe_model(pipeline: Pipeline, name: str, limit: int) -> JSONObject:
    """Return what the page shows of a model."""
    model = pipeline.model
    layers = attention_layers(model)
    return {
        "name": name,
        "task": pipeline.task,
        "architecture": type(model).__name__,
        "description": pipeline.card.get("description", ""),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": [{"path": path, "n_heads": layer.n_heads} for path, layer in layers.items()],
        "blocks": list(dict.fromkeys(path.rpartition(".")[0] for path in layers)),
        "can_generate": isinstance(model, (Decoder, EncoderDecoder)),
        "max_tokens": _max_tokens(model, limit),
        "image_size": getattr(model.config, "image_size", None),
        "examples": _EXAMPLES.get(pipeline.task, ("The cat sat on the mat.",)),
    }


@action(NextTokenRequest)
@torch.no_grad()
def next_token(request: NextTokenRequest, context: RequestContext) -> JSONObject:
    """Return the tokens of a text, the probabilities of the next token, and the one that sampling selects."""
    encoded = encode_input(request, context)
    tokens = encoded.to_dict()
    if not isinstance(encoded.pipeline.model, (Decoder, EncoderDecoder)):
        return tokens | {"candidates": [], "selected": None, "text": "", "is_end": True}
    logits = encoded.next_logits()
    context.checkpoint()
    model_probs = logits.double().softmax(-1)
    probs = torch.zeros_like(model_probs).index_fill_(0, model_probs.argmax(), 1.0)
    if request.temperature > 0:
        strategy = Sample(request.temperature, top_k=request.top_k, top_p=request.top_p, seed=request.seed)
        probs = probabilities(logits[None], strategy)[0]
    generator = torch.Generator().manual_seed(request.seed + len(request.generated_ids))
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    selected = int(sample_inverse_cdf(probs[None], uniform))
    # The model's own probability breaks ties among tokens that the strategy excludes.
    best = (probs + 1e-9 * model_probs).topk(min(_N_CANDIDATES, len(probs))).indices.tolist()
    names = encoded.pipeline.tokenizer.tokens([*best, selected])
    candidates = [
        {"id": i, "token": name, "probability": float(probs[i]), "model_probability": float(model_probs[i])}
        for i, name in zip(best, names, strict=False)
    ]
    return tokens | {
        "candidates": candidates,
        "n_candidates": int((probs > 0).sum()),
        "vocab_size": len(probs),
        "entropy": float(-(probs * probs.clamp(min=1e-300).log()).sum()),
        "selected": {"id": selected, "token": names[-1]},
        "is_end": selected in encoded.pipeline.stop_ids,
        "text": encoded.decode(encoded.ids[encoded.n_prompt :]),
    }


def _attention_report(request: ModelRequest, context: RequestContext) -> AttentionReport:
    """Return the attention report of an input."""
    pipeline = context.registry.model(request.model)
    if isinstance(pipeline.model, VisionTransformer):
        return report_for_image(pipeline, decode_pixels(request.pixels, pipeline.model), name="drawing")
    encoded = with_answer(encode_input(request, context))
    if not encoded.source_ids:
        layers = attention_layers(pipeline.model)
        is_known = request.layer in ("", *layers)
        require(is_known, f"unknown layer {request.layer!r}; {did_you_mean(request.layer, layers)}")
        title = shorten_text(request.text)
        return report_for_ids(pipeline, encoded.ids, title=title, layer=request.layer or None)
    last = int(encoded.next_logits().argmax())  # the prediction of the last row
    target = encoded.decode(encoded.ids[1:])
    translation = Translation(request.text, target, tuple(encoded.source_ids), (*encoded.ids[1:], last))
    return analysis.translation_report(pipeline, translation)


@action(ModelRequest)
@torch.no_grad()
def attention(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the attention weights of every layer, as the data of a report page."""
    report = _attention_report(request, context)
    context.checkpoint()
    is_long = len(report.default_map.rows) > _MAX_WALKTHROUGH_TOKENS

    def on_layer(i: int, n_layers: int) -> None:
        context.checkpoint(i, n_layers if is_long else 0, f"layer {i + 1} of {n_layers}")

    return page_data(report, on_layer=on_layer)


@action(ModelRequest)
@torch.no_grad()
def report_page(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the attention report as one self-contained HTML page."""
    return {"html": _attention_report(request, context).html()}


@action(ModelRequest)
@torch.no_grad()
def walkthrough(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the forward pass step by step, and the drawing of the model."""
    pipeline = context.registry.model(request.model)
    if isinstance(pipeline.model, VisionTransformer):
        return analysis.build_walkthrough(pipeline, decode_pixels(request.pixels, pipeline.model)).to_dict()
    encoded = encode_input(request, context)
    length = max(len(encoded.ids), len(encoded.source_ids))
    require(
        length < _MAX_WALKTHROUGH_TOKENS,
        f"the input has {length} tokens but a walkthrough takes fewer than {_MAX_WALKTHROUGH_TOKENS}; shorten it",
    )
    text = request.text
    max_new_tokens = None
    if isinstance(pipeline.model, Decoder) and pipeline.task != "sort-dedup":
        text += pipeline.tokenizer.decode(encoded.ids[encoded.n_prompt :])
        max_new_tokens = 1
    return analysis.build_walkthrough(pipeline, text, max_new_tokens=max_new_tokens).to_dict()


class TreeNode(TypedDict):
    """A prefix that beam search kept: its parent, last id, and the id's log-probability."""

    parent: int | None
    id: int
    log_prob: float


class _BeamTree:
    """An incremental decoder that records every prefix that beam search kept, and delegates to another decoder."""

    def __init__(self, decoder: IncrementalDecoder, context: RequestContext, max_new_tokens: int) -> None:
        self.nodes: list[TreeNode] = []
        self._decoder = decoder
        self._context = context
        self._max_new_tokens = max_new_tokens
        self._n_steps = 0
        self._rows: list[int | None] = []  # node of each row
        self._nodes_by_key: dict[tuple[int | None, int], int] = {}

    def prefill(self) -> Tensor:
        """Process the prompt."""
        self._logits: Tensor = self._decoder.prefill()
        self._rows = [None] * len(self._logits)
        return self._logits

    def decode_step(self, ids: Tensor) -> Tensor:
        """Append one token per row, and record it."""
        self._n_steps += 1
        self._context.checkpoint(self._n_steps, self._max_new_tokens, f"{self._n_steps} tokens")
        log_probs = self._logits.float().log_softmax(-1)
        self._rows = [
            self.node(parent, i, float(log_probs[row, i]))
            for row, (parent, i) in enumerate(zip(self._rows, ids.tolist(), strict=True))
        ]
        self._logits = self._decoder.decode_step(ids)
        return self._logits

    def reorder_cache(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self._rows = [self._rows[i] for i in rows.tolist()]
        self._logits = self._logits.index_select(0, rows.to(self._logits.device))
        self._decoder.reorder_cache(rows)

    def node(self, parent: int | None, id_: int, log_prob: float) -> int:
        """Return the index of a node; add it if it is new."""
        key = (parent, id_)
        if key not in self._nodes_by_key:
            self._nodes_by_key[key] = len(self.nodes)
            self.nodes.append(TreeNode(parent=parent, id=id_, log_prob=log_prob))
        return self._nodes_by_key[key]


@action(BeamSearchRequest)
@torch.no_grad()
def beam_search(request: BeamSearchRequest, context: RequestContext) -> JSONObject:
    """Return all prefixes that beam search kept, as a tree, and its final hypotheses."""
    encoded = encode_input(request, context)
    model: Any = encoded.pipeline.model
    can_generate = isinstance(model, (Decoder, EncoderDecoder))
    require(can_generate, f"{request.model} does not generate text; choose a decoder or an encoder-decoder")
    n_positions = getattr(model.config, "max_len", 1 << 30) - len(encoded.ids)
    require(n_positions >= 1, "the context is full; remove a token or shorten the text")
    max_new_tokens = min(request.max_new_tokens, n_positions)
    strategy = BeamSearch(request.width, length_penalty=request.length_penalty, n_best=request.width)
    stop_ids = encoded.pipeline.stop_ids
    decoder = incremental_decoder(
        model,
        encoded.inputs[0],
        SearchRequest.of(strategy, max_new_tokens, stop_ids),
        decoder_start_ids=encoded.ids if encoded.source_ids else None,
    )
    tree = _BeamTree(decoder, context, max_new_tokens)
    output = search(tree, strategy=strategy, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    hypotheses = []
    for rank in range(request.width):
        ids = output.sequence(0, rank, with_stop=True).tolist()
        if not ids:
            continue
        nodes: list[int] = []
        for i, log_prob in zip(ids, output.log_probs[0, rank].tolist(), strict=False):
            nodes.append(tree.node(nodes[-1] if nodes else None, i, log_prob))
        hypotheses.append(
            {
                "nodes": nodes,
                "text": encoded.decode(ids),
                "score": float(output.scores[0, rank]),
                "is_finished": bool(output.finished[0, rank]),
            }
        )
    names = encoded.pipeline.tokenizer.tokens([node["id"] for node in tree.nodes]) if tree.nodes else []
    named_nodes = [{**node, "token": name} for node, name in zip(tree.nodes, names, strict=True)]
    return {"nodes": named_nodes, "hypotheses": hypotheses}
