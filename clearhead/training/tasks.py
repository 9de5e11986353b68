"""The five tasks as settings: what data, read how. Each is a frozen value that the run folder keeps.

`settings.load(seed)` reads the data (or makes it) and gives a task of the data room; `fitted` adapts a model's
configuration to it, since the vocabulary, the size of the pictures and the longest row are known only then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

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
from clearhead.data.packing import round_up
from clearhead.data.sampler import Size
from clearhead.data.tasks.digits import (
    DatasetNormalize,
    DigitClassification,
    ImageNormalize,
    RandomAffine,
    RandomContrast,
    RandomShift,
)
from clearhead.data.tasks.speech import Recordings, SingleSplit, Speech, Streams, StreamSplit
from clearhead.errors import DataError
from clearhead.nn.mel import Mel
from clearhead.nn.positions import LearnedPositions


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What every task's data settings have: a name, and perhaps a path."""

    task: ClassVar[str]
    takes_tokenizer: ClassVar[bool] = False

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> Task:
        """The training and validation parts. A tokenizer that is given is used rather than trained."""
        raise NotImplementedError

    def at(self, path: str | Path | None) -> DataConfig:
        """The same settings for data that lie at `path` (None: as they are)."""
        if path is None:
            return self
        if "path" not in {field.name for field in fields(self)}:
            got = f"got data={str(path)!r}: leave it out"
            raise DataError(f"the task {self.task} makes its own data and reads none; {got}")
        return self.replace(path=str(Path(path).absolute()))


@dataclass(frozen=True, kw_only=True)
class TranslationData(DataConfig):
    """Sentence pairs, tab-separated: a file, or a folder with `train.tsv` and perhaps `dev.tsv`."""

    task: ClassVar[str] = "translation"
    takes_tokenizer: ClassVar[bool] = True
    path: str | None = None
    validation: str | None = None  # None: dev.tsv beside train.tsv, or a part held out
    vocab_size: PositiveInt = 8000
    max_tokens: PositiveInt = 128
    hold_out: OpenUnit = 0.02
    swap: bool = False  # translate the second column into the first
    phrases: tuple[tuple[str, str], ...] = ()  # further pairs (source, target) to learn from
    phrase_copies: PositiveInt = 1  # how often each of them comes in an epoch

    def validate(self) -> None:
        require(
            all(text.strip() for phrase in self.phrases for text in phrase),
            f"TranslationData: phrases is {self.phrases}; expected two texts in each, neither empty",
        )

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> TranslationTask:
        if self.path is None:
            like = "a file of lines `source TAB target`, such as the English-Spanish pairs of manythings.org"
            raise _no_data(self.task, like)
        settings = vars(self) | {"phrases": self.phrases * self.phrase_copies}
        del settings["phrase_copies"]
        return TranslationTask.load(**settings, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """A plain text file, or a folder of shards (`clearhead data tokenize`); the last part is for validation."""

    task: ClassVar[str] = "text"
    takes_tokenizer: ClassVar[bool] = True
    path: str | None = None
    vocab_size: PositiveInt | None = (
        None  # of byte pairs, trained on the text; None: characters, or the shards' own tokens
    )
    context: PositiveInt = 256
    hold_out: OpenUnit = 0.1
    windows: RandomWindows | ConsecutiveWindows | None = None  # None: random ones, for shards end to end and shifted
    across_documents: bool = False  # of shards: may a token attend to the document before its own?

    @classmethod
    def migrate(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if "random_windows" in fields:
            end_to_end = {"type": "ConsecutiveWindows", "shifted": True}
            fields["windows"] = {"type": "RandomWindows"} if fields.pop("random_windows") else end_to_end
        return fields

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> LanguageModeling:
        if self.path is None:
            raise _no_data(self.task, "any plain text in UTF-8, such as the works of Shakespeare")
        return LanguageModeling.load(**vars(self), tokenizer=tokenizer, seed=seed)


@dataclass(frozen=True, kw_only=True)
class DigitsData(DataConfig):
    """Small grey pictures of digits. Without a path, the 8×8 digits that come with scikit-learn."""

    task: ClassVar[str] = "digits"
    renamed_fields: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}
    path: str | None = None
    normalize: DatasetNormalize | ImageNormalize | None = None  # None: DatasetNormalize, measured on the training part
    shift: RandomShift | None = None
    affine: RandomAffine | None = None
    contrast: RandomContrast | None = None

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> DigitClassification:
        changes = [change for change in (self.shift, self.affine, self.contrast) if change is not None]
        return DigitClassification.load(self.path, normalize=self.normalize, augment=changes, seed=seed)


@dataclass(frozen=True, kw_only=True)
class SortDedupData(DataConfig):
    """D A A → A D, made on the fly. `unseen_lengths` are left out of training, not of validation."""

    task: ClassVar[str] = "sort-dedup"
    n_symbols: PositiveInt = 26
    max_length: PositiveInt = 32
    unseen_lengths: tuple[int, ...] = ()
    narrow: Probability = 0.5
    n_train: PositiveInt = 1 << 16  # examples to an epoch; every epoch has new ones
    n_validation: PositiveInt = 1 << 11

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> SortDedup:
        return SortDedup(**vars(self), seed=seed)


@dataclass(frozen=True, kw_only=True)
class SpeechData(DataConfig):
    """Recordings of spoken digits, a folder or an archive, put together to streams."""

    task: ClassVar[str] = "speech"
    path: str | None = None
    without: str | None = None  # a speaker who is left for validation
    mel: Mel = Mel()
    streams: Streams = Streams(seconds=3.2)
    delay: NonNegativeFloat | None = (
        0.2  # seconds after its end in which a digit has to be written down; None: whenever
    )
    n_train: PositiveInt = 4096  # streams to an epoch; every epoch has new ones
    n_validation: PositiveInt = 200
    only_heard: bool = False  # nothing is trained: recordings of any number will do

    def load(self, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> Speech:
        if self.path is None:
            raise _no_data(self.task, "recordings named like 7_jackson_32.wav, such as the Free Spoken Digit Dataset")
        train, held = Recordings.load(self.path, self.mel.sample_rate).parts(self.without, only_heard=self.only_heard)
        return Speech(
            StreamSplit(train, self.mel, self.streams, n=self.n_train, delay=self.delay, seed=seed),
            StreamSplit(held, self.mel, Streams(), n=self.n_validation, seed=seed + 1),
            SingleSplit(held, self.mel),
        )


def _no_data(task: str, what: str) -> DataError:
    return DataError(
        f"the task {task} needs data and none was given: expected {what}. Run `clearhead data` to see where data sets "
        f"come from and to fetch one, then pass it: `clearhead train {task} --data PATH` (in Python, data=PATH)"
    )


def fitted(model: Config, task: Task, batch: Size) -> Config:
    """The model's configuration with the sizes that the data decide: vocabulary, longest row, pictures, classes.

    A table of learned positions has a row for every place that a batch can have: also for padding, and in any epoch."""
    known: dict[str, Any] = {}
    if (tokenizer := getattr(task, "tokenizer", None)) is not None:
        known["vocab_size"] = tokenizer.vocab_size
        longest = max(int(split.lengths().max()) for split in (task.train, task.validation))
        is_learned = isinstance(getattr(model, "positions", None), LearnedPositions)
        if is_learned:
            longest = round_up(max(longest, getattr(task, "longest", 0)), getattr(batch, "multiple", 1))
        if getattr(model, "max_len", longest) < longest:
            known["max_len"] = longest
            if is_learned:
                known["positions"] = LearnedPositions(max_len=longest)
    if (size := getattr(task, "image_size", None)) is not None:
        known |= {"image_size": size, "n_channels": 1, "n_classes": getattr(task, "n_classes", 10)}
    known |= getattr(task, "features", {})
    names = {field.name for field in fields(model)}
    return model.replace(**{name: value for name, value in known.items() if name in names})
