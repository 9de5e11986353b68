"""The run of a model: its models, the tokens of an input, what it generates, and the candidates of every step.

The text is encoded here and nowhere else: the page passes the ids of this run to every other action. Generated tokens
are part of the request too, so that generating a token, removing one and choosing another are the same action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import PositiveInt, Range
from clearhead.analysis.reports import attention_layers
from clearhead.errors import ClearheadError
from clearhead.explorer.model_input import (
    EncodedInput,
    ModelRequest,
    answer_length,
    encode_input,
    has_answer,
    max_tokens,
)
from clearhead.explorer.request import EmptyRequest, RequestContext, Seed, action
from clearhead.generation import Sample
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.request import SearchRequest
from clearhead.generation.sampling import probabilities, sample_inverse_cdf
from clearhead.hub import Pipeline
from clearhead.models import CTCEncoder, Decoder, EncoderDecoder

_N_CANDIDATES = 12
_MAX_STEPS = 64  # generated tokens whose candidates are returned
_EXAMPLES = {
    "en-es": ("I would like a cup of coffee, please.", "The house is red.", "How are you?"),
    "shakespeare": ("ROMEO:\n", "First Citizen:\nBefore we proceed any further, hear me", "To be, or not to be"),
    "sort-dedup": ("D A A C B A", "Q W E R T Y", "H E L L O"),
}
# Two texts of equal length that differ by a word, and whose runs are worth comparing.
_CONTRASTS = {
    "sort-dedup": ("D A A C B A", "D A A C E A"),
    "translation": ("The house is red.", "The car is red."),
    "text": ("The capital of France is", "The capital of Italy is"),
    "chat": ("What is the capital of France?", "What is the capital of Italy?"),
    "shakespeare": ("ROMEO:\nMy", "HENRY:\nMy"),
}
_TASK_EXAMPLES = {
    "sort-dedup": _EXAMPLES["sort-dedup"],
    "translation": ("How are you?", "The house is red."),
    "text": ("The capital of France is", "Once upon a time", "1, 2, 3, 4,"),
    "chat": ("What is the capital of France?", "Write one sentence about the sea."),
}


@dataclass(frozen=True, kw_only=True)
class RunRequest(ModelRequest):
    """An input and how to generate.

    Attributes:
        complete: Whether to generate until a stop token or `max_new_tokens`; otherwise `generated_ids` are kept.
        max_new_tokens: Largest number of new tokens; by default that of the task.
        temperature: 0 is greedy.
        top_k: Number of most probable tokens that are sampled from.
        top_p: Share of probability that is sampled from.
        seed: Seed of sampling.
    """

    complete: bool = False
    max_new_tokens: Annotated[int, Range(ge=1, le=256)] = 24
    temperature: Annotated[float, Range(ge=0, le=100)] = 0.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Range(gt=0, le=1)] | None = None
    seed: Seed = 0


# ---------------------------------------------------------------------- models


@action(EmptyRequest)
def models(request: EmptyRequest, context: RequestContext) -> JSONObject:
    """Return the models of this page: task, architecture and size of each."""
    registry = context.registry
    limit = registry.limits.max_tokens
    descriptions = []
    for name in registry.names:
        checkpoints = [f"{name}@{step}" for step in registry.checkpoint_steps(name)]
        descriptions.append(_describe_model(registry.model(name), name, limit) | {"checkpoints": checkpoints})
    return {"models": descriptions}


def _describe_model(pipeline: Pipeline, name: str, limit: int) -> JSONObject:
    """Return what the page shows of a model."""
    model: Any = pipeline.model
    layers = attention_layers(model)
    kind = _input_kind(pipeline)
    has_chat = kind == "text" and pipeline.source is not None and pipeline.source.template() is not None
    can_generate = kind == "text" and isinstance(model, (Decoder, EncoderDecoder))
    strategy = pipeline.generation_settings.strategy if can_generate else None
    temperature = 0.8 if pipeline.task == "text" and pipeline.train_recipe is not None else 0.0
    settings = {"temperature": temperature, "top_k": None, "top_p": None}
    if isinstance(strategy, Sample):
        settings = {name: getattr(strategy, name) for name in settings}
    examples = _EXAMPLES.get(name) or _TASK_EXAMPLES.get("chat" if has_chat else pipeline.task)
    return {
        "name": name,
        "task": pipeline.task,
        "input": kind,
        "architecture": type(model).__name__,
        "description": pipeline.card.get("description", ""),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": [{"path": path, "n_heads": layer.n_heads} for path, layer in layers.items()],
        "blocks": list(dict.fromkeys(path.rpartition(".")[0] for path in layers)),
        "can_generate": can_generate,
        "has_answer": has_answer(pipeline),
        "has_chat_template": has_chat,
        "settings": settings,
        "max_tokens": max_tokens(model, limit),
        "image_size": getattr(model.config, "image_size", None),
        "sample_rate": model.config.mel.sample_rate if isinstance(model, CTCEncoder) else None,
        "examples": examples or ("The cat sat on the mat.",),
        "contrast": _CONTRASTS.get(name) or _CONTRASTS.get("chat" if has_chat else pipeline.task, ()),
    }


def _input_kind(pipeline: Pipeline) -> str:
    """Return the input that the page offers for a model: "text", "image", "audio", or "" if there is none."""
    if pipeline.task == "digits":
        return "image"
    if isinstance(pipeline.model, CTCEncoder):
        return "audio"
    if pipeline.task in ("transcription", "pictures"):
        return ""
    try:
        return "text" if pipeline.tokenizer is not None else ""
    except ClearheadError:
        return ""


# ---------------------------------------------------------------------- a run


@action(RunRequest)
@torch.no_grad()
def run(request: RunRequest, context: RequestContext) -> JSONObject:
    """Return the tokens of an input, the generated tokens, and the candidates of every step."""
    encoded = encode_input(request, context)
    pipeline = encoded.pipeline
    if not isinstance(pipeline.model, (Decoder, EncoderDecoder)):
        return encoded.to_dict() | {"steps": [], "first_step": 0, "next": None, "text": "", "is_end": True}
    first_step = 0
    if request.complete:
        n_earlier = len(encoded.generated_ids)
        earlier = list(encoded.logits(encoded.n_prompt - 1)[:n_earlier]) if n_earlier else []
        new_ids, logits = generate_ids(encoded, request, context)
        logits = [*earlier, *logits]
        encoded = replace(encoded, ids=[*encoded.ids, *new_ids])
    else:
        first_step = max(0, len(encoded.generated_ids) - _MAX_STEPS)
        logits = list(encoded.logits(encoded.n_prompt - 1 + first_step))
    context.checkpoint()
    generated: list[int | None] = [*encoded.generated_ids, None]
    steps = [_describe_step(row, i, generated[i], request, pipeline) for i, row in enumerate(logits, first_step)]
    has_next = len(steps) > len(encoded.generated_ids) - first_step
    return encoded.to_dict() | {
        "first_step": first_step,
        "steps": steps[:-1] if has_next else steps,
        "next": steps[-1] if has_next else None,
        "text": encoded.output_text,
        "is_end": encoded.is_finished,
        "vocab_size": logits[0].shape[-1],
    }


def generate_ids(encoded: EncodedInput, request: RunRequest, context: RequestContext) -> tuple[list[int], list[Tensor]]:
    """Return new ids up to a stop id or the limit, and the logits before each of them and after the last."""
    pipeline = encoded.pipeline
    if encoded.is_finished:
        return [], []
    limit = answer_length(encoded) if has_answer(pipeline) else request.max_new_tokens
    n_free = max_tokens(pipeline.model, context.registry.limits.max_tokens) - len(encoded.ids)
    limit = max(0, min(limit, n_free))
    search_request = SearchRequest.of(
        None,
        limit + 1,
        pipeline.stop_ids,
        decoder_start_ids=encoded.ids if encoded.source_ids else None,
        logits_processors=pipeline.logits_processors,
    )
    decoder = incremental_decoder(pipeline.model, encoded.inputs[0], search_request)
    logits = [decoder.prefill()[0].float().cpu()]
    ids: list[int] = []
    while len(ids) < limit and (not ids or ids[-1] not in pipeline.stop_ids):
        context.checkpoint()
        ids.append(_select(logits[-1], len(encoded.generated_ids) + len(ids), request)[0])
        if ids[-1] not in pipeline.stop_ids:
            logits.append(decoder.decode_step(torch.tensor(ids[-1:], device=encoded.inputs[0].device))[0].float().cpu())
    return ids, logits


def _select(logits: Tensor, i: int, request: RunRequest) -> tuple[int, Tensor]:
    """Return the id that the settings select for step `i`, and the probabilities (V,) that it is sampled from.

    Every step has its own seed, so that a run can continue from any of its tokens.
    """
    if request.temperature == 0:
        best = int(logits.argmax())
        return best, torch.zeros(len(logits), dtype=torch.float64).index_fill_(0, torch.tensor(best), 1.0)
    strategy = Sample(request.temperature, top_k=request.top_k, top_p=request.top_p, seed=request.seed)
    probs = probabilities(logits[None], strategy)[0]
    generator = torch.Generator().manual_seed(request.seed + i)
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    return int(sample_inverse_cdf(probs[None], uniform)), probs


def _describe_step(logits: Tensor, i: int, token_id: int | None, request: RunRequest, pipeline: Pipeline) -> JSONObject:
    """Return the candidates of one step, always with the token that was taken or that the settings select."""
    model_probs = logits.double().softmax(-1)
    selected, probs = _select(logits, i, request)
    token_id = selected if token_id is None else token_id
    # The model's own probability breaks ties among tokens that the settings exclude.
    order = (probs + 1e-9 * model_probs).topk(min(_N_CANDIDATES, len(probs))).indices.tolist()
    candidate_ids = order if token_id in order else [*order[:-1], token_id]
    return {
        "taken": token_id,
        "selected": selected,
        "rank": int((model_probs > model_probs[token_id]).sum()),
        "probability": float(model_probs[token_id]),
        "n_candidates": int((probs > 0).sum()),
        "entropy": float(torch.special.entr(model_probs).sum()),
        "candidates": [
            {"id": id_, "token": token, "probability": float(probs[id_]), "model_probability": float(model_probs[id_])}
            for id_, token in zip(candidate_ids, pipeline.tokenizer.tokens(candidate_ids), strict=True)
        ],
    }
