"""Evaluate trained models on validation data: the metrics on their cards.

Every task has a loss, a perplexity and an accuracy over its labels. Translation adds BLEU and chrF (sacrebleu), and
sort-dedup the share of exactly matching outputs. Speech is scored on single recordings, where all digits must be right,
or on streams, with a digit error rate and latencies (from the end of a digit until it is recognized).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from clearhead.data.batch import Batch, Split
from clearhead.data.tasks.sort_dedup import SortDedup
from clearhead.data.tasks.speech import SpeechRecognition
from clearhead.data.tasks.speech_ctc import align, greedy_decode
from clearhead.data.tasks.translation import PairSplit, TranslationTask, read_pairs
from clearhead.errors import ConfigError, DataError, optional_dependency
from clearhead.generation import Greedy, Strategy, generate
from clearhead.hub.pipelines import Pipeline
from clearhead.hub.translate import translate
from clearhead.models import CTCEncoder
from clearhead.training.objective import scores
from clearhead.training.recipe import FILE_NAME as RECIPE_FILE
from clearhead.training.recipe import Recipe
from clearhead.training.tasks import DataConfig, SpeechData, TranslationData
from clearhead.training.trainer import MODEL as RESULT_FOLDER

Metrics: TypeAlias = dict[str, Any]  # fields of an Evaluation
_GREEDY = Greedy()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of a model; those of other tasks are None.

    Attributes:
        model: Name of the model.
        task: Its task.
        decoding: Decoding strategy.
        examples: Number of examples.
        n_tokens: Number of labels.
        loss: Cross-entropy in nats per label.
        perplexity: exp(loss).
        accuracy: Share of correct labels; for speech, of recordings or streams without an error.
        bleu: BLEU of translations.
        chrf: chrF of translations.
        signature: sacrebleu's signatures of both.
        exact_match: Share of outputs that match exactly.
        digit_error_rate: Substituted, inserted and deleted digits per digit of a stream.
        latency_median: Median seconds from the end of a digit until it is recognized.
        latency_95: 95th percentile of the same.
    """

    model: str
    task: str
    decoding: str
    examples: int
    n_tokens: int
    loss: float
    perplexity: float
    accuracy: float
    bleu: float | None = None
    chrf: float | None = None
    signature: str | None = None
    exact_match: float | None = None
    digit_error_rate: float | None = None
    latency_median: float | None = None
    latency_95: float | None = None

    def to_dict(self) -> Metrics:
        """Return the metrics that are not None, as `clearhead evaluate --json` prints them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def evaluate(
    pipeline: Pipeline,
    data: str | Path | None = None,
    *,
    strategy: Strategy = _GREEDY,
    limit: int | None = None,
    streams: bool = False,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate a model on the validation split of its task.

    Args:
        pipeline: A model trained by clearhead.
        data: Folder of the data, or a file of sentence pairs to evaluate a translator on; by default the data of the
            run. Tasks with generated data need none.
        strategy: Decoding strategy of translation and sort-dedup.
        limit: Largest number of examples.
        streams: Evaluate a speech model on streams composed of recordings, instead of single recordings.
        on_done: Called with the number of translated sentences and their total.

    Returns:
        The metrics.

    Raises:
        ConfigError: If `limit` is below 1.
        DataError: If the data is missing or does not fit the model.
    """
    if streams:
        pipeline.require("speech")
    split, task = _validation_split(pipeline, data)
    if isinstance(task, SpeechRecognition) and not streams:
        split = task.singles
    n = len(split) if limit is None else min(limit, len(split))
    if n < 1:
        raise ConfigError(f"limit is {limit}; expected at least 1 example")
    metrics = _label_metrics(pipeline, split, n)
    extra: Metrics = {}
    if isinstance(split, PairSplit):
        outputs = translate(pipeline, split.sources[:n], strategy=strategy, on_done=lambda done: on_done(done, n))
        extra = _bleu(outputs, split.targets[:n])
    elif isinstance(task, SpeechRecognition):
        recording_scores = score_recordings(pipeline.model, split, n)
        extra = {"decoding": "greedy CTC", "accuracy": recording_scores.accuracy}
        if streams:
            extra["digit_error_rate"] = recording_scores.error_rate
            extra["latency_median"] = recording_scores.latency_quantile(0.5)
            extra["latency_95"] = recording_scores.latency_quantile(0.95)
    elif isinstance(task, SortDedup):
        extra = {"exact_match": _exact_match(pipeline, split, n, strategy)}
    fields: Metrics = {"decoding": str(strategy), **metrics, **extra}
    return Evaluation(model=pipeline.name, task=pipeline.task, examples=n, **fields)


def _validation_split(pipeline: Pipeline, data: str | Path | None) -> tuple[Split[Batch], Any]:
    """Return the validation split and its task."""
    recipe = pipeline.recipe
    if isinstance(recipe.data, TranslationData) and data is not None and Path(data).is_file():
        pairs = read_pairs(data, swap=recipe.data.swap)
        split = PairSplit(pairs, pipeline.tokenizer, max_tokens=recipe.data.max_tokens)
        return split, TranslationTask(split, split, pipeline.tokenizer)
    has_text = (pipeline.folder / "tokenizer.json").is_file()
    settings: DataConfig = recipe.data.with_path(data) if data is not None else _data_of_run(pipeline)
    if isinstance(settings, SpeechData):
        settings = settings.replace(evaluation_only=True)
    task = settings.load(seed=recipe.train.seed, tokenizer=pipeline.tokenizer if has_text else None)
    data_size = getattr(task, "image_size", None)
    model_size = getattr(pipeline.model.config, "image_size", None)
    if data is None and data_size is not None and model_size is not None and data_size != model_size:
        data_text, model_text = ("×".join(map(str, size)) for size in (data_size, model_size))
        raise DataError(
            f"{pipeline.name} takes images of {model_text}, but the default data has {data_text}; give the data that "
            "it was trained on with --data (in Python, data=)"
        )
    return task.validation, task


def _data_of_run(pipeline: Pipeline) -> DataConfig:
    """Return the data settings of the run that contains the model's folder, with their paths, or of its own recipe."""
    run = pipeline.folder.parent
    is_result = pipeline.folder.name == RESULT_FOLDER and (run / RECIPE_FILE).is_file()
    return Recipe.load(run).data if is_result else pipeline.recipe.data


@torch.no_grad()
def _label_metrics(pipeline: Pipeline, split: Split[Batch], n: int) -> Metrics:
    """Return the number of labels, loss, perplexity and accuracy of the first `n` examples."""
    device = next(pipeline.model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64)
    n_labels = 0
    # Rows of similar length share a batch, to reduce padding; the sums do not depend on it.
    for rows in split.lengths()[:n].sum(1).argsort().split(256):
        batch = split.batch(rows).to(device)
        sums += scores(pipeline.model, batch).cpu()
        n_labels += batch.n_labels
    loss, accuracy = (sums / n_labels).tolist()
    return {"n_tokens": n_labels, "loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}


def _bleu(outputs: list[str], references: list[str]) -> Metrics:
    """Return BLEU, chrF and their signature."""
    with optional_dependency("BLEU and chrF need sacrebleu: pip install 'clearhead[eval]'"):
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    bleu, chrf = BLEU(), CHRF()
    return {
        "bleu": bleu.corpus_score(outputs, [references]).score,
        "chrf": chrf.corpus_score(outputs, [references]).score,
        "signature": f"BLEU {bleu.get_signature()}; chrF {chrf.get_signature()}",
    }


def _exact_match(pipeline: Pipeline, split: Split[Batch], n: int, strategy: Strategy) -> float:
    """Return the share of outputs that match exactly. A prompt ends with <START>, an output with <STOP>."""
    tokenizer = pipeline.tokenizer
    device = next(pipeline.model.parameters()).device
    n_correct = 0
    for rows in torch.arange(n).split(512):
        batch = split.batch(rows)
        prompts, targets = [], []
        for ids, labels, weights in zip(batch.ids, batch.labels, batch.weights, strict=True):  # type: ignore[attr-defined]
            start = int(weights.argmax())  # the first weighted label is predicted from <START>
            prompts.append(ids[: start + 1].to(device))
            targets.append(labels[weights > 0].tolist())
        longest = max(len(target) for target in targets)
        generated = generate(
            pipeline.model, prompts, strategy=strategy, max_new_tokens=longest + 1, stop_ids=tokenizer.eos_id
        )
        n_correct += sum(generated.sequence(i, with_stop=True).tolist() == target for i, target in enumerate(targets))
    return n_correct / n


@dataclass(frozen=True, kw_only=True)
class RecordingScores:
    """Recognition errors and latencies over some recordings.

    Attributes:
        n_exact: Recordings without an error.
        n_errors: Substituted, inserted and deleted digits.
        n_digits: Spoken digits.
        n_recordings: Recordings.
        latencies: Latency in seconds of each correct digit.
    """

    n_exact: int
    n_errors: int
    n_digits: int
    n_recordings: int
    latencies: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """Share of recordings without an error."""
        return self.n_exact / self.n_recordings

    @property
    def error_rate(self) -> float:
        """Errors per spoken digit."""
        return self.n_errors / self.n_digits

    def latency_quantile(self, q: float) -> float | None:
        """Return the latency that a share `q` of the correct digits does not exceed; None if no digit is correct."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


@torch.no_grad()
def score_recordings(
    model: nn.Module, split: Split[Any], n: int | None = None, batch_size: int = 64
) -> RecordingScores:
    """Recognize the first `n` recordings of a split (None: all) by greedy CTC, and count errors and latencies.

    A digit is recognized in the first frame of its run, and known once the context of that frame has been received.
    """
    assert isinstance(model, CTCEncoder)
    try:
        chunk = model.streaming.chunk
    except ConfigError:
        chunk = 0  # nothing is known before the end
    n_exact = n_errors = n_digits = 0
    latencies = []
    device = next(model.parameters()).device
    order = split.lengths()[: len(split) if n is None else n].sum(1).argsort(stable=True)
    for rows in order.split(batch_size):
        batch = split.batch(rows).to(device)
        logits = batch.logits(model)
        stacking = model.config.frame_stacking
        mel = batch.mel
        lengths = batch.output_lengths(logits)
        recognized = greedy_decode(logits, lengths)
        for symbols, labels, spans, n_labels, n_frames in zip(
            recognized,
            batch.labels.tolist(),
            batch.spans.tolist(),
            batch.counts,
            batch.output_lengths(logits),
            strict=True,
        ):
            errors, pairs = align([symbol for symbol, _ in symbols], labels[:n_labels])
            n_exact += errors == 0
            n_errors += errors
            n_digits += n_labels
            for i, j in pairs:
                frame = symbols[i][1]
                n_needed = min(n_frames, (frame // chunk + 1) * chunk if chunk else n_frames)
                latencies.append(mel.end(n_needed * stacking - 1) / mel.sample_rate - spans[j][1])
    return RecordingScores(
        n_exact=n_exact, n_errors=n_errors, n_digits=n_digits, n_recordings=len(order), latencies=tuple(latencies)
    )
