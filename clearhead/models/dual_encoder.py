"""The dual encoder: texts and pictures, each read by a Transformer of its own, meet in one space (CLIP).

B texts   N pictures   T tokens   E width of the shared space
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import NonNegativeInt, PositiveInt, require
from clearhead.config import Config
from clearhead.masks import Mask
from clearhead.models.encoder import EncoderConfig
from clearhead.models.vision import VisionConfig


@dataclass(frozen=True, kw_only=True)
class DualEncoderConfig(Config):
    """`DualEncoder`'s configuration: its two halves, the width of the space where they meet, and where a text is
    summed up: at its first `eos`, or, where that is None, at the largest of its ids."""

    text: EncoderConfig
    image: VisionConfig
    d_shared: PositiveInt
    eos: NonNegativeInt | None = None

    def validate(self) -> None:
        classes, n = self.image.n_classes, self.text.vocab_size
        require(not classes, f"DualEncoderConfig: image has n_classes={classes}; expected 0, for it names none")
        require((self.eos or 0) < n, f"DualEncoderConfig: eos is {self.eos}; expected one of the text's {n} ids")

    def build(self) -> DualEncoder:
        return DualEncoder(self)


class DualEncoder(nn.Module):
    """Texts and pictures in, how well each fits each out."""

    def __init__(self, config: DualEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.text, self.image = config.text.build(), config.image.build()
        self.text_proj = nn.Linear(config.text.d_model, config.d_shared, bias=False)
        self.image_proj = nn.Linear(config.image.d_model * config.image.pooling.n_vectors, config.d_shared, bias=False)
        for part in (self.text_proj, self.image_proj):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # of its exponential, as CLIP begins

    def forward(
        self, ids: Int[Tensor, "B T"], images: Float[Tensor, "N C height width"], *, mask: Mask | None = None
    ) -> Float[Tensor, "N B"]:
        """The logits of the texts for each picture: the cosine of every pair, times exp(logit_scale)."""
        return self.logit_scale.exp() * self.embed_images(images) @ self.embed_texts(ids, mask=mask).T

    def embed_texts(self, ids: Int[Tensor, "B T"], *, mask: Mask | None = None) -> Float[Tensor, "B E"]:
        """A vector of length 1 for each text; give `mask=padding(lengths)` where their lengths differ."""
        x, eos = self.text(ids, mask=mask), self.config.eos
        last = ids.argmax(1) if eos is None else (ids == eos).int().argmax(1)
        return F.normalize(self.text_proj(x[torch.arange(len(x), device=x.device), last]), dim=-1)

    def embed_images(self, images: Float[Tensor, "N C height width"]) -> Float[Tensor, "N E"]:
        """A vector of length 1 for each picture."""
        return F.normalize(self.image_proj(self.image(images)), dim=-1)
