"""Data settings of the five tasks: frozen dataclasses that are stored in the run folder.

`settings.load(seed)` reads or generates the data and returns a task of `clearhead.data`; `fit_model_config` adapts a
model configuration to it, because vocabulary, image size and longest row depend on the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeFloat, OpenUnit, PositiveInt, Probability, require
from clearhead.config import Config
from clearhead.data import (
    ConsecutiveWindows,
    LanguageModeling,
    RandomWindows,
    SortDedup,
    Task,
    Tokenizer,
    TranslationTask,
)
from clearhead.data.image_transforms import DatasetNormalize, ImageNormalize, RandomAffine, RandomContrast, RandomShift
from clearhead.data.packing import round_up
from clearhead.data.recordings import Recordings
from clearhead.data.sampler import Size
from clearhead.data.tasks.digits import DigitClassification
from clearhead.data.tasks.speech import SingleSplit, SpeechRecognition, StreamSettings, StreamSplit
from clearhead.errors import DataError
from clearhead.nn.mel import Mel
from clearhead.nn.positions import LearnedPositions


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Base class of the data settings: a task name, and usually a path."""

    task: ClassVar[str]
    takes_tokenizer: ClassVar[bool] = False

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> Task:
        """Load the training and validation data.

        Args:
            seed: Seed of generated data and of random splits.
            tokenizer: Tokenizer to use; by default one is trained on the data.
        """
        raise NotImplementedError

    def with_path(self, path: str | Path | None) -> DataConfig:
        """Return the settings with another path (None: unchanged)."""
        if path is None:
            return self
        if "path" not in {field.name for field in dataclasses.fields(self)}:
            raise DataError(f"the task {self.task} generates its data; remove data={str(path)!r}")
        return self.replace(path=str(Path(path).absolute()))


@dataclass(frozen=True, kw_only=True)
class TranslationData(DataConfig):
    """Sentence pairs, tab-separated: a file, or a folder with `train.tsv` and perhaps `dev.tsv`."""

    task: ClassVar[str] = "translation"
    takes_tokenizer: ClassVar[bool] = True
    path: str | None = None
    validation: str | None = None  # None: dev.tsv in the folder of train.tsv, or a held-out part
    vocab_size: PositiveInt = 8000
    max_tokens: PositiveInt = 128
    hold_out: OpenUnit = 0.02
    swap: bool = False  # translate the second column into the first
    phrases: tuple[tuple[str, str], ...] = ()  # additional training pairs (source, target)
    phrase_copies: PositiveInt = 1  # repetitions of each phrase per epoch

    def validate(self) -> None:
        require(
            all(text.strip() for phrase in self.phrases for text in phrase),
            f"TranslationData: phrases is {self.phrases}; expected pairs of non-empty texts",
        )

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> TranslationTask:
        if self.path is None:
            expected = "a file of lines `source TAB target`, such as the English-Spanish pairs of manythings.org"
            raise _missing_data_error(self.task, expected)
        settings = vars(self) | {"phrases": self.phrases * self.phrase_copies}
        del settings["phrase_copies"]
        return TranslationTask.load(**settings, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """A plain text file, or a folder of shards (`clearhead data tokenize`). The last part is for validation."""

    task: ClassVar[str] = "text"
    takes_tokenizer: ClassVar[bool] = True
    path: str | None = None
    vocab_size: PositiveInt | None = None  # of a BPE trained on the text; None: characters, or the shards' tokenizer
    context: PositiveInt = 256
    hold_out: OpenUnit = 0.1
    windows: RandomWindows | ConsecutiveWindows | None = (
        None  # None: RandomWindows(); for shards ConsecutiveWindows(shifted=True)
    )
    across_documents: bool = False  # of shards: whether tokens attend to previous documents

    @classmethod
    def migrate(cls, fields: JSONObject) -> JSONObject:
        if "random_windows" in fields:
            consecutive = {"type": "ConsecutiveWindows", "shifted": True}
            fields["windows"] = {"type": "RandomWindows"} if fields.pop("random_windows") else consecutive
        return fields

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> LanguageModeling:
        if self.path is None:
            raise _missing_data_error(self.task, "a plain text file in UTF-8, such as the works of Shakespeare")
        return LanguageModeling.load(**vars(self), tokenizer=tokenizer, seed=seed)


@dataclass(frozen=True, kw_only=True)
class DigitsData(DataConfig):
    """Small grayscale images of digits. Without a path, the 8×8 digits of scikit-learn."""

    task: ClassVar[str] = "digits"
    renamed_fields: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}
    path: str | None = None
    normalize: DatasetNormalize | ImageNormalize | None = None  # None: DatasetNormalize of the training data
    shift: RandomShift | None = None
    affine: RandomAffine | None = None
    contrast: RandomContrast | None = None

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> DigitClassification:
        augment = [step for step in (self.shift, self.affine, self.contrast) if step is not None]
        return DigitClassification.load(self.path, normalize=self.normalize, augment=augment, seed=seed)


@dataclass(frozen=True, kw_only=True)
class SortDedupData(DataConfig):
    """D A A → A D, generated on the fly. `unseen_lengths` occur in validation only."""

    task: ClassVar[str] = "sort-dedup"
    n_symbols: PositiveInt = 26
    max_length: PositiveInt = 32
    unseen_lengths: tuple[int, ...] = ()
    narrow: Probability = 0.5
    n_train: PositiveInt = 1 << 16  # examples per epoch; every epoch has new ones
    n_validation: PositiveInt = 1 << 11

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> SortDedup:
        return SortDedup(**vars(self), seed=seed)


@dataclass(frozen=True, kw_only=True)
class SpeechData(DataConfig):
    """Recordings of spoken digits, a folder or an archive, mixed into streams."""

    task: ClassVar[str] = "speech"
    renamed_fields: ClassVar[Mapping[str, str]] = {
        "without": "held_out_speaker",
        "only_heard": "evaluation_only",
    }
    path: str | None = None
    held_out_speaker: str | None = None  # validate with this speaker only
    mel: Mel = Mel()
    streams: StreamSettings = StreamSettings(seconds=3.2)
    delay: NonNegativeFloat | None = 0.2  # seconds after its end within which a digit must be emitted; None: no limit
    n_train: PositiveInt = 4096  # streams per epoch; every epoch has new ones
    n_validation: PositiveInt = 200
    evaluation_only: bool = False  # use recordings with any number for validation

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> SpeechRecognition:
        if self.path is None:
            raise _missing_data_error(
                self.task, "recordings named like 7_jackson_32.wav, such as the Free Spoken Digit Dataset"
            )
        recordings = Recordings.load(self.path, self.mel.sample_rate)
        train, held_out = recordings.split(self.held_out_speaker, evaluation_only=self.evaluation_only)
        return SpeechRecognition(
            StreamSplit(train, self.mel, self.streams, n=self.n_train, delay=self.delay, seed=seed),
            StreamSplit(held_out, self.mel, StreamSettings(), n=self.n_validation, seed=seed + 1),
            SingleSplit(held_out, self.mel),
        )


def _missing_data_error(task: str, expected: str) -> DataError:
    return DataError(
        f"the task {task} needs data: expected {expected}; run `clearhead data` to list and download data sets, then "
        "give the path with --data PATH (in Python, data=PATH)"
    )


def fit_model_config(model: Config, task: Task, batch: Size) -> Config:
    """Return the model's configuration with the sizes that depend on the data: vocabulary, longest row, image size.

    A table of learned positions has a row for every position of a batch in any epoch, including padding."""
    sizes: JSONObject = {}
    if (tokenizer := getattr(task, "tokenizer", None)) is not None:
        sizes["vocab_size"] = tokenizer.vocab_size
        longest = max(int(split.lengths().max()) for split in (task.train, task.validation))
        is_learned = isinstance(getattr(model, "positions", None), LearnedPositions)
        if is_learned:
            longest = round_up(max(longest, getattr(task, "longest", 0)), getattr(batch, "multiple", 1))
        if getattr(model, "max_len", longest) < longest:
            sizes["max_len"] = longest
            if is_learned:
                sizes["positions"] = LearnedPositions(max_len=longest)
    if (image_size := getattr(task, "image_size", None)) is not None:
        sizes |= {"image_size": image_size, "n_channels": 1, "n_classes": getattr(task, "n_classes", 10)}
    sizes |= getattr(task, "features", {})
    names = {field.name for field in dataclasses.fields(model)}
    return model.replace(**{name: value for name, value in sizes.items() if name in names})
