"""Samples of text during `clearhead train --sample`. A separate module, because its base class imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from clearhead import training
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.training.callbacks import ValidRow

_SAMPLE = 80  # new tokens


class SampleText(training.Progress):
    """Continues a prompt with the model of the run after each validation.

    Args:
        prompt: The prompt.
        write: Function that prints a text.
    """

    def __init__(self, prompt: str, write: Callable[[str], None]) -> None:
        self._prompt = prompt
        self._write = write

    def on_train_begin(self, info: training.RunInfo) -> None:
        from clearhead.models import DecoderConfig

        if info.tokenizer is None:
            raise ConfigError(f"--sample prints text, and the task {info.task} has no tokenizer")
        self._model = info.model
        self._tokenizer = info.tokenizer
        config = info.model.config
        assert isinstance(config, DecoderConfig)
        self._max_len = config.max_len

    def on_evaluate(self, row: ValidRow) -> None:
        from clearhead.generation import Sample, generate

        ids = self._tokenizer.prompt(self._prompt)[-(self._max_len - 1) :]
        free_positions = self._max_len - len(ids)
        result = generate(
            self._model,
            [ids],
            strategy=Sample(temperature=0.8, seed=row["step"]),
            max_new_tokens=min(_SAMPLE, free_positions),
        )
        text = self._tokenizer.decode([*ids, *result.sequence(0).tolist()])
        self._write(f"step {row['step']:,}: {text}")
