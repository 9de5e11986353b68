"""The interpret panel: logit lens, reasons of one output token, activation patching, induction scores and neurons.

All computations are those of `clearhead.analysis`; this module selects positions and names for the page."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, Range, did_you_mean, require
from clearhead.analysis.measures import value_norms
from clearhead.analysis.reports import attention_layers
from clearhead.errors import ConfigError
from clearhead.explorer.causal_panel import MeasuredCall, measured_call
from clearhead.explorer.model_input import EncodedInput, ModelRequest, encode_input, with_answer
from clearhead.explorer.request import EmptyRequest, RequestContext, action, field_errors
from clearhead.models import Decoder

_MAX_POSITIONS = 24
_N_PARTS = 8
_N_SOURCES = 3
_N_NEURONS = 16
_CONFIRMED_SHARE = 0.3  # of a contribution, which its ablation must remove


@dataclass(frozen=True, kw_only=True)
class StepRequest(ModelRequest):
    """An input, and the generated token to explain; by default the last one."""

    step: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class PatchingRequest(StepRequest):
    """An input, and a second text of the same length; by default its output token that differs most is explained."""

    other_text: str = ""
    blocks: tuple[str, ...] = ()  # paths of the blocks to patch; by default all


@dataclass(frozen=True, kw_only=True)
class NeuronRequest(ModelRequest):
    """An input, and a block by its index among the feed-forward networks."""

    block: Annotated[int, Range(ge=0, le=10_000)] = 0


@dataclass(frozen=True, kw_only=True)
class LensView:
    """The top prediction after every block, for the last positions of an input.

    Attributes:
        rows: "input", and the paths of the blocks.
        positions: Positions of the columns.
        tokens: Tokens at these positions.
        texts: The most probable next token of each cell.
        probabilities: Its probability.
        ranks: Rank of the model's final prediction; 0 is the first.
    """

    rows: list[str]
    positions: list[int]
    tokens: list[str]
    texts: list[list[str]]
    probabilities: list[list[float]]
    ranks: list[list[int]]


def lens_view(encoded: EncodedInput) -> LensView:
    """Return the top predictions for the last positions of an input."""
    names = encoded.pipeline.tokenizer.tokens
    n = len(encoded.input_ids)
    first = max(0, n - _MAX_POSITIONS, encoded.n_prompt - 1 if encoded.source_ids else 0)
    lens = analysis.logit_lens(encoded.pipeline.model, encoded.inputs, positions=list(range(first, n)))
    ids, probabilities = (x[:, 0, :, 0] for x in lens.top())
    return LensView(
        rows=["input", *lens.layers[1:]],
        positions=list(range(first, n)),
        tokens=names(encoded.input_ids[first:]),
        texts=[names(row) for row in ids.tolist()],
        probabilities=probabilities.tolist(),
        ranks=lens.ranks()[:, 0].tolist(),
    )


@action(ModelRequest)
@torch.no_grad()
def logit_lens(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the top prediction after every block, for the last positions."""
    return asdict(lens_view(with_answer(encode_input(request, context))))


# ---------------------------------------------------------------------- why this token


@action(StepRequest)
def explain_token(request: StepRequest, context: RequestContext) -> JSONObject:
    """Return the largest direct contributions to a logit; the ablation of each; and the sources that a head reads."""
    call = measured_call(request, request.step, context)
    model = call.pipeline.model
    attribution = analysis.attribute(model, call.args, call.metric)
    context.checkpoint()
    parts = [part for part in attribution.largest if part.kind in ("head", "feed-forward", "attention")][:_N_PARTS]
    with (
        torch.no_grad(),
        analysis.trace(model, *{f"{part.path}.weights" for part in parts if part.head is not None}) as t,
    ):
        model(*call.args)
    rows = []
    for i, part in enumerate(parts):
        context.checkpoint(i, len(parts), part.name)
        change = _ablation(call, part)
        row: JSONObject = {
            "name": part.name,
            "path": part.path,
            "head": part.head,
            "value": part.value,
            "ablation": change,
        }
        row["verdict"] = _verdict(part.value, change)
        row["sources"] = [] if part.head is None else _sources(call, t, part.path, part.head)
        rows.append(row)
    listed = sum(part.value for part in parts)
    return {
        "target": call.target_name,
        "position": call.position,
        "logit": attribution.logit,
        "parts": rows,
        "others": attribution.logit - listed,
        "n_others": len(attribution.parts) - len(parts),
    }


def _ablation(call: MeasuredCall, part: analysis.LogitContribution) -> float:
    """Return the change of the logit when a part is set to zero."""
    granularity = "module" if part.head is None else "head"
    result = analysis.ablate(call.pipeline.model, call.args, call.metric, modules=part.path, granularity=granularity)  # type: ignore[arg-type]
    return float(result.change[0, part.head or 0])


def _verdict(value: float, change: float) -> str:
    """Return whether removing a part has the effect that its direct contribution predicts."""
    if change * value > 0:
        return "refuted"
    return "confirmed" if abs(change) >= _CONFIRMED_SHARE * abs(value) else "compensated"


@torch.no_grad()
def source_shares(call: MeasuredCall, t: analysis.Trace, path: str, head: int) -> Tensor:
    """Return the share (S,) of each key in what a head adds at the measured position, by the norms of its parts."""
    weights = t.weights(path, heads=head, rows=call.position)[0, 0, 0]  # (S,)
    projection: Tensor = attention_layers(call.pipeline.model)[path].o_proj.weight
    shares = weights * value_norms(t.values(path)[0].float(), projection.float())[head]
    return shares / shares.sum().clamp(min=1e-12)


@torch.no_grad()
def _sources(call: MeasuredCall, t: analysis.Trace, path: str, head: int) -> list[JSONObject]:
    """Return the keys whose values a head adds most at the measured position, with the ablation of each edge."""
    weights = t.weights(path, heads=head, rows=call.position)[0, 0, 0]  # (S,)
    values = t.values(path)[0]  # (K, S, E)
    value = values[head * values.shape[0] // attention_layers(call.pipeline.model)[path].n_heads]
    shares = source_shares(call, t, path, head)
    output = t.heads(path, heads=head)[0, 0, call.position]
    before = float(call.metric(call.pipeline.model(*call.args)))
    sources = []
    for key in shares.topk(min(_N_SOURCES, len(shares))).indices.tolist():
        without = output - weights[key] * value[key]
        with analysis.trace(call.pipeline.model, "output") as edited:
            edited.intervene(path, analysis.ReplaceActivation(without, heads=[head], positions=[call.position]))
            after = float(call.metric(call.pipeline.model(*call.args)))
        sources.append(
            {"key": key, "weight": float(weights[key]), "share": float(shares[key]), "ablation": after - before}
        )
    return sources


# ---------------------------------------------------------------------- patching, induction, neurons


@dataclass(frozen=True, kw_only=True)
class PatchingGrid:
    """The share of the difference that each block of a stack restores at each position.

    Attributes:
        stack: Name of the stack; empty for a decoder.
        tokens: Tokens of this run.
        other_tokens: Tokens of the second text.
        first: The first position whose activations differ; those before it restore nothing.
        rows: Paths of the blocks.
        restored: A row per block.
    """

    stack: str
    tokens: list[str]
    other_tokens: list[str]
    first: int
    rows: list[str] = field(default_factory=list)
    restored: list[list[float]] = field(default_factory=list)


@action(PatchingRequest)
@torch.no_grad()
def patching_grid(request: PatchingRequest, context: RequestContext) -> JSONObject:
    """Return how far each activation of this run, patched into the run of another text, restores the output token."""
    encoded = with_answer(encode_input(request, context))
    with field_errors("other_text"):
        other = _other_input(request, encoded, context)
    step = _most_changed_step(encoded, other) if request.step is None else request.step
    call = measured_call(request, step, context)
    # Later tokens have no influence on the measured logit.
    encoded, other = (replace(x, ids=x.ids[: call.position + 1]) for x in (encoded, other))
    names = call.pipeline.tokenizer.tokens
    blocks = list(dict.fromkeys(path.rpartition(".")[0] for path in attention_layers(call.pipeline.model)))
    for path in request.blocks:
        require(path in blocks, f"unknown block {path!r}; {did_you_mean(path, blocks)}")
    grids: dict[str, PatchingGrid] = {}
    clean = corrupted = math.nan
    for i, path in enumerate(request.blocks or blocks):
        context.checkpoint(i, len(request.blocks or blocks), path)
        with analysis.trace(call.pipeline.model, f"{path}.output") as t:
            call.pipeline.model(*encoded.inputs)
        with analysis.trace(call.pipeline.model, f"{path}.output") as unpatched:
            call.pipeline.model(*other.inputs)
        # Positions with equal activations, such as those before the first other token, restore nothing.
        differs = (t.output(path)[0] != unpatched.output(path)[0]).any(-1)
        positions = differs.nonzero()[:, 0].tolist()
        restored = torch.zeros(len(differs), dtype=torch.float64)
        result = analysis.patch(
            call.pipeline.model, encoded.inputs, other.inputs, call.metric, modules=path, positions=positions
        )
        clean, corrupted = result.clean, result.baseline
        if clean != corrupted:
            restored[positions] = result.restored[0]
        stack = path.rpartition("blocks.")[0].rstrip(".")
        ids = [x.source_ids if stack == "encoder" else x.input_ids for x in (encoded, other)]
        tokens, other_tokens = (names(row) for row in ids)
        grid = grids.setdefault(
            stack, PatchingGrid(stack=stack, tokens=tokens, other_tokens=other_tokens, first=min(positions, default=0))
        )
        grid.rows.append(path)
        grid.restored.append(restored.tolist())
    return {
        "step": step,
        "target": call.target_name,
        "clean": clean,
        "corrupted": corrupted,
        "grids": [asdict(grid) for grid in grids.values()],
    }


def _most_changed_step(encoded: EncodedInput, other: EncodedInput) -> int | None:
    """Return the generated token whose log-probability falls most with the other text; None if nothing is generated."""
    n = len(encoded.generated_ids)
    if n == 0:
        return None
    ids = torch.tensor(encoded.generated_ids)[:, None]
    first, second = (x.logits(x.n_prompt - 1)[:n].log_softmax(-1).gather(1, ids)[:, 0] for x in (encoded, other))
    return int((first - second).argmax())


def _other_input(request: PatchingRequest, encoded: EncodedInput, context: RequestContext) -> EncodedInput:
    """Return the other text with the generated tokens of this run; raise ConfigError if its length differs."""
    text_request = replace(request, text=request.other_text, ids=(), source_ids=(), n_prompt=0, generated_ids=())
    other = encode_input(text_request, context)
    n_other, n_this = (len(x.source_ids) or x.n_prompt for x in (other, encoded))
    require(n_other == n_this, f"this text has {n_other} tokens and the first one {n_this}; expected the same number")
    return replace(other, ids=[*other.ids, *encoded.generated_ids])


@dataclass(frozen=True, kw_only=True)
class ModelNameRequest(EmptyRequest):
    """A model."""

    model: str


@action(ModelNameRequest)
@torch.no_grad()
def induction(request: ModelNameRequest, context: RequestContext) -> JSONObject:
    """Return the induction, duplicate-token and previous-token scores of every head on repeated random tokens."""
    model = context.registry.model(request.model).model
    if not isinstance(model, Decoder):
        raise ConfigError("induction scores need a decoder, which reads one text from left to right")
    return analysis.induction_scores(model).to_dict()


@action(NeuronRequest)
@torch.no_grad()
def neurons(request: NeuronRequest, context: RequestContext) -> JSONObject:
    """Return the neurons of a feed-forward network that are most active on this text, and their activations."""
    encoded = with_answer(encode_input(request, context))
    model = encoded.pipeline.model
    paths = _down_projections(model)
    require(bool(paths), "this model has no feed-forward network with a single output projection")
    require(request.block < len(paths), f"block is {request.block}; expected 0 to {len(paths) - 1}")
    path = paths[request.block]
    with analysis.trace(model, f"{path}.input") as t:
        model(*encoded.inputs)
    hidden: Tensor = t.input(path)[0].float()  # (T, F)
    strongest = hidden.abs().amax(0).topk(min(_N_NEURONS, hidden.shape[-1])).indices.tolist()
    is_source = path.startswith("encoder")
    ids = encoded.source_ids if is_source else encoded.input_ids
    return {
        "paths": paths,
        "path": path,
        "is_source": is_source,
        "tokens": encoded.pipeline.tokenizer.tokens(ids),
        "n_neurons": hidden.shape[-1],
        "share_positive": float((hidden > 0).float().mean()),
        "neurons": [{"index": i, "activations": [round(v, 4) for v in hidden[:, i].tolist()]} for i in strongest],
    }


def _down_projections(model: nn.Module) -> list[str]:
    """Return the paths of the last matrix of every feed-forward network; their inputs are the neurons."""
    result = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "feed_forward":
            linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
            result += [f"{path}.{linear[-1]}"] if 2 <= len(linear) <= 3 else []
    return result
