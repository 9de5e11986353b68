"""Parameter initialization: each variant initializes linear layers, embeddings and learned positions of a module.

Biases are set to zero. Norms and other parameters keep the values of their constructors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from clearhead._core.validation import PositiveFloat, check_int
from clearhead.config import Validated
from clearhead.nn.positions import LearnedPositionEmbedding

# Names of the last linear layer of each residual branch.
RESIDUAL_OUTPUTS = frozenset({"o_proj", "down"})


@dataclass(frozen=True)
class Xavier:
    """Linear layers uniform with variance 2 / (inputs + outputs) (Glorot and Bengio, 2010).

    Embeddings and learned positions are normal with variance 1 / M, so embeddings scaled by √M have variance 1."""

    def apply(self, module: nn.Module, n_layers: int) -> None:
        """Initialize `module`; `n_layers` is not used."""
        for _, submodule in _modules(module):
            if isinstance(submodule, nn.Linear):
                nn.init.xavier_uniform_(submodule.weight)
            else:
                nn.init.normal_(submodule.weight, std=submodule.weight.shape[-1] ** -0.5)


@dataclass(frozen=True)
class TruncatedNormal(Validated):
    """Normal with standard deviation `std`, truncated at two standard deviations (BERT, ViT).

    Because of the truncation, the standard deviation of the parameters is 0.88 · std."""

    std: PositiveFloat = 0.02

    def apply(self, module: nn.Module, n_layers: int) -> None:
        """Initialize `module`; `n_layers` is not used."""
        for _, submodule in _modules(module):
            nn.init.trunc_normal_(submodule.weight, std=self.std, a=-2 * self.std, b=2 * self.std)


@dataclass(frozen=True)
class DepthScaled(Validated):
    """Normal with standard deviation `std`, divided by √(2L) in the last layer of each residual branch (GPT-2).

    L layers add 2L branches to the residual stream, so its final variance does not grow with L."""

    std: PositiveFloat = 0.02

    def apply(self, module: nn.Module, n_layers: int) -> None:
        """Initialize `module`, a stack of `n_layers` blocks."""
        check_int(n_layers, "DepthScaled: n_layers", minimum=1)
        for name, submodule in _modules(module):
            ends_branch = name.rpartition(".")[2] in RESIDUAL_OUTPUTS
            nn.init.normal_(submodule.weight, std=self.std / math.sqrt(2 * n_layers) if ends_branch else self.std)


Init: TypeAlias = Xavier | TruncatedNormal | DepthScaled


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Embedding | LearnedPositionEmbedding]]:
    """Yield the modules to initialize with their names, each weight once, and set biases to zero."""
    initialized: set[Tensor] = set()
    for name, submodule in module.named_modules():
        if not isinstance(submodule, (nn.Linear, nn.Embedding, LearnedPositionEmbedding)):
            continue
        if isinstance(submodule, nn.Linear) and submodule.bias is not None:
            nn.init.zeros_(submodule.bias)
        if submodule.weight not in initialized:
            initialized.add(submodule.weight)
            yield name, submodule
