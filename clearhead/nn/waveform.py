"""Layers for audio waveforms, as in wav2vec 2.0: strided convolutions, and positions from a convolution.

B recordings   S samples   N encoder frames   C channels   M model dim
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.typed_module import Module
from clearhead.errors import DtypeError, ShapeError
from clearhead.nn.norms import Norm
from clearhead.ops.activations import Activation


class WaveformStem(Module):
    """Strided convolutions of a waveform, then a norm and a projection to M features.

    Args:
        widths: Channels of each convolution.
        kernels: Kernel size of each convolution.
        strides: Stride of each convolution.
        d_model: Width of the output.
        bias: Whether the convolutions have biases.
        conv_norm: "group" normalizes the channels of the first convolution over time; "layer" normalizes the output of
            each convolution over its channels.
        activation: Activation of each convolution.
        norm: Norm before the projection.
    """

    def __init__(
        self,
        widths: Sequence[int],
        kernels: Sequence[int],
        strides: Sequence[int],
        d_model: int,
        *,
        bias: bool,
        conv_norm: Literal["group", "layer"],
        activation: Activation,
        norm: Norm,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.sizes = tuple(zip(kernels, strides, strict=True))
        self.convolutions = nn.ModuleList(
            nn.Conv1d(n_in, n_out, kernel, stride, bias=bias)
            for n_in, n_out, kernel, stride in zip((1, *widths), widths, kernels, strides, strict=False)
        )
        is_group = conv_norm == "group"
        self.conv_norms = nn.ModuleList(
            [nn.GroupNorm(widths[0], widths[0])] if is_group else [nn.LayerNorm(width) for width in widths]
        )
        self.norm = norm.build(widths[-1])
        self.projection = nn.Linear(widths[-1], d_model)
        self.min_samples = self._samples_of_one_frame()

    def _samples_of_one_frame(self) -> int:
        """Return the number of samples that one encoder frame depends on."""
        samples = 1
        for kernel, stride in reversed(self.sizes):
            samples = (samples - 1) * stride + kernel
        return samples

    def n_frames(self, n_samples: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return the number of encoder frames of each number of samples."""
        n_frames = n_samples
        for kernel, stride in self.sizes:
            n_frames = (n_frames - kernel) // stride + 1
        return n_frames

    def forward(self, samples: Float[Tensor, "B S"]) -> Float[Tensor, "B N M"]:
        """Return one embedding per encoder frame."""
        if samples.ndim != 2 or samples.shape[1] < self.min_samples:
            raise ShapeError(
                f"samples have shape {tuple(samples.shape)}; expected (B, S) with at least {self.min_samples} samples"
            )
        if not samples.is_floating_point():
            raise DtypeError(f"samples are {samples.dtype}; expected floating point: scale integers to −1 … 1")
        x = samples[:, None]
        for i, convolution in enumerate(self.convolutions):
            x = self.activation(self._normalize(convolution(x), i))
        embeddings: Tensor = self.projection(self.norm(x.transpose(1, 2)))
        return embeddings

    def _normalize(self, x: Tensor, i: int) -> Tensor:
        """Return the normalized output (B, C, N) of convolution i."""
        if i >= len(self.conv_norms):
            return x
        norm = self.conv_norms[i]
        normalized: Tensor = norm(x) if isinstance(norm, nn.GroupNorm) else norm(x.transpose(1, 2)).transpose(1, 2)
        return normalized


class ConvPositions(Module):
    """Positions as the activated output of a grouped convolution over the sequence, with weight normalization.

    Args:
        d_model: Width M.
        kernel: Kernel size.
        groups: Number of groups of the convolution.
        activation: Activation of the convolution.
    """

    def __init__(self, d_model: int, kernel: int, groups: int, activation: Activation) -> None:
        super().__init__()
        self.activation, self.groups, self.kernel = activation, groups, kernel
        weight = torch.empty(d_model, d_model // groups, kernel)
        nn.init.normal_(weight, std=2 / (kernel * d_model) ** 0.5)
        self.direction = nn.Parameter(weight)
        self.norm = nn.Parameter(weight.norm(dim=(0, 1), keepdim=True))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Float[Tensor, "B N M"]) -> Float[Tensor, "B N M"]:
        """Return x plus its positions."""
        weight = self.direction * (self.norm / self.direction.norm(dim=(0, 1), keepdim=True))
        y = F.conv1d(x.transpose(1, 2), weight, self.bias, padding=self.kernel // 2, groups=self.groups)
        return x + self.activation(y[..., : x.shape[1]]).transpose(1, 2)  # even kernels return one frame more
