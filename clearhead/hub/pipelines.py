"""`Pipeline`: a model with its tokenizer and its settings, loaded by name.

A name is a bundled model, the folder of a training run or of a model, a Hugging Face folder, `hf:org/name` or a .gguf
file. A folder of clearhead contains parameters, configuration, tokenizer and training recipe. Bundled models also have
a card with data, license, metrics, command and training time. Loading never runs code from a folder. `export` writes
any model as a Hugging Face folder with its tokenizer and generation settings.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.data.tasks.speech import TAIL_SECONDS
from clearhead.data.tokenizers.base import (
    BOS,
    EOS,
    PAD,
    UNK,
    CharTokenizer,
    Tokenizer,
    WordLevelTokenizer,
    load_tokenizer,
)
from clearhead.data.tokenizers.library import ByteLevelBPE, HFTokenizer
from clearhead.errors import DataError
from clearhead.generation import LogitsProcessors
from clearhead.hub import checkpoint, convert, formats, speech, text_generation, tokenizer_files
from clearhead.hub.bundled import is_clearhead_model, model_folder, read_card, unfinished_run
from clearhead.hub.translate import translate as translate_texts
from clearhead.models import CTCEncoder, Decoder, Encoder, EncoderDecoder, VisionTransformer, storage
from clearhead.training.recipe import Recipe, load_newest_checkpoint

# The task of models without a training recipe.
_TASKS: dict[type[nn.Module], str] = {Decoder: "text", Encoder: "vectors", EncoderDecoder: "translation"}
_TASKS |= {CTCEncoder: "speech", VisionTransformer: "pictures"}


@dataclass(frozen=True)
class Pipeline:
    """A trained model together with its tokenizer and settings.

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

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return (self.tokenizer.eos_id,) if self.source is None else tokenizer_files.eos_ids(self.source)

    @property
    def decoder_start_ids(self) -> tuple[int, ...]:
        """The ids that an encoder-decoder generates after."""
        return (self.tokenizer.bos_id,) if self.source is None else tokenizer_files.decoder_start_ids(self.source)

    @cached_property
    def logits_processors(self) -> LogitsProcessors | None:
        """The logits processors of the model's generation settings, if any."""
        return None if self.source is None else tokenizer_files.generation_constraints(self.source)

    @cached_property
    def pooling(self) -> dict[str, Any]:
        """How a text is embedded: `first` token or the mean, `unit` norm, and `max_len` tokens."""
        if self.source is None or not self.source.path.is_dir():
            return {"first": False, "unit": False, "max_len": None}
        return tokenizer_files.pooling_mode(self.source)

    generate = text_generation.generate
    chat = text_generation.chat
    stream = text_generation.stream
    translate = translate_texts
    transcribe = speech.transcribe
    embed = text_generation.embed
    classify = text_generation.classify

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
    def card(self) -> dict[str, Any]:
        """The card of a bundled model; empty for other models."""
        return read_card(self.folder)

    def require(self, *tasks: str) -> None:
        """Raise `DataError` unless the model's task is one of these."""
        if self.task not in tasks:
            raise DataError(f"{self.name} was trained for {self.task}, and this needs a model for {' or '.join(tasks)}")


def pipeline(
    name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32
) -> Pipeline:
    """Load a model with its tokenizer.

    Args:
        name: A bundled model (`"en-es"`), the folder of a run (if it is not finished, its newest checkpoint is used) or
            of a model, a Hugging Face folder, `"hf:org/name"` or a .gguf file.
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
    model = _load_from_folder(name, device, dtype)
    return Pipeline(str(name), folder, model.eval(), Recipe.load(folder))


def _load_from_folder(name: str | Path, device: str | torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Load a clearhead model; of an unfinished run its newest checkpoint, with a warning."""
    run = unfinished_run(name)
    if run is None:
        return storage.load_checkpoint(model_folder(name), device=device, dtype=dtype)
    model, step = load_newest_checkpoint(run)
    message = f"{run} is not finished; its checkpoint of step {step:,} is used"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    return model.to(device=device, dtype=dtype)


def load(name: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """Load a model without its tokenizer, in evaluation mode.

    Args:
        name: A bundled model (`"en-es"`), the folder of a run (if it is not finished, its newest checkpoint is used) or
            of a model, a Hugging Face folder, `"hf:org/name"` or a .gguf file.
        device: Device of the parameters.
        dtype: Dtype of the parameters; by default the stored one.

    Returns:
        The model. Its type depends on the name, so it is annotated as Any.

    Raises:
        StorageError: If the model does not exist or it cannot be read.
    """
    if not is_clearhead_model(name) and checkpoint.is_third_party(name):
        return convert.load_from_reader(checkpoint.open_checkpoint(name), device=device, dtype=dtype)
    return _load_from_folder(name, device, dtype)


def export(pipeline: Pipeline, folder: str | Path, *, family: str | None = None) -> str:
    """Export a model with its tokenizer to a new folder that transformers loads.

    Args:
        pipeline: The model.
        folder: A folder that does not exist or is empty.
        family: Name of the family; by default the one that the model was loaded as, or else the first that can express
            it.

    Returns:
        The name of the family.

    Raises:
        StorageError: If the folder is not empty, or no family can express the model.
    """
    files = _text_files(pipeline)
    source_keys = {} if pipeline.source is None else dict(pipeline.source.config)
    source_keys |= json.loads(files.get("generation_config.json", "{}"))
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
    keys: dict[str, Any] = {name: source_keys[name] for name in names if name in source_keys}
    preferred = None if pipeline.source is None else convert.detect_family(pipeline.source).name
    return convert.export_third_party(
        pipeline.model, folder, family=family, preferred=preferred, keys=keys, files=files
    ).name


def _text_files(pipeline: Pipeline) -> dict[str, str]:
    """Return tokenizer and settings files by name: those of a third-party folder unchanged, else converted."""
    if pipeline.source is not None and pipeline.source.path.is_dir():
        return tokenizer_files.tokenizer_files(pipeline.source)
    try:
        tokenizer = pipeline.tokenizer
    except DataError:
        return {}  # not a model of text
    roles = {"pad_token": tokenizer.pad_id, "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = dict(zip(roles, tokenizer.tokens(list(roles.values())), strict=True))
    max_len = getattr(pipeline.model.config, "max_len", None)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len, **names}
    generation_config = {f"{role}_id": id_ for role, id_ in roles.items()}
    return {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation_config, indent=2) + "\n",
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return a tokenizer as JSON of the `tokenizers` library, with the same ids and the same decoded text."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    if isinstance(tokenizer, ByteLevelBPE | HFTokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        unknown = [UNK] if tokenizer.unknown else []
        special = [PAD, BOS, EOS, *unknown]
        vocabulary = {token: id_ for id_, token in enumerate([*special, *tokenizer.alphabet])}
        inner: Any = Inner(models.WordLevel(vocabulary, *unknown))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
    elif isinstance(tokenizer, WordLevelTokenizer):
        special = list(tokenizer.special)
        inner = Inner(models.WordLevel({symbol: id_ for id_, symbol in enumerate(tokenizer.symbols)}))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        raise DataError(
            f"a {type(tokenizer).__name__} tokenizer cannot be exported; expected characters, symbols, byte-level BPE "
            "or a Hugging Face tokenizer"
        )
    inner.add_special_tokens(special)
    return inner.to_str()
