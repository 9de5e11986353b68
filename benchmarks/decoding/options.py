"""Options of `python -m benchmarks decode`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """Sizes, device and time of a run.

    Attributes:
        device: "cpu" or "cuda".
        dtype: Data type of the models.
        models: Only models whose name contains one of these, if given.
        contexts: Only these context lengths, if given; else those of each model.
        batches: Only these batch sizes, if given.
        name_filter: Only rows whose name contains this.
        seconds: Time for each implementation of a row, without compilation.
        peers: Also measure plain torch and transformers.
        max_prefill: Prompt tokens of a row; rows with more are skipped, because each generation reads its prompts.
        n_prompts: Number of prompts of the workload with mixed lengths.
        smoke: Tiny sizes, which show that every section runs; timings are not meaningful.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    models: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    name_filter: str = ""
    seconds: float = 1.0
    peers: bool = True
    max_prefill: int = 300_000
    n_prompts: int = 2_000
    smoke: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    def selects(self, model: str) -> bool:
        """Return whether a model is measured."""
        return not self.models or any(name.lower() in model.lower() for name in self.models)
