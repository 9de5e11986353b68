"""How weights begin. A choice walks over a module and sets its linear maps, embeddings and tables of learned positions.

Biases begin at zero. Norms, and parameters that belong to none of these, keep what they were built with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from clearhead._core.validation import PositiveFloat, check_int
from clearhead.config import Validated
from clearhead.nn.positions import LearnedPositionEmbedding

# The last map of each residual branch, by name: attention's output and the feed-forward's way down.
RESIDUAL_OUTPUTS = frozenset({"o_proj", "down"})


@dataclass(frozen=True)
class Xavier:
    """Linear maps uniform with variance 2 / (inputs + outputs) (Glorot and Bengio, 2010).

    Embeddings are normal with variance 1 / M, so that times √M they have variance 1; positions likewise stay small."""

    def apply(self, module: nn.Module, n_layers: int) -> None:
        """Sets the weights of `module`; the depth does not matter to this choice."""
        for _, part in _parts(module):
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
            else:
                nn.init.normal_(part.weight, std=part.weight.shape[-1] ** -0.5)


@dataclass(frozen=True)
class TruncatedNormal(Validated):
    """Normal with standard deviation `std`, drawn again beyond two of them (BERT, ViT).

    What is cut off counts: the weights' own standard deviation is 0.88 · std."""

    std: PositiveFloat = 0.02

    def apply(self, module: nn.Module, n_layers: int) -> None:
        """Sets the weights of `module`; the depth does not matter to this choice."""
        for _, part in _parts(module):
            nn.init.trunc_normal_(part.weight, std=self.std, a=-2 * self.std, b=2 * self.std)


@dataclass(frozen=True)
class DepthScaled(Validated):
    """Normal with standard deviation `std`; the last map of each residual branch 1 / √(2L) of that (GPT-2).

    A stack of L layers adds 2L branches to the stream, so its variance at the end does not grow with L."""

    std: PositiveFloat = 0.02

    def apply(self, module: nn.Module, n_layers: int) -> None:
        """Sets the weights of `module`, a stack of `n_layers` blocks."""
        check_int(n_layers, "DepthScaled: n_layers", minimum=1)
        for name, part in _parts(module):
            ends_branch = name.rpartition(".")[2] in RESIDUAL_OUTPUTS
            nn.init.normal_(part.weight, std=self.std / math.sqrt(2 * n_layers) if ends_branch else self.std)


Init: TypeAlias = Xavier | TruncatedNormal | DepthScaled


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Embedding | LearnedPositionEmbedding]]:
    """The parts to set, by name, each weight once (a tied weight by its first owner); biases are zeroed on the way."""
    seen: set[Tensor] = set()
    for name, part in module.named_modules():
        if not isinstance(part, (nn.Linear, nn.Embedding, LearnedPositionEmbedding)):
            continue
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if part.weight not in seen:
            seen.add(part.weight)
            yield name, part
