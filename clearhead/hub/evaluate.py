"""How good a trained model is, on data that it has not seen: the numbers on its card.

Every task has a loss, a perplexity and an accuracy, over the labels one by one. TranslationTask adds BLEU and chrF by
sacrebleu, with the signature that says how they were computed; sort-dedup adds exact matches of whole outputs. Speech
has single recordings, of which all digits must be right, or streams with an error rate and latencies instead: how long
after its end each digit is written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.data.batch import Batch, Split
from clearhead.data.tasks.sort_dedup import SortDedup
from clearhead.data.tasks.speech import Speech
from clearhead.data.tasks.speech_ctc import compared, written
from clearhead.data.tasks.translation import PairSplit, TranslationTask, read_pairs
from clearhead.errors import ConfigError, DataError, optional_dependency
from clearhead.generation import Strategy, generate
from clearhead.hub.pipeline import Pipeline
from clearhead.hub.text_generation import GREEDY
from clearhead.hub.translate import translate
from clearhead.models import CTCEncoder
from clearhead.training.objective import scores
from clearhead.training.tasks import DataConfig, SpeechData, TranslationData


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured. Fields that a task has no use for are None."""

    model: str
    task: str
    decoding: str
    examples: int
    n_tokens: int
    loss: float  # nats a label
    perplexity: float
    accuracy: float  # of labels; for speech of recordings or streams without a mistake
    bleu: float | None = None
    chrf: float | None = None
    signature: str | None = None  # sacrebleu's, for both
    exact_match: float | None = None  # of whole outputs
    digit_error_rate: float | None = None  # of streams: digits to be changed, added or left out, for each that is there
    latency_median: float | None = None  # seconds from the end of a digit until it is written down
    latency_95: float | None = None  # that 95 % of the digits do not exceed

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead evaluate --json` prints it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def evaluate(
    trained: Pipeline,
    data: str | Path | None = None,
    *,
    strategy: Strategy = GREEDY,
    limit: int | None = None,
    streams: bool = False,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Measure a model on its task's validation part, or for translation on a whole file of pairs.

    `data` is where the data are (a task that makes its own needs none). `limit` takes only the first examples. For
    speech those are single recordings or, if asked for, `streams` that are put together from them."""
    if streams:
        trained.require("speech")
    split, task = _validation(trained, data)
    if isinstance(task, Speech) and not streams:
        split = task.singles
    n = len(split) if limit is None else min(limit, len(split))
    if n < 1:
        raise ConfigError(f"limit is {limit}; at least 1 example is needed")
    numbers = _label_by_label(trained, split, n)
    extra: dict[str, Any] = {}
    if isinstance(split, PairSplit):
        made = translate(trained, split.sources[:n], strategy=strategy, on_done=lambda done: on_done(done, n))
        extra = _bleu(made, split.targets[:n])
    elif isinstance(task, Speech):
        heard = hear(trained.model, split, n)
        extra = {"decoding": "greedy CTC", "accuracy": heard.accuracy}
        if streams:
            waits = {"latency_median": heard.latency(0.5), "latency_95": heard.latency(0.95)}
            extra |= {"digit_error_rate": heard.error_rate, **waits}
    elif isinstance(task, SortDedup):
        extra = {"exact_match": _exact(trained, split, n, strategy)}
    return Evaluation(
        model=trained.name, task=trained.task, examples=n, **({"decoding": str(strategy)} | numbers | extra)
    )


def _validation(trained: Pipeline, data: str | Path | None) -> tuple[Split[Batch], Any]:
    recipe = trained.recipe
    if isinstance(recipe.data, TranslationData) and data is not None and Path(data).is_file():
        pairs = read_pairs(data, swap=recipe.data.swap)
        split = PairSplit(pairs, trained.tokenizer, max_tokens=recipe.data.max_tokens)
        return split, TranslationTask(split, split, trained.tokenizer)
    has_text = (trained.folder / "tokenizer.json").is_file()
    settings: DataConfig = recipe.data.at(data)
    if isinstance(settings, SpeechData):
        settings = settings.replace(only_heard=True)
    task = settings.load(seed=recipe.train.seed, tokenizer=trained.tokenizer if has_text else None)
    size, wanted = getattr(task, "image_size", None), getattr(trained.model.config, "image_size", None)
    if data is None and size is not None and wanted is not None and size != wanted:
        here, there = ("×".join(map(str, side)) for side in (size, wanted))
        raise DataError(
            f"{trained.name} reads pictures of {there} and those without --data (in Python, data=) are {here}: "
            "give the data that it was made for"
        )
    return task.validation, task


@torch.no_grad()
def _label_by_label(trained: Pipeline, split: Split[Batch], n: int) -> dict[str, Any]:
    device = next(trained.model.parameters()).device
    sums, labels = torch.zeros(2, dtype=torch.float64), 0
    # Rows of like length together: the sums do not depend on it, the padding does.
    for rows in split.lengths()[:n].sum(1).argsort().split(256):
        batch = split.batch(rows).to(device)
        sums += scores(trained.model, batch).cpu()
        labels += batch.n_labels
    loss, accuracy = (sums / labels).tolist()
    return {"n_tokens": labels, "loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}


def _bleu(made: list[str], wanted: list[str]) -> dict[str, Any]:
    with optional_dependency("BLEU and chrF need sacrebleu: pip install sacrebleu"):
        from sacrebleu.metrics import BLEU, CHRF
    bleu, chrf = BLEU(), CHRF()
    numbers = {name: one.corpus_score(made, [wanted]).score for name, one in (("bleu", bleu), ("chrf", chrf))}
    return {**numbers, "signature": f"BLEU {bleu.get_signature()}; chrF {chrf.get_signature()}"}


def _exact(trained: Pipeline, split: Split[Batch], n: int, strategy: Strategy) -> float:
    """How many whole outputs are right: the prompt ends with <START>, the answer with <STOP>."""
    tokenizer = trained.tokenizer
    device = next(trained.model.parameters()).device
    right = 0
    for rows in torch.arange(n).split(512):
        batch = split.batch(rows)
        prompts, answers = [], []
        for ids, labels, weights in zip(batch.ids, batch.labels, batch.weights, strict=True):  # type: ignore[attr-defined]
            first = int(weights.argmax())  # the first label that counts stands beside <START>
            prompts.append(ids[: first + 1].to(device))
            answers.append(labels[weights > 0].tolist())
        longest = max(len(answer) for answer in answers)
        made = generate(
            trained.model, prompts, strategy=strategy, max_new_tokens=longest + 1, stop_ids=tokenizer.eos_id
        )
        right += sum(made.sequence(i, with_stop=True).tolist() == answer for i, answer in enumerate(answers))
    return right / n


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What was written down of some recordings. Latencies are of the digits that are right, in seconds."""

    exact: int  # recordings of which every digit is right, and none is too many
    mistakes: int  # digits to be changed, added or left out
    digits: int
    recordings: int
    latencies: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        return self.exact / self.recordings

    @property
    def error_rate(self) -> float:
        return self.mistakes / self.digits

    def latency(self, share: float) -> float | None:
        """The latency that this share of the digits does not exceed."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@torch.no_grad()
def hear(model: nn.Module, split: Split[Any], n: int | None = None, rows: int = 64) -> Heard:
    """Listens to the first `n` recordings of a part (None: all). A digit is written down when the likeliest class
    becomes it, and known when all that its moment sees has been heard."""
    assert isinstance(model, CTCEncoder)
    try:
        step = model.streaming.chunk
    except ConfigError:
        step = 0  # everything is known at the end, and nothing before
    exact = mistakes = digits = 0
    latencies = []
    device = next(model.parameters()).device
    order = split.lengths()[: len(split) if n is None else n].sum(1).argsort(stable=True)
    for some in order.split(rows):
        batch = split.batch(some).to(device)
        logits = batch.logits(model)
        stacked, mel = model.config.frame_stacking, batch.mel
        answers = written(logits, batch.n_moments(logits))
        for answer, labels, spans, count, last in zip(
            answers, batch.labels.tolist(), batch.spans.tolist(), batch.counts, batch.n_moments(logits), strict=True
        ):
            errors, pairs = compared([symbol for symbol, _ in answer], labels[:count])
            exact, mistakes, digits = exact + (errors == 0), mistakes + errors, digits + count
            for i, j in pairs:
                moment = answer[i][1]
                known = min(last, (moment // step + 1) * step if step else last)  # moments that have to be there
                latencies.append(mel.end(known * stacked - 1) / mel.sample_rate - spans[j][1])
    return Heard(exact=exact, mistakes=mistakes, digits=digits, recordings=len(order), latencies=tuple(latencies))
