"""Tasks of encoders and classifiers: embed, classify, fill masks, tag tokens, answer questions, choose.

They take a `Pipeline` and batches; its methods accept single texts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead.data.tokenizers.library import HFTokenizer, TokenEncoding
from clearhead.errors import DataError
from clearhead.masks import padding
from clearhead.models import Encoder

if TYPE_CHECKING:
    from clearhead.hub.pipelines import Pipeline

_STRIDE = 128  # tokens by which the windows of a long context overlap
_MAX_ANSWER_TOKENS = 15
_OUTSIDE = "O"  # the label of tokens that belong to no span


@dataclass(frozen=True)
class TokenCandidate:
    """A token for a masked position.

    Attributes:
        text: Text of the token.
        id: Its id.
        probability: Its probability.
    """

    text: str
    id: int
    probability: float


@dataclass(frozen=True)
class TaggedSpan:
    """A part of a text with a label, such as a name.

    Attributes:
        label: The label without B- and I-.
        text: The part of the text.
        start: Its first character.
        end: Its end.
        probability: Mean probability of the label over its tokens.
    """

    label: str
    text: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class Answer:
    """The part of a context that answers a question.

    Attributes:
        text: The answer.
        start: Its first character in the context.
        end: Its end.
        probability: Probability of its first token times that of its last.
    """

    text: str
    start: int
    end: int
    probability: float


def embed(pipeline: Pipeline, texts: Sequence[str], *, batch_size: int = 64) -> Float[Tensor, "N M"]:
    """Embed texts with an encoder, using the pooling of the model's folder (by default the mean over tokens).

    Args:
        pipeline: An encoder with a tokenizer.
        texts: The texts.
        batch_size: Number of texts per forward pass.

    Returns:
        One vector per text.
    """
    pooling = pipeline.pooling

    def pool(model: Encoder, x: Tensor, lengths: Tensor) -> Tensor:
        x = x.cpu().float()  # (B, T, M)
        lengths = lengths.cpu()
        is_token = torch.arange(x.shape[1]) < lengths[:, None]
        mean = (x * is_token[..., None]).sum(1) / lengths[:, None].clamp(min=1)
        return x[:, 0] if pooling.first else mean

    vectors = _encode_texts(pipeline, texts, pool, batch_size, pooling.max_len)
    return torch.nn.functional.normalize(vectors, dim=1) if pooling.unit else vectors


def classify_texts(pipeline: Pipeline, texts: Sequence[str], *, batch_size: int = 64) -> list[dict[str, float]]:
    """Return the probability of each class by its name, most likely first, for each text."""
    logits = _encode_texts(pipeline, texts, lambda model, x, lengths: model.classify(x).cpu().float(), batch_size)
    return _class_probabilities(pipeline, logits)


@torch.no_grad()
def classify_images(pipeline: Pipeline, images: Tensor) -> list[dict[str, float]]:
    """Return the probability of each class by its name, most likely first, for each image (N, C, height, width)."""
    pipeline.require("pictures")
    logits = pipeline.model(images.to(next(pipeline.model.parameters())))
    return _class_probabilities(pipeline, logits.cpu().float())


def _class_probabilities(pipeline: Pipeline, logits: Tensor) -> list[dict[str, float]]:
    """Return the probabilities of classes by name. If several may be true, they are independent."""
    source_config: Mapping[str, object] = {} if pipeline.source is None else pipeline.source.config
    is_multi_label = source_config.get("problem_type") == "multi_label_classification"
    name = _class_names(pipeline)
    result = []
    for row in (logits.sigmoid() if is_multi_label else logits.softmax(-1)).tolist():
        order = sorted(range(len(row)), key=lambda i: -row[i])
        result.append({name(i): row[i] for i in order})
    return result


def _class_names(pipeline: Pipeline) -> Callable[[int], str]:
    """Return a function from a class to its name."""
    names = {} if pipeline.source is None else pipeline.source.config.get("id2label", {})
    return lambda i: str(names.get(str(i), i)) if isinstance(names, Mapping) else str(i)


@torch.no_grad()
def fill_masks(pipeline: Pipeline, texts: Sequence[str], *, n: int = 5) -> list[list[list[TokenCandidate]]]:
    """Return the `n` most likely tokens of each masked position of each text, most likely first.

    Args:
        pipeline: An encoder with a head for masked tokens.
        texts: Texts that contain the mask token, such as `[MASK]` or `<mask>`.
        n: Number of tokens per position.

    Raises:
        DataError: If the model has no such head, or a text has no mask token.
    """
    model = _require_head(pipeline, "masked_lm")
    tokenizer = _tokenizer(pipeline)
    mask_token = tokenizer.specials.get("mask_token")
    if mask_token is None:
        raise DataError(f"the tokenizer of {pipeline.name} has no mask token")
    mask_id = tokenizer.encode(mask_token)[-1]
    results = []
    for text in texts:
        encoding = tokenizer.encode_with_spans(text, longest=model.config.max_len)[0]
        positions = [i for i, id_ in enumerate(encoding.ids) if id_ == mask_id]
        if not positions:
            raise DataError(f"{text[:60]!r} has no mask token; write {mask_token} in place of a word")
        logits = model.predict_tokens(_run_encoder(model, encoding))[0, positions]
        best = logits.float().softmax(-1).topk(n)
        results.append(
            [
                [
                    TokenCandidate(tokenizer.decode([id_]).strip() or tokenizer.tokens([id_])[0], id_, probability)
                    for id_, probability in zip(ids, probabilities, strict=True)
                ]
                for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        )
    return results


@torch.no_grad()
def tag_texts(pipeline: Pipeline, texts: Sequence[str]) -> list[list[TaggedSpan]]:
    """Return the labeled spans of each text, such as names of persons and places.

    Neighboring tokens with the same label form a span; B- starts a new one.

    Args:
        pipeline: An encoder with a classifier of tokens.
        texts: The texts.

    Raises:
        DataError: If the model has no such head, or a text is longer than its maximum.
    """
    model = _require_head(pipeline, "token")
    tokenizer, name = _tokenizer(pipeline), _class_names(pipeline)
    results = []
    for text in texts:
        encoding = tokenizer.encode_with_spans(text)[0]
        if len(encoding.ids) > model.config.max_len:
            raise DataError(
                f"a text has {len(encoding.ids)} tokens, more than the {model.config.max_len} of {pipeline.name}: "
                f"{text[:40]!r}…; split it into sentences"
            )
        best = model.classify_tokens(_run_encoder(model, encoding))[0].float().softmax(-1).max(-1)
        labels = [name(i) for i in best.indices.tolist()]
        results.append(_spans(text, encoding, labels, best.values.tolist()))
    return results


def _spans(
    text: str, encoding: TokenEncoding, labels: Sequence[str], probabilities: Sequence[float]
) -> list[TaggedSpan]:
    """Join neighboring tokens with the same label."""
    tokens = [i for i, sequence in enumerate(encoding.sequences) if sequence is not None]
    numbers: list[int] = []  # of the span of each token
    for previous, i in zip([None, *tokens[:-1]], tokens, strict=True):
        continues = (
            previous is not None
            and not labels[i].startswith("B-")
            and labels[i].removeprefix("I-") == labels[previous].removeprefix("B-").removeprefix("I-")
        )
        numbers.append(numbers[-1] if continues else len(numbers))
    spans = []
    for _, group in groupby(zip(numbers, tokens, strict=True), key=lambda pair: pair[0]):
        members = [i for _, i in group]
        label = labels[members[0]].removeprefix("B-").removeprefix("I-")
        if label == _OUTSIDE:
            continue
        start, end = encoding.spans[members[0]][0], encoding.spans[members[-1]][1]
        probability = sum(probabilities[i] for i in members) / len(members)
        spans.append(TaggedSpan(label, text[start:end], start, end, probability))
    return spans


@torch.no_grad()
def answer_questions(pipeline: Pipeline, questions: Sequence[str], contexts: Sequence[str]) -> list[Answer]:
    """Return the most likely span of each context as the answer to its question.

    A context that is longer than the model's maximum is read in overlapping windows.

    Args:
        pipeline: An encoder with a head for question answering.
        questions: The questions.
        contexts: The context of each question.

    Raises:
        DataError: If the model has no such head, or a question leaves no tokens for its context.
    """
    model = _require_head(pipeline, "span")
    tokenizer = _tokenizer(pipeline)
    answers = []
    for question, context in zip(questions, contexts, strict=True):
        max_len = model.config.max_len
        stride = min(_STRIDE, max_len // 4)
        windows = tokenizer.encode_with_spans(question, context, longest=max_len, stride=stride)
        best = max((_best_span(model, window) for window in windows), key=lambda span: span[2])
        first, last, probability, window = best
        start, end = window.spans[first][0], window.spans[last][1]
        answers.append(Answer(context[start:end], start, end, probability))
    return answers


def _best_span(model: Encoder, window: TokenEncoding) -> tuple[int, int, float, TokenEncoding]:
    """Return the most likely first and last token of an answer, and its probability."""
    logits = model.classify_tokens(_run_encoder(model, window))[0].double().cpu()  # (T, 2)
    is_context = torch.tensor([sequence == 1 for sequence in window.sequences])
    if not is_context.any():
        raise DataError("the context is empty; give a text that contains the answer")
    first, last = logits.masked_fill(~is_context[:, None], -torch.inf).softmax(0).unbind(1)
    joint = (first[:, None] * last).triu().tril(_MAX_ANSWER_TOKENS - 1)
    index = int(joint.argmax())
    i, j = divmod(index, len(last))
    return i, j, float(joint.flatten()[index]), window


@torch.no_grad()
def choose(pipeline: Pipeline, prompt: str, choices: Sequence[str]) -> dict[str, float]:
    """Return the probability of each choice as the continuation of a prompt, most likely first.

    Args:
        pipeline: An encoder with a head for multiple choice.
        prompt: The text or question.
        choices: Its possible continuations or answers.

    Raises:
        DataError: If the model has no such head, or there are no choices.
    """
    model = _require_head(pipeline, "choice")
    if not choices:
        raise DataError("there are no choices; give at least one text")
    tokenizer = _tokenizer(pipeline)
    scores = []
    for text in choices:
        encoding = tokenizer.encode_with_spans(prompt, text, longest=model.config.max_len)[0]
        scores.append(model.classify(_run_encoder(model, encoding))[0, 0].float())
    probabilities = torch.stack(scores).softmax(0).tolist()
    order = sorted(range(len(choices)), key=lambda i: -probabilities[i])
    return {choices[i]: probabilities[i] for i in order}


def _run_encoder(model: Encoder, encoding: TokenEncoding) -> Tensor:
    """Return the output (1, T, M) of the encoder for one encoding."""
    device = next(model.parameters()).device
    segments = None
    if model.segments is not None and model.segments.num_embeddings > 1:
        segments = torch.tensor([encoding.segments], device=device)
    x: Tensor = model(torch.tensor([encoding.ids], device=device), segments=segments)
    return x


_HEAD_NAMES = {
    "masked_lm": "predict masked tokens",
    "token": "tag tokens",
    "span": "answer questions",
    "choice": "choose among texts",
}


def _require_head(pipeline: Pipeline, head: str) -> Encoder:
    """Return the encoder; raise `DataError` unless it has this head."""
    model = pipeline.model
    if isinstance(model, Encoder) and model.head is not None and model.config.head == head:
        return model
    kind, has = f"a {type(model).__name__}", "no head"
    if isinstance(model, Encoder):
        kind = f"an {type(model).__name__}"
        has = "no head" if model.head is None else f"a {model.config.head!r} head"
    raise DataError(f"{pipeline.name} cannot {_HEAD_NAMES[head]}: it is {kind} with {has}; expected head={head!r}")


def _tokenizer(pipeline: Pipeline) -> HFTokenizer:
    """Return the tokenizer of a third-party model."""
    if not isinstance(pipeline.tokenizer, HFTokenizer):
        raise DataError(f"{pipeline.name} has no third-party tokenizer, which this task needs")
    return pipeline.tokenizer


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield indices of texts of similar length, to reduce padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


@torch.no_grad()
def _encode_texts(
    pipeline: Pipeline,
    texts: Sequence[str],
    reduce: Callable[[Encoder, Tensor, Tensor], Tensor],
    batch_size: int,
    max_len: int | None = None,
) -> Tensor:
    """Return `reduce(model, x, lengths)` of the encoder's output x (B, T, M) per text, one row each."""
    model = pipeline.model
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise DataError(
            f"{pipeline.name} has the type {kind}; expected an Encoder, such as BERT, to embed or classify texts"
        )
    max_len = min(max_len or model.config.max_len, model.config.max_len)
    rows = [torch.tensor(pipeline.tokenizer.prompt(text, max_len), dtype=torch.int64) for text in texts]
    device = next(model.parameters()).device
    result = torch.empty(0, model.config.d_model)
    for indices in _batches([len(row) for row in rows], batch_size):
        lengths = torch.tensor([len(rows[i]) for i in indices])
        ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in indices], batch_first=True)
        vectors = reduce(model, model(ids.to(device), mask=padding(lengths)), lengths)
        if not len(result):
            result = vectors.new_empty(len(rows), vectors.shape[1])
        result[indices] = vectors
    return result


def nearest_pairs(vectors: Float[Tensor, "N M"], n: int) -> list[tuple[float, int, int]]:
    """Return the pairs of rows with the largest cosine.

    Args:
        vectors: One vector per row.
        n: Number of pairs.

    Returns:
        Cosine, first row and second row of each pair, best first.
    """
    unit = torch.nn.functional.normalize(vectors, dim=1)
    pairs: list[tuple[float, int, int]] = []
    for i in range(len(unit) - 1):
        best = (unit[i + 1 :] @ unit[i]).topk(min(n, len(unit) - 1 - i))
        pairs += [(value, i, i + 1 + j) for value, j in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        pairs = sorted(pairs, key=lambda pair: -pair[0])[:n]
    return pairs
