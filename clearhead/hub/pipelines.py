"""`Pipeline`: a model with its tokenizer and its settings, loaded by name.

A name is a bundled model, the folder of a training run or of a model, a Hugging Face folder, `hf:org/name` or a .gguf
file. A folder of clearhead contains parameters, configuration, tokenizer and training recipe. Bundled models also have
a card with data, license, metrics, command and training time. Loading never runs code from a folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast, overload

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float
from clearhead._core.validation import short_repr
from clearhead.config import Config
from clearhead.data.tasks.speech import TAIL_SECONDS
from clearhead.data.tokenizers.base import Tokenizer, load_tokenizer
from clearhead.errors import DataError
from clearhead.generation import Greedy, LogitsProcessors, Sample, Strategy
from clearhead.hub import checkpoint, convert, encoder_tasks, formats, speech, text_generation, tokenizer_files
from clearhead.hub.bundled import Card, is_clearhead_model, model_folder, read_card
from clearhead.hub.encoder_tasks import Answer, TaggedSpan, TokenCandidate
from clearhead.hub.generation_settings import GenerationSettings, read_generation_settings
from clearhead.hub.load_model import load_from_folder
from clearhead.hub.text_generation import Messages
from clearhead.hub.translate import DEFAULT_STRATEGY
from clearhead.hub.translate import summarize as summarize_texts
from clearhead.hub.translate import translate as translate_texts
from clearhead.models import CTCEncoder, Decoder, Encoder, EncoderDecoder, VisionTransformer
from clearhead.training.recipe import Recipe

_CONFIG_TASKS = "task_specific_params"  # settings of tasks in config.json, as T5 and BART have
# The task of models without a training recipe.
_TASKS: dict[type[nn.Module], str] = {Decoder: "text", Encoder: "vectors", EncoderDecoder: "translation"}
_TASKS |= {CTCEncoder: "speech", VisionTransformer: "pictures"}


@dataclass(frozen=True)
class Pipeline:
    """A trained model together with its tokenizer and settings.

    Methods that take several texts return a list; for a single text they return a single result.

    Attributes:
        name: Name that it was loaded by.
        folder: Folder or file of the model.
        model: The model, in evaluation mode.
        train_recipe: Recipe of the training run; None for third-party models.
        source: The third-party checkpoint; None for clearhead's own models.
        source_tokenizer: The tokenizer of the checkpoint, if it has one.
    """

    name: str
    folder: Path
    model: nn.Module
    train_recipe: Recipe | None = None
    source: formats.CheckpointReader | None = None
    source_tokenizer: Tokenizer | None = None

    @property
    def config(self) -> Config:
        """The configuration of the model."""
        config = self.model.config
        assert isinstance(config, Config)
        return config

    @property
    def recipe(self) -> Recipe:
        """The recipe that the model was trained with; raises `DataError` for third-party models."""
        if self.train_recipe is None:
            raise DataError(f"{self.name} was not trained by clearhead, so it has no training recipe")
        return self.train_recipe

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model; raises `DataError` if it has none."""
        if self.source is not None:
            return (
                tokenizer_files.load_tokenizer(self.source) if self.source_tokenizer is None else self.source_tokenizer
            )
        if not (self.folder / "tokenizer.json").is_file():
            raise DataError(f"{self.name} has no tokenizer: its task is {self.task}, not text")
        return load_tokenizer(self.folder)

    @property
    def task(self) -> str:
        """The task of the training recipe, or the usual one of this type of model."""
        if self.train_recipe is not None:
            return self.train_recipe.task
        takes_audio = getattr(self.model.config, "n_features", None) and isinstance(self.model, EncoderDecoder)
        return "transcription" if takes_audio else _TASKS.get(type(self.model), "other")

    @cached_property
    def generation_settings(self) -> GenerationSettings:
        """How the model generates by default; raises `StorageError` if a setting of the checkpoint is unknown."""
        if self.source is not None:
            return read_generation_settings(self.source)
        strategy = DEFAULT_STRATEGY if self.task == "translation" else Greedy()
        tokenizer = self.tokenizer
        return GenerationSettings(
            strategy=strategy, stop_ids=(tokenizer.eos_id,), decoder_start_ids=(tokenizer.bos_id,)
        )

    def task_settings(self, task: str) -> tuple[GenerationSettings, str]:
        """Return the generation settings for a task in `task_specific_params` of config.json, and its prefix."""
        settings = self.generation_settings
        tasks = None if self.source is None else self.source.config.get(_CONFIG_TASKS)
        options = tasks.get(task) if isinstance(tasks, Mapping) else None
        if not isinstance(options, Mapping):
            return settings, ""
        prefix = options.get("prefix", "")
        return settings.updated(options), prefix if isinstance(prefix, str) else ""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return self.generation_settings.stop_ids

    @property
    def decoder_start_ids(self) -> tuple[int, ...]:
        """The ids that an encoder-decoder generates after."""
        return self.generation_settings.decoder_start_ids

    @property
    def logits_processors(self) -> LogitsProcessors | None:
        """The logits processors of the model's generation settings, if any."""
        return self.generation_settings.logits_processors

    @cached_property
    def pooling(self) -> tokenizer_files.Pooling:
        """How a text is embedded."""
        if self.source is None or not self.source.path.is_dir():
            return tokenizer_files.Pooling()
        return tokenizer_files.pooling_mode(self.source)

    def generate_texts(
        self, texts: Sequence[str], *, strategy: Strategy | None, max_new_tokens: int | None
    ) -> list[str]:
        """Return the new text after each text, for `clearhead.generate(pipeline, texts)`."""
        return text_generation.generate(self, texts, strategy=strategy, max_new_tokens=max_new_tokens)

    @overload
    def generate(self, texts: str, *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def generate(
        self, texts: Sequence[str], *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...
    ) -> list[str]: ...
    @explain_keywords
    def generate(
        self, texts: str | Sequence[str], *, strategy: Strategy | None = None, max_new_tokens: int | None = None
    ) -> str | list[str]:
        """Generate text in one batch: a decoder continues each text, an encoder-decoder translates it.

        Args:
            texts: One text, or several.
            strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
            max_new_tokens: Largest number of new tokens per text; by default the model's own, or 128.

        Returns:
            The new text, without the prompt.
        """
        results = text_generation.generate(self, _as_list(texts), strategy=strategy, max_new_tokens=max_new_tokens)
        return results[0] if isinstance(texts, str) else results

    @explain_keywords
    def stream(
        self,
        text: str | Messages,
        *,
        strategy: Greedy | Sample | None = None,
        max_new_tokens: int | None = None,
    ) -> Iterator[str]:
        """Continue a text or a conversation, and yield the new text piece by piece.

        Args:
            text: A text, or the messages of a conversation.
            strategy: `Greedy()` or `Sample(…)`; by default the model's own, or greedy decoding if that is a beam
                search, whose ids may change until its end.
            max_new_tokens: Largest number of new tokens; by default the model's own, or 128.
        """
        return text_generation.stream(self, text, strategy=strategy, max_new_tokens=max_new_tokens)

    @overload
    def chat(self, messages: Messages, *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...) -> str: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...
    ) -> list[str]: ...
    @explain_keywords
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        strategy: Strategy | None = None,
        max_new_tokens: int | None = None,
    ) -> str | list[str]:
        """Generate the next message of a conversation, or of each of several.

        Args:
            messages: `[{"role": "user", "content": "…"}, …]`, or a list of conversations.
            strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
            max_new_tokens: Largest number of new tokens per message; by default the model's own, or 128.

        Raises:
            DataError: If the model has no chat template, or a message has no role or content.
        """
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if is_single else messages)
        replies = text_generation.chat(self, conversations, strategy=strategy, max_new_tokens=max_new_tokens)
        return replies[0] if is_single else replies

    @overload
    def translate(self, texts: str, *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def translate(
        self, texts: Sequence[str], *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...
    ) -> list[str]: ...
    @explain_keywords
    def translate(
        self, texts: str | Sequence[str], *, strategy: Strategy | None = None, max_new_tokens: int | None = None
    ) -> str | list[str]:
        """Translate texts with an encoder-decoder.

        Args:
            texts: One text, or several.
            strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
            max_new_tokens: Largest number of new tokens per text; by default the model's own, or twice the longest text
                of a batch, plus 8.
        """
        results = translate_texts(self, _as_list(texts), strategy=strategy, max_new_tokens=max_new_tokens)
        return results[0] if isinstance(texts, str) else results

    @overload
    def summarize(self, texts: str, *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def summarize(
        self, texts: Sequence[str], *, strategy: Strategy | None = ..., max_new_tokens: int | None = ...
    ) -> list[str]: ...
    @explain_keywords
    def summarize(
        self, texts: str | Sequence[str], *, strategy: Strategy | None = None, max_new_tokens: int | None = None
    ) -> str | list[str]:
        """Summarize texts with an encoder-decoder that was trained for it, such as BART, Pegasus or T5.

        Args:
            texts: One text, or several.
            strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own for summaries.
            max_new_tokens: Largest number of new tokens per text; by default the model's own.
        """
        results = summarize_texts(self, _as_list(texts), strategy=strategy, max_new_tokens=max_new_tokens)
        return results[0] if isinstance(texts, str) else results

    @explain_keywords
    def embed(self, texts: str | Sequence[str], *, batch_size: int = 64) -> Float[Tensor, "..."]:
        """Embed texts with an encoder, using the pooling of the model's folder (by default the mean over tokens).

        Args:
            texts: One text, or several.
            batch_size: Number of texts per forward pass.

        Returns:
            A vector (M,) for a single text, else (N, M).
        """
        vectors = encoder_tasks.embed(self, _as_list(texts), batch_size=batch_size)
        return vectors[0] if isinstance(texts, str) else vectors

    @overload
    def classify(self, inputs: str, *, batch_size: int = ...) -> dict[str, float]: ...  # type: ignore[overload-overlap]
    @overload
    def classify(self, inputs: Sequence[str] | Tensor, *, batch_size: int = ...) -> list[dict[str, float]]: ...
    @explain_keywords
    def classify(
        self, inputs: str | Sequence[str] | Tensor, *, batch_size: int = 64
    ) -> dict[str, float] | list[dict[str, float]]:
        """Return the probability of each class by its name, most likely first.

        Args:
            inputs: One text, several texts, or images (N, C, height, width).
            batch_size: Number of texts per forward pass.

        Returns:
            One dictionary for a single text, else a list. If a text may belong to several classes, their probabilities
            are independent and do not sum to 1.
        """
        if isinstance(inputs, Tensor):
            return encoder_tasks.classify_images(self, inputs)
        results = encoder_tasks.classify_texts(self, _as_list(inputs), batch_size=batch_size)
        return results[0] if isinstance(inputs, str) else results

    @overload
    def fill_mask(self, texts: str, *, n: int = ...) -> list[list[TokenCandidate]]: ...  # type: ignore[overload-overlap]
    @overload
    def fill_mask(self, texts: Sequence[str], *, n: int = ...) -> list[list[list[TokenCandidate]]]: ...
    @explain_keywords
    def fill_mask(
        self, texts: str | Sequence[str], *, n: int = 5
    ) -> list[list[TokenCandidate]] | list[list[list[TokenCandidate]]]:
        """Return the most likely tokens of each masked position, most likely first.

        Args:
            texts: One text, or several, that contain the mask token, such as `[MASK]` or `<mask>`.
            n: Number of tokens per position.

        Returns:
            For each text a list with the tokens of each masked position.

        Raises:
            DataError: If the model has no head for masked tokens, or a text has no mask token.
        """
        results = encoder_tasks.fill_masks(self, _as_list(texts), n=n)
        return results[0] if isinstance(texts, str) else results

    @overload
    def tag(self, texts: str) -> list[TaggedSpan]: ...  # type: ignore[overload-overlap]
    @overload
    def tag(self, texts: Sequence[str]) -> list[list[TaggedSpan]]: ...
    @explain_keywords
    def tag(self, texts: str | Sequence[str]) -> list[TaggedSpan] | list[list[TaggedSpan]]:
        """Return the labeled spans of texts, such as names of persons and places.

        Args:
            texts: One text, or several.

        Raises:
            DataError: If the model has no classifier of tokens, or a text is longer than its maximum.
        """
        results = encoder_tasks.tag_texts(self, _as_list(texts))
        return results[0] if isinstance(texts, str) else results

    @overload
    def answer(self, questions: str, contexts: str) -> Answer: ...  # type: ignore[overload-overlap]
    @overload
    def answer(self, questions: Sequence[str], contexts: Sequence[str]) -> list[Answer]: ...
    @explain_keywords
    def answer(self, questions: str | Sequence[str], contexts: str | Sequence[str]) -> Answer | list[Answer]:
        """Return the part of a context that answers a question.

        Args:
            questions: One question, or several.
            contexts: The context, or one per question.

        Raises:
            DataError: If the model has no head for question answering, or a context is missing.
        """
        if isinstance(questions, str) != isinstance(contexts, str) or len(_as_list(questions)) != len(
            _as_list(contexts)
        ):
            raise DataError("questions and contexts differ in number; expected one context per question")
        results = encoder_tasks.answer_questions(self, _as_list(questions), _as_list(contexts))
        return results[0] if isinstance(questions, str) else results

    @explain_keywords
    def choose(self, prompt: str, choices: Sequence[str]) -> dict[str, float]:
        """Return the probability of each choice as the continuation of a prompt, most likely first.

        Args:
            prompt: The text or question.
            choices: Its possible continuations or answers.

        Raises:
            DataError: If the model has no head for multiple choice, or there are no choices.
        """
        return encoder_tasks.choose(self, prompt, choices)

    @overload
    def transcribe(  # type: ignore[overload-overlap]
        self,
        recordings: str | Path | Tensor,
        *,
        timestamps: bool = ...,
        language: str | None = ...,
        strategy: Strategy | None = ...,
    ) -> speech.Transcript: ...
    @overload
    def transcribe(
        self,
        recordings: Sequence[str | Path | Tensor],
        *,
        timestamps: bool = ...,
        language: str | None = ...,
        strategy: Strategy | None = ...,
    ) -> list[speech.Transcript]: ...
    @explain_keywords
    def transcribe(
        self,
        recordings: str | Path | Tensor | Sequence[str | Path | Tensor],
        *,
        timestamps: bool = True,
        language: str | None = None,
        strategy: Strategy | None = None,
    ) -> speech.Transcript | list[speech.Transcript]:
        """Transcribe recordings with a model such as Whisper.

        Args:
            recordings: Files, or samples (N,) at 16 kHz; one, or several.
            timestamps: Generate timestamps. Without them windows are cut at fixed times, and each is one segment.
            language: Language code such as "en"; by default a multilingual model detects it.
            strategy: Decoding strategy; by default the model's own.

        Raises:
            DataError: If the model does not transcribe, or does not support the language.
        """
        is_single = isinstance(recordings, (str, Path, Tensor))
        batch = cast("Sequence[str | Path | Tensor]", [recordings] if is_single else recordings)
        results = speech.transcribe(self, batch, timestamps=timestamps, language=language, strategy=strategy)
        return results[0] if is_single else results

    @explain_keywords
    def listen(self, *, beam: int = 1) -> speech.StreamingRecognizer:
        """Return a recognizer for an audio stream.

        After the end, it adds as much silence as the recordings of training and evaluation end with.

        Args:
            beam: Width of the beam search; 1 for greedy decoding.
        """
        self.require("speech")
        assert isinstance(self.model, CTCEncoder)
        return speech.StreamingRecognizer(self.model, beam=beam, tail_seconds=TAIL_SECONDS)

    @property
    def card(self) -> Card:
        """The card of a bundled model; empty for other models."""
        return read_card(self.folder)

    def require(self, *tasks: str) -> None:
        """Raise `DataError` unless the model's task is one of these."""
        if self.task not in tasks:
            raise DataError(f"{self.name} was trained for {self.task}, and this needs a model for {' or '.join(tasks)}")


def _as_list(texts: str | Sequence[str]) -> list[str]:
    """Return one text, or several, as a list; raise `DataError` for anything else."""
    is_single = isinstance(texts, (str, bytes, Mapping)) or not isinstance(texts, Iterable)
    items = [texts] if is_single else list(texts)
    for item in items:
        if not isinstance(item, str):
            raise DataError(f"got {short_repr(item)}; expected a text or a list of texts")
    return items


@explain_keywords
def pipeline(
    name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32
) -> Pipeline:
    """Load a model with its tokenizer.

    Args:
        name: A bundled model (`"en-es"`), the folder of a run (if it is not finished, its newest checkpoint is used) or
            of a model, a Hugging Face folder, a name on the Hugging Face hub (`"org/name"` or
            `"hf:org/name@revision"`) or a .gguf file.
        device: Device of the parameters.
        dtype: Dtype of the parameters; None for the stored one.

    Returns:
        The pipeline, with methods such as `generate`, `translate`, `embed` and `transcribe`.

    Raises:
        StorageError: If the model does not exist or it cannot be read.

    Example:
        pipeline("en-es").translate("Hello world")
    """
    if not is_clearhead_model(name) and checkpoint.is_third_party(name):
        source = checkpoint.open_checkpoint(name)
        tokenizer = None
        with contextlib.suppress(DataError):  # a missing tokenizer is reported when it is used
            # Before the parameters: a tokenizer that does not match them is rejected early.
            tokenizer = tokenizer_files.load_tokenizer(source)
        model = convert.load_from_reader(source, device=device, dtype=dtype)
        return Pipeline(str(name), source.path, model, source=source, source_tokenizer=tokenizer)
    folder = model_folder(name)
    model = load_from_folder(name, device, dtype)
    return Pipeline(str(name), folder, model.eval(), Recipe.load(folder))
