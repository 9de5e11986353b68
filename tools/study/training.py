"""Train one small network repeatedly, as fast as the device allows.

Images are on the device as floats, without a loader. On a GPU one update (forward, backward, clip, AdamW) is captured
as a CUDA graph and replayed, because Python would limit the speed of such small networks. Each training overwrites the
parameters in place, so that the graph stays valid.

B batch   N images
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Float, Int
from clearhead.training.optimizer import clip_grad_norm, decay_groups
from clearhead.training.schedules import WarmupCosine
from tools.study.networks import Size, build

_EVALUATE = 2048  # batch size of evaluation
_WARM_UP = 3  # updates before a capture, in which libraries choose their kernels


@dataclass(frozen=True)
class Optimisation:
    """Training settings of all networks, except for the learning rate, which is tuned for each network."""

    batch: int = 256
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    warmup: float = 0.1  # share of the updates, then half a cosine down to 0


@dataclass(frozen=True)
class Pictures:
    """Normalized images (N, 1, height, width) and their classes (N,), on the training device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: Int[Tensor, " n"]) -> Pictures:
        indices = rows.to(self.labels.device)
        return Pictures(self.images[indices], self.labels[indices])


def order(n: int, steps: int, batch: int, seed: int) -> Int[Tensor, "steps B"]:
    """Return the image indices of each update; every image occurs once per epoch."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / n)
    rows = torch.cat([torch.randperm(n, generator=generator) for _ in range(epochs)])
    return rows[: steps * batch].view(steps, batch)


class Trainer:
    """A network and its optimizer, with an update that may be a CUDA graph."""

    def __init__(self, name: str, size: Size, settings: Optimisation, device: torch.device, *, captured: bool) -> None:
        self.name = name
        self.size = size
        self.settings = settings
        self.device = device
        self.network = build(name, size, 0).to(device).train()
        self.images = torch.zeros(settings.batch, 1, *size, device=device)
        self.labels = torch.zeros(settings.batch, dtype=torch.int64, device=device)
        self.rate = torch.tensor(0.0, device=device)
        parameters = dict(self.network.named_parameters())
        groups = [
            {"params": [parameters[key] for key in keys], "weight_decay": decay}
            for keys, decay in zip(decay_groups(self.network), (settings.weight_decay, 0.0), strict=True)
        ]
        self.optimiser = torch.optim.AdamW(
            groups, lr=self.rate, betas=settings.betas, fused=True, capturable=device.type == "cuda"
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured and device.type == "cuda":
            try:
                self.graph = self._capture()
            except RuntimeError as error:  # the driver or a kernel does not support capture; eager updates agree
                warnings.warn(f"{name}: updates are not captured ({error}); training eagerly", stacklevel=2)

    def _update(self) -> None:
        loss = F.cross_entropy(self.network(self.images), self.labels)
        loss.backward()
        clip_grad_norm(self.network.parameters(), self.settings.clip)
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
        """Overwrite parameters and optimizer state in place with initial ones."""
        self.network.load_state_dict(build(self.name, self.size, seed).state_dict())
        with torch.no_grad():
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
        self.network.train()

    def run(self, data: Pictures, *, steps: int, lr: float, seed: int) -> float:
        """Train from the initial parameters of this seed and return the elapsed seconds."""
        started = time.perf_counter()
        self._restart(seed)
        schedule = WarmupCosine(lr, int(self.settings.warmup * steps), steps)
        rates = torch.tensor([schedule(step) for step in range(1, steps + 1)], device=self.device)
        rows = order(len(data), steps, self.settings.batch, seed).to(self.device)
        for rate, indices in zip(rates, rows, strict=True):
            self.rate.copy_(rate)
            torch.index_select(data.images, 0, indices, out=self.images)
            torch.index_select(data.labels, 0, indices, out=self.labels)
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
        """Return the share of images whose class has the highest logit."""
        self.network.eval()
        pairs = zip(data.images.split(_EVALUATE), data.labels.split(_EVALUATE), strict=True)
        right = torch.stack([(self._classes(images) == labels).sum() for images, labels in pairs])
        self.network.train()
        return int(right.sum()) / len(data)

    def _classes(self, images: Float[Tensor, "B 1 height width"]) -> Int[Tensor, " B"]:
        logits: Tensor = self.network(images)
        return logits.argmax(-1)
