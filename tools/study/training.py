"""Training one small network again and again, as fast as one device allows.

The pictures lie on the device as floats, there is no loader, and on a GPU one update (forward, backward, clip, AdamW)
is captured once as a CUDA graph and replayed: such small networks are otherwise held up by Python. A run starts by
writing new weights over the old ones, so that the graph stays valid.

B batch   N pictures
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.training.config import WarmupCosine
from clearhead.training.optimiser import clip_grad_norm, decay_groups
from tools.study.networks import Size, build

_EVALUATE = 2048  # pictures at a time where no gradient is kept
_WARM_UP = 3  # updates before a capture: libraries choose their kernels then


@dataclass(frozen=True)
class Optimisation:
    """How every network is trained. The learning rate is a network's own, found by the same rule for all."""

    batch: int = 256
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    warmup: float = 0.1  # share of the updates, then half a cosine down to 0


@dataclass(frozen=True)
class Pictures:
    """Normalised pictures (N, 1, height, width) and their classes (N,), on the device that trains."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: Int[Tensor, " n"]) -> Pictures:
        there = rows.to(self.labels.device)
        return Pictures(self.images[there], self.labels[there])


def order(n: int, steps: int, batch: int, seed: int) -> Int[Tensor, "steps B"]:
    """Which pictures each update sees: every picture once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / n)
    rows = torch.cat([torch.randperm(n, generator=generator) for _ in range(epochs)])
    return rows[: steps * batch].view(steps, batch)


class Trainer:
    """A network, its optimiser, and one update of both."""

    def __init__(self, name: str, size: Size, how: Optimisation, device: torch.device, *, captured: bool) -> None:
        self.name = name
        self.size = size
        self.how = how
        self.device = device
        self.network = build(name, size, 0).to(device).train()
        self.images = torch.zeros(how.batch, 1, *size, device=device)
        self.labels = torch.zeros(how.batch, dtype=torch.int64, device=device)
        self.rate = torch.tensor(0.0, device=device)
        parameters = dict(self.network.named_parameters())
        groups = [
            {"params": [parameters[key] for key in keys], "weight_decay": decay}
            for keys, decay in zip(decay_groups(self.network), (how.weight_decay, 0.0), strict=True)
        ]
        self.optimiser = torch.optim.AdamW(
            groups, lr=self.rate, betas=how.betas, fused=True, capturable=device.type == "cuda"
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured and device.type == "cuda":
            try:
                self.graph = self._capture()
            except RuntimeError as error:  # a driver or a kernel that cannot be captured: slower, and the same numbers
                warnings.warn(f"{name}: updates are not captured ({error}); training eagerly", stacklevel=2)

    def _update(self) -> None:
        loss = F.cross_entropy(self.network(self.images), self.labels)
        loss.backward()
        clip_grad_norm(self.network.parameters(), self.how.clip)
        self.optimiser.step()

    def _capture(self) -> torch.cuda.CUDAGraph:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a capturable optimiser that steps uncaptured
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self.optimiser.zero_grad(set_to_none=True)
                    self._update()
            torch.cuda.current_stream().wait_stream(side)
        self.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._update()
        return graph

    def _restart(self, seed: int) -> None:
        """New weights and an empty memory, written over the old ones."""
        self.network.load_state_dict(build(self.name, self.size, seed).state_dict())
        with torch.no_grad():
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
        self.network.train()

    def run(self, data: Pictures, *, steps: int, lr: float, seed: int) -> float:
        """Trains from the starting weights of this seed; the seconds it took."""
        started = time.perf_counter()
        self._restart(seed)
        schedule = WarmupCosine(lr, int(self.how.warmup * steps), steps)
        rates = torch.tensor([schedule(step) for step in range(1, steps + 1)], device=self.device)
        rows = order(len(data), steps, self.how.batch, seed).to(self.device)
        for rate, chosen in zip(rates, rows, strict=True):
            self.rate.copy_(rate)
            torch.index_select(data.images, 0, chosen, out=self.images)
            torch.index_select(data.labels, 0, chosen, out=self.labels)
            if self.graph is not None:
                self.graph.replay()
            else:
                self.optimiser.zero_grad(set_to_none=True)
                self._update()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    @torch.no_grad()
    def accuracy(self, data: Pictures) -> float:
        """The share of pictures whose class gets the highest score."""
        self.network.eval()
        pairs = zip(data.images.split(_EVALUATE), data.labels.split(_EVALUATE), strict=True)
        right = torch.stack([(self._classes(images) == labels).sum() for images, labels in pairs])
        self.network.train()
        return int(right.sum()) / len(data)

    def _classes(self, images: Float[Tensor, "B 1 height width"]) -> Int[Tensor, " B"]:
        logits: Tensor = self.network(images)
        return logits.argmax(-1)
