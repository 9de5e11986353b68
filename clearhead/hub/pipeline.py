"""Where models are found, by the names that every command takes: one in the box, the folder of a run or of a model, a
Hugging Face folder, `hf:org/name`, or a .gguf file.

A folder of ours holds weights and configuration, the tokenizer, the recipe of training, and for those in the box a
card: data and licence, metrics, the command, the time. All of it is data, as a foreign folder is; loading runs no code.
`export` writes a Hugging Face folder of any model, with its tokenizer and the settings of generation beside it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.data.tasks.speech import TAIL
from clearhead.data.tokenizers.base import BOS, EOS, PAD, UNK, CharTokenizer, Symbols, Tokenizer, load_tokenizer
from clearhead.data.tokenizers.library import ByteLevelBPE, HFTokenizer
from clearhead.errors import DataError
from clearhead.generation import LogitsProcessors
from clearhead.hub import checkpoint, convert, formats, speech, text_generation, tokenizer_files
from clearhead.hub.bundled import find, is_ours, read_card
from clearhead.hub.translate import translate as texts_translated
from clearhead.models import CTCEncoder, Decoder, Encoder, EncoderDecoder, VisionTransformer, storage
from clearhead.training.recipe import Recipe

# What a model can do that comes without a recipe.
_TASKS: dict[type[nn.Module], str] = {Decoder: "text", Encoder: "vectors", EncoderDecoder: "translation"}
_TASKS |= {CTCEncoder: "speech", VisionTransformer: "pictures"}


@dataclass(frozen=True)
class Pipeline:
    """A trained model and what belongs to it: `own` if it was trained here, `source` if it came from elsewhere."""

    name: str
    folder: Path
    model: nn.Module
    own: Recipe | None = None
    source: formats.CheckpointReader | None = None
    pieces: Tokenizer | None = None  # the tokenizer that came with the source

    @property
    def recipe(self) -> Recipe:
        """How it was trained; a `DataError` for a model from elsewhere."""
        if self.own is None:
            raise DataError(f"{self.name} was not trained by this project, so there is no recipe of its data")
        return self.own

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was trained with; a `DataError` for models of pictures."""
        if self.source is not None:
            return tokenizer_files.load_tokenizer(self.source) if self.pieces is None else self.pieces
        if not (self.folder / "tokenizer.json").is_file():
            raise DataError(f"{self.name} has no tokenizer: it reads no text (its task is {self.task})")
        return load_tokenizer(self.folder)

    @property
    def task(self) -> str:
        """What it was trained for, or what a model of its kind can do."""
        if self.own is not None:
            return self.own.task
        hears = getattr(self.model.config, "n_features", None) and isinstance(self.model, EncoderDecoder)
        return "transcription" if hears else _TASKS.get(type(self.model), "other")

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return (self.tokenizer.eos_id,) if self.source is None else tokenizer_files.eos_ids(self.source)

    @property
    def start(self) -> tuple[int, ...]:
        """The ids that a model which reads one text and writes another writes after."""
        return (self.tokenizer.bos_id,) if self.source is None else tokenizer_files.decoder_start_ids(self.source)

    @cached_property
    def logits_processors(self) -> LogitsProcessors | None:
        """What its maker forces and forbids in generation; None where that is nothing."""
        return None if self.source is None else tokenizer_files.generation_constraints(self.source)

    @cached_property
    def pooling(self) -> dict[str, Any]:
        """How one vector is made of a text: `first` token or the mean, `unit` length, `max_len` tokens at most."""
        plain = {"first": False, "unit": False, "max_len": None}
        return (
            plain if self.source is None or not self.source.path.is_dir() else tokenizer_files.pooling_mode(self.source)
        )

    generate, chat, stream = text_generation.generate, text_generation.chat, text_generation.stream
    translate, transcribe = texts_translated, speech.transcribe
    embed, classify = text_generation.embed, text_generation.classify

    def listen(self, *, beam: int = 1) -> speech.StreamingRecognizer:
        """What hears with a model of speech: feed it samples as they come. After the end there is as much silence as
        after the sounds that it was trained and measured with."""
        self.require("speech")
        assert isinstance(self.model, CTCEncoder)
        return speech.StreamingRecognizer(self.model, beam=beam, tail_seconds=TAIL)

    @property
    def card(self) -> dict[str, Any]:
        """What is written about it; empty for a model that is not in the box."""
        return read_card(self.folder)

    def require(self, *tasks: str) -> None:
        """Raise unless the model was trained for one of these tasks."""
        if self.task not in tasks:
            raise DataError(f"{self.name} was trained for {self.task}, and this needs a model for {' or '.join(tasks)}")


def pipeline(
    name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32
) -> Pipeline:
    """A model with its tokenizer, ready to be used, by any name that stands for one."""
    if not is_ours(name) and checkpoint.is_third_party(name):
        source, pieces = checkpoint.open_checkpoint(name), None
        with contextlib.suppress(DataError):  # none came with it, which is said when one is asked for
            pieces = tokenizer_files.load_tokenizer(
                source
            )  # before the weights: one that does not fit them is refused here
        model = convert.load_from_reader(source, device=device, dtype=dtype)
        return Pipeline(str(name), source.path, model, source=source, pieces=pieces)
    folder = find(name)
    model = storage.load_checkpoint(folder, device=device, dtype=dtype)
    return Pipeline(str(name), folder, model.eval(), Recipe.of(folder))


def load(name: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The model alone, for evaluation, by any name that stands for one: in the box (`"en-es"`), the folder of a run or
    of a model, a Hugging Face folder, `"hf:org/name"`, a .gguf file.

    Its dtype is the stored one unless `dtype` asks for another. The result is typed Any, because the name says which
    model it is."""
    if not is_ours(name) and checkpoint.is_third_party(name):
        return convert.load_from_reader(checkpoint.open_checkpoint(name), device=device, dtype=dtype)
    return storage.load_checkpoint(find(name), device=device, dtype=dtype)


def export(trained: Pipeline, folder: str | Path, *, family: str | None = None) -> str:
    """Write a model into a new folder, from which transformers loads it, and say as which family."""
    files = _texts(trained)
    known = {} if trained.source is None else dict(trained.source.config)
    known |= json.loads(files.get("generation_config.json", "{}"))
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
    keys: dict[str, Any] = {key: known[key] for key in kept if key in known}
    return convert.export_third_party(trained.model, folder, family=family, keys=keys, files=files).name


def _texts(trained: Pipeline) -> dict[str, str]:
    """The files beside the weights: as they came, for a model from elsewhere, else made from our tokenizer."""
    if trained.source is not None and trained.source.path.is_dir():
        return tokenizer_files.tokenizer_files(trained.source)
    try:
        tokenizer = trained.tokenizer
    except DataError:
        return {}  # it reads no text
    roles = {"pad_token": tokenizer.pad_id, "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = dict(zip(roles, tokenizer.tokens(list(roles.values())), strict=True))
    longest = getattr(trained.model.config, "max_len", None)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **names}
    settings = {f"{role}_id": number for role, number in roles.items()}
    return {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(about, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(settings, indent=2) + "\n",
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """A tokenizer of ours in the form of the `tokenizers` library, which gives the same ids and the same text back."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    if isinstance(tokenizer, ByteLevelBPE | HFTokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        special, unknown = [PAD, BOS, EOS], [UNK] if tokenizer.unknown else []
        special += unknown
        words = {word: number for number, word in enumerate([*special, *tokenizer.alphabet])}
        inner: Any = Inner(models.WordLevel(words, *unknown))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
    elif isinstance(tokenizer, Symbols):
        special = list(tokenizer.special)
        inner = Inner(models.WordLevel({word: number for number, word in enumerate(tokenizer.symbols)}))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        raise DataError(f"a {type(tokenizer).__name__} tokenizer has no form that transformers reads")
    inner.add_special_tokens(special)
    return inner.to_str()
