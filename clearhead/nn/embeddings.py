"""How tokens, images and sounds enter the residual stream: a row of a table for each id, a projection for each patch.

Letters: B batch, T tokens, V vocabulary, M model width, C channels, N patches, F features of a frame."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import find_out_of_range
from clearhead._core.validation import check_int, validate
from clearhead.errors import DtypeError, ShapeError


class TokenEmbedding(nn.Embedding):
    """Row `ids` of a learned table (V, M), times √M where `scaled` (as in 2017, so that it matches the positions).

    Ids outside the vocabulary are refused by name on the CPU; on an accelerator, where looking would stall the queue,
    and inside `torch.compile`, the lookup itself refuses."""

    def __init__(self, vocab_size: int, d_model: int, *, scaled: bool = False) -> None:
        V = check_int(vocab_size, "TokenEmbedding: vocab_size", minimum=1)
        super().__init__(V, check_int(d_model, "TokenEmbedding: d_model", minimum=1))
        self.scaled: bool = validate(scaled, "TokenEmbedding: scaled", bool)
        self.scale = math.sqrt(d_model) if scaled else 1.0

    def reset_parameters(self) -> None:
        """Normal with variance 1/M: rows of about unit length, and features of variance 1 once scaled."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... M"]:
        """(B, T) ids to (B, T, M)."""
        if ids.dtype not in (torch.int64, torch.int32):
            wanted = "whole numbers, torch.int64 or torch.int32"
            raise DtypeError(f"ids are {ids.dtype}; expected {wanted}. Convert them with `.long()`.")
        wrong = find_out_of_range(ids, self.num_embeddings)
        if wrong is not None:
            raise ShapeError(
                f"ids hold {wrong}, but the vocabulary has {self.num_embeddings} tokens; expected 0 … "
                f"{self.num_embeddings - 1}. Check that the tokenizer and the model belong together."
            )
        x = F.embedding(ids, self.weight)
        return x * self.scale if self.scaled else x

    def logits(self, x: Float[Tensor, "... M"], bias: Float[Tensor, " V"] | None = None) -> Float[Tensor, "... V"]:
        """The tied output: each token's score is x · its row (unscaled), so input and output share one matrix."""
        return F.linear(x, self.weight, bias)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}" + (", scaled=True" if self.scaled else "")


class PatchEmbedding(nn.Module):
    """Cuts an image into squares of `patch` × `patch` pixels and projects each, flattened, to width M.

    Patches come row by row; inside one the order is channel, row, column. That is exactly a convolution whose kernel
    and stride are the patch: `as_convolution` gives it."""

    def __init__(self, n_channels: int, patch: int, d_model: int, *, bias: bool = True) -> None:
        super().__init__()
        self.n_channels = check_int(n_channels, "PatchEmbedding: n_channels", minimum=1)
        self.patch = check_int(patch, "PatchEmbedding: patch", minimum=1)
        d_model = check_int(d_model, "PatchEmbedding: d_model", minimum=1)
        self.projection = nn.Linear(n_channels * patch**2, d_model, bias=bias)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """How many patches an image has down and across; a size that does not divide is refused."""
        if height < self.patch or width < self.patch or height % self.patch or width % self.patch:
            raise ShapeError(
                f"The image is {height} × {width} pixels; expected multiples of the patch, {self.patch}. "
                "Resize, crop or pad it."
            )
        return height // self.patch, width // self.patch

    def patches(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N pixels"]:
        """The flattened patches (B, N, C · patch²), before the projection."""
        if images.ndim != 4 or images.shape[1] != self.n_channels:
            wanted = f"(B, {self.n_channels}, height, width)"
            raise ShapeError(f"images have shape {tuple(images.shape)}; expected {wanted}.")
        if not images.is_floating_point():
            advice = "Convert bytes with `images.float() / 255`."
            raise DtypeError(f"images are {images.dtype}; expected floating point. {advice}")
        B, C, height, width = images.shape
        rows, columns = self.grid(height, width)
        p = self.patch
        cut = images.reshape(B, C, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, p, p)
        return cut.reshape(B, rows * columns, C * p * p)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N M"]:
        """(B, C, height, width) to (B, N, M)."""
        return self.projection(self.patches(images))

    def as_convolution(self) -> nn.Conv2d:
        """The same map as a strided convolution, (B, C, height, width) to (B, M, rows, columns).

        It uses the same memory for its weights: training or loading one changes the other."""
        weight, bias = self.projection.weight, self.projection.bias
        M, C, p = len(weight), self.n_channels, self.patch
        convolution = nn.Conv2d(C, M, p, stride=p, bias=bias is not None, device="meta")
        convolution.weight = nn.Parameter(weight.detach().view(M, C, p, p), requires_grad=weight.requires_grad)
        if bias is not None:
            convolution.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        return convolution


class StackedFrames(nn.Module):
    """Projects every `stacked` frames of a sound, with the `earlier` ones before them, side by side to width M: patches
    of time, which overlap where `earlier` is above 0.

    Frames at the end that do not fill a stack are left out."""

    def __init__(self, n_features: int, stacked: int, d_model: int, *, earlier: int = 0) -> None:
        super().__init__()
        self.n_features = check_int(n_features, "StackedFrames: n_features", minimum=1)
        self.stacked = check_int(stacked, "StackedFrames: stacked", minimum=1)
        self.earlier = check_int(earlier, "StackedFrames: earlier", minimum=0)
        d_model = check_int(d_model, "StackedFrames: d_model", minimum=1)
        self.projection = nn.Linear(n_features * (stacked + earlier), d_model)

    def forward(
        self, frames: Float[Tensor, "B T F"], before: Float[Tensor, "B earlier F"] | None = None
    ) -> Float[Tensor, "B N M"]:
        """(B, T, F) to (B, T // stacked, M). `before` are the frames before the first; None: zeros."""
        validate_frames(frames, self.n_features)
        N = frames.shape[1] // self.stacked
        if before is None:
            before = frames.new_zeros(len(frames), self.earlier, self.n_features)
        x = torch.cat((before, frames[:, : N * self.stacked]), 1)
        if not N:
            return self.projection(x.new_zeros(len(x), 0, self.projection.in_features))
        return self.projection(x.unfold(1, self.earlier + self.stacked, self.stacked).flatten(2))


class ConvStem(nn.Module):
    """Two convolutions over three frames each, the second at every other frame: one vector for two frames (Whisper)."""

    def __init__(self, n_features: int, d_model: int) -> None:
        super().__init__()
        self.n_features = check_int(n_features, "ConvStem: n_features", minimum=1)
        d_model = check_int(d_model, "ConvStem: d_model", minimum=1)
        self.conv1 = nn.Conv1d(n_features, d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(d_model, d_model, kernel_size=3, stride=2, padding=1)

    def forward(self, frames: Float[Tensor, "B T F"]) -> Float[Tensor, "B N M"]:
        """(B, T, F) to (B, ⌈T / 2⌉, M)."""
        validate_frames(frames, self.n_features)
        return F.gelu(self.conv2(F.gelu(self.conv1(frames.transpose(1, 2))))).transpose(1, 2)


def validate_frames(frames: Tensor, n_features: int) -> None:
    """Refuses what are no frames of a sound with so many features."""
    if frames.ndim != 3 or frames.shape[2] != n_features:
        raise ShapeError(f"frames have shape {tuple(frames.shape)}; expected (B, T, {n_features}).")
    if not frames.is_floating_point():
        raise DtypeError(f"frames are {frames.dtype}; expected floating point, such as `Mel` gives.")
