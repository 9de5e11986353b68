"""Embeddings of tokens, image patches and audio frames.

Letters: B batch, T tokens or frames, V vocabulary, M model dim, C channels, N patches, F features of a frame."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import find_out_of_range
from clearhead._core.typed_module import Module
from clearhead._core.validation import PositiveFloat, check_int, validate
from clearhead.errors import DtypeError, ShapeError


class TokenEmbedding(nn.Embedding):
    """Learned embedding table (V, M), times `multiplier` and, if `scaled`, √M, as in the original Transformer.

    On the CPU, ids outside the vocabulary raise ShapeError. On an accelerator, where the check would synchronize, and
    under torch.compile, the embedding lookup itself fails."""

    def __init__(self, vocab_size: int, d_model: int, *, scaled: bool = False, multiplier: float = 1.0) -> None:
        V = check_int(vocab_size, "TokenEmbedding: vocab_size", minimum=1)
        super().__init__(V, check_int(d_model, "TokenEmbedding: d_model", minimum=1))
        multiplier = validate(multiplier, "TokenEmbedding: multiplier", PositiveFloat)
        self.scale = multiplier * math.sqrt(d_model) if validate(scaled, "TokenEmbedding: scaled", bool) else multiplier
        self.scaled = self.scale != 1

    def reset_parameters(self) -> None:
        """Draw from a normal distribution with variance 1/M: rows have norm about 1, scaled features variance 1."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... M"]:
        """Return the embeddings (…, M) of ids (…)."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise DtypeError(f"ids are {ids.dtype}; expected torch.int64 or torch.int32: convert them with `.long()`")
        invalid_id = find_out_of_range(ids, self.num_embeddings)
        if invalid_id is not None:
            raise ShapeError(
                f"ids contain {invalid_id}, but the vocabulary has {self.num_embeddings} tokens; expected 0 … "
                f"{self.num_embeddings - 1}: check that the tokenizer belongs to this model"
            )
        x = F.embedding(ids, self.weight)
        return x * self.scale if self.scaled else x

    def logits(self, x: Float[Tensor, "... M"], bias: Float[Tensor, " V"] | None = None) -> Float[Tensor, "... V"]:
        """Return the logits of a tied language-model head: x times the (unscaled) embedding matrix."""
        return F.linear(x, self.weight, bias)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}" + (f", scale={self.scale:g}" if self.scaled else "")


class PatchEmbedding(Module):
    """Cut an image into squares of `patch` × `patch` pixels and project each, flattened, to M features.

    Patches are ordered row by row, and the values of a patch by channel, row, column. This is equivalent to a
    convolution whose kernel and stride are the patch: see `as_convolution`."""

    def __init__(self, n_channels: int, patch: int, d_model: int, *, bias: bool = True) -> None:
        super().__init__()
        self.n_channels = check_int(n_channels, "PatchEmbedding: n_channels", minimum=1)
        self.patch = check_int(patch, "PatchEmbedding: patch", minimum=1)
        d_model = check_int(d_model, "PatchEmbedding: d_model", minimum=1)
        self.projection = nn.Linear(n_channels * patch**2, d_model, bias=bias)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of an image; raise ShapeError if its size is not divisible."""
        if height < self.patch or width < self.patch or height % self.patch or width % self.patch:
            raise ShapeError(
                f"the image is {height} × {width} pixels; expected multiples of the patch size {self.patch}: "
                "resize, crop or pad it"
            )
        return height // self.patch, width // self.patch

    def patches(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N pixels"]:
        """Return the flattened patches (B, N, C · patch²), before the projection."""
        if images.ndim != 4 or images.shape[1] != self.n_channels:
            raise ShapeError(f"images have shape {tuple(images.shape)}; expected (B, {self.n_channels}, height, width)")
        if not images.is_floating_point():
            raise DtypeError(
                f"images are {images.dtype}; expected floating point: convert bytes with `images.float() / 255`"
            )
        B, C, height, width = images.shape
        rows, columns = self.grid(height, width)
        p = self.patch
        patches = images.reshape(B, C, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, p, p)
        return patches.reshape(B, rows * columns, C * p * p)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N M"]:
        """Return the embeddings (B, N, M) of images (B, C, height, width)."""
        x: Tensor = self.projection(self.patches(images))
        return x

    def as_convolution(self) -> nn.Conv2d:
        """Return the equivalent strided convolution, (B, C, height, width) to (B, M, rows, columns).

        Its parameters share memory with this module: training or loading one changes the other."""
        weight, bias = self.projection.weight, self.projection.bias
        M = len(weight)
        C = self.n_channels
        p = self.patch
        convolution = nn.Conv2d(C, M, p, stride=p, bias=bias is not None, device="meta")
        convolution.weight = nn.Parameter(weight.detach().view(M, C, p, p), requires_grad=weight.requires_grad)
        if bias is not None:
            convolution.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        return convolution


class StackedFrames(Module):
    """Concatenate every `n_stacked` frames of audio, with `left_frames` preceding ones, and project them to M features.

    Stacks overlap if `left_frames` is positive. Incomplete stacks at the end are dropped."""

    def __init__(self, n_features: int, n_stacked: int, d_model: int, *, left_frames: int = 0) -> None:
        super().__init__()
        self.n_features = check_int(n_features, "StackedFrames: n_features", minimum=1)
        self.n_stacked = check_int(n_stacked, "StackedFrames: n_stacked", minimum=1)
        self.left_frames = check_int(left_frames, "StackedFrames: left_frames", minimum=0)
        d_model = check_int(d_model, "StackedFrames: d_model", minimum=1)
        self.projection = nn.Linear(n_features * (n_stacked + left_frames), d_model)

    def forward(
        self, frames: Float[Tensor, "B T F"], left_frames: Float[Tensor, "B left F"] | None = None
    ) -> Float[Tensor, "B N M"]:
        """Return the embeddings (B, T // n_stacked, M) of frames (B, T, F) after `left_frames` (default zeros)."""
        validate_frames(frames, self.n_features)
        N = frames.shape[1] // self.n_stacked
        if left_frames is None:
            left_frames = frames.new_zeros(len(frames), self.left_frames, self.n_features)
        x = torch.cat((left_frames, frames[:, : N * self.n_stacked]), 1)
        if N:
            windows = x.unfold(1, self.left_frames + self.n_stacked, self.n_stacked).flatten(2)
        else:
            windows = x.new_zeros(len(x), 0, self.projection.in_features)
        embeddings: Tensor = self.projection(windows)
        return embeddings


class ConvStem(Module):
    """Two convolutions with kernel size 3, the second with stride 2, as in Whisper."""

    def __init__(self, n_features: int, d_model: int) -> None:
        super().__init__()
        self.n_features = check_int(n_features, "ConvStem: n_features", minimum=1)
        d_model = check_int(d_model, "ConvStem: d_model", minimum=1)
        self.conv1 = nn.Conv1d(n_features, d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(d_model, d_model, kernel_size=3, stride=2, padding=1)

    def forward(self, frames: Float[Tensor, "B T F"]) -> Float[Tensor, "B N M"]:
        """Return the embeddings (B, ⌈T / 2⌉, M) of frames (B, T, F)."""
        validate_frames(frames, self.n_features)
        return F.gelu(self.conv2(F.gelu(self.conv1(frames.transpose(1, 2))))).transpose(1, 2)


def validate_frames(frames: Tensor, n_features: int) -> None:
    """Raise ShapeError unless `frames` is (B, T, n_features), and DtypeError unless it is floating point."""
    if frames.ndim != 3 or frames.shape[2] != n_features:
        raise ShapeError(f"frames have shape {tuple(frames.shape)}; expected (B, T, {n_features})")
    if not frames.is_floating_point():
        raise DtypeError(f"frames are {frames.dtype}; expected floating point, as returned by `Mel`")
