"""The dual encoder: a text encoder and an image encoder with a shared embedding space (CLIP).

B texts   N images   T tokens   E dim of the shared space
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeInt, PositiveInt, require
from clearhead.config import Config
from clearhead.masks import Mask
from clearhead.models.encoder import EncoderConfig
from clearhead.models.vision import VisionConfig


@dataclass(frozen=True, kw_only=True)
class DualEncoderConfig(Config):
    """Configuration of `DualEncoder`.

    Attributes:
        text: Configuration of the text encoder.
        image: Configuration of the image encoder, without classes.
        d_shared: Dim of the shared space.
        eos: Id of the token whose vector represents the text (its first occurrence); None for the largest id.
        text_pooling: "eos" for the vector of that token, "last" for the last one (SigLIP).
        text_proj_bias: Whether the projection of texts has a bias.
        project_images: Whether images are projected; otherwise `d_shared` is the width of the image encoder.
        logit_bias: Whether a learned constant is added to all logits.
    """

    text: EncoderConfig
    image: VisionConfig
    d_shared: PositiveInt
    eos: NonNegativeInt | None = None
    text_pooling: Literal["eos", "last"] = "eos"
    text_proj_bias: bool = False
    project_images: bool = True
    logit_bias: bool = False

    def validate(self) -> None:
        classes, n = self.image.n_classes, self.text.vocab_size
        require(not classes, f"DualEncoderConfig: image has n_classes={classes}; expected 0")
        width = self.image.d_model * self.image.pooling.n_vectors
        require(
            self.project_images or self.d_shared == width,
            f"DualEncoderConfig: d_shared is {self.d_shared}, and images without a projection have {width} features",
        )
        require((self.eos or 0) < n, f"DualEncoderConfig: eos is {self.eos}; expected one of the text's {n} ids")

    def build(self) -> DualEncoder:
        return DualEncoder(self)


class DualEncoder(Module):
    """Text and image encoders, and the similarity of every text and image.

    Args:
        config: The configuration.
    """

    @explain_keywords
    def __init__(self, config: DualEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.text, self.image = config.text.build(), config.image.build()
        self.text_proj = nn.Linear(config.text.d_model, config.d_shared, bias=config.text_proj_bias)
        width = config.image.d_model * config.image.pooling.n_vectors
        self.image_proj = nn.Linear(width, config.d_shared, bias=False) if config.project_images else None
        for projection in (self.text_proj, self.image_proj):
            if projection is not None:
                nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # log of the scale, initialized as in CLIP
        self.logit_bias = nn.Parameter(torch.tensor(0.0)) if config.logit_bias else None

    def forward(
        self, ids: Int[Tensor, "B T"], images: Float[Tensor, "N C height width"], *, mask: Mask | None = None
    ) -> Float[Tensor, "N B"]:
        """Return the logits of the texts for each image: cosine similarities times exp(logit_scale)."""
        logits = self.logit_scale.exp() * self.embed_images(images) @ self.embed_texts(ids, mask=mask).T
        return logits if self.logit_bias is None else logits + self.logit_bias

    def embed_texts(self, ids: Int[Tensor, "B T"], *, mask: Mask | None = None) -> Float[Tensor, "B E"]:
        """Return a vector of norm 1 per text; pass `mask=padding(lengths)` if their lengths differ."""
        x, eos = self.text(ids, mask=mask), self.config.eos
        if self.config.text_pooling == "last":
            return F.normalize(self.text_proj(x[:, -1]), dim=-1)
        last = ids.argmax(1) if eos is None else (ids == eos).int().argmax(1)
        return F.normalize(self.text_proj(x[torch.arange(len(x), device=x.device), last]), dim=-1)

    def embed_images(self, images: Float[Tensor, "N C height width"]) -> Float[Tensor, "N E"]:
        """Return a vector of norm 1 per image."""
        x = self.image(images)
        return F.normalize(x if self.image_proj is None else self.image_proj(x), dim=-1)
