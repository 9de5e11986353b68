"""Tiny random reference models of the families of audio encoders."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from tests.support.reference_models import B, F, H, L, M, Peer

# Three encoder frames per 12 samples; the first frame depends on 26 samples.
WAV2VEC2 = {
    "vocab_size": 13,
    "hidden_size": M,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": F,
    "conv_dim": (6, 7, 8),
    "conv_kernel": (5, 4, 3),
    "conv_stride": (3, 2, 2),
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 3,
}


def waveforms() -> Tensor:
    return torch.randn(B, 173, dtype=torch.float64)


class Wav2Vec2(Peer):
    """wav2vec 2.0, without the vector of masked frames of pre-training, which clearhead does not load."""

    unused: ClassVar[str] = "masked_spec_embed"

    def reload(self, folder: Path) -> nn.Module:
        model = super().reload(folder)
        model.set_attn_implementation("eager")
        return model

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().state(model).items() if not name.endswith(self.unused)}

    def tokens(self) -> None:
        return None

    def n_parameters(self, model: nn.Module) -> int:
        return sum(weight.numel() for name, weight in model.named_parameters() if not name.endswith(self.unused))


AUDIO: dict[str, Peer] = {
    "wav2vec2": Wav2Vec2("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2, waveforms),
    "wav2vec2 stable": Wav2Vec2(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        WAV2VEC2
        | {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True, "hidden_act": "relu"}
        | {"num_conv_pos_embeddings": 5, "feat_extract_activation": "silu", "layer_norm_eps": 1e-3},
        waveforms,
        output="last_hidden_state",
    ),
}
