"""Tiny random reference models of every family, from transformers and timm.

Sizes are distinct primes if the family allows it, and every parameter is moved from its initial value, so that swapped
parameters do not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from clearhead.masks import Mask

V, L, H, D, F, T, B = 31, 2, 4, 6, 23, 11, 2
M = H * D  # not a prime, because heads divide it
MAX_LEN = 13


class Pooled(nn.Module):
    """The pooled output of an encoder: one vector per text."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.pool(self.encoder(ids, mask=mask, positions=positions))


class Classified(nn.Module):
    """The class logits of an encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.classify(self.encoder(ids, mask=mask, positions=positions))


class TokenClassified(nn.Module):
    """The class logits of each token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.classify_tokens(self.encoder(ids, mask=mask, positions=positions))


class TokenPredicted(nn.Module):
    """The logits of the vocabulary at each token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.predict_tokens(self.encoder(ids, mask=mask, positions=positions))


@dataclass(frozen=True)
class Peer:
    """A reference model of transformers: its class, its sizes, and how it is called."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], Tensor] = lambda: torch.randint(0, V, (B, T))
    output: str = "logits"
    # transformers computes rotary angles, sinusoids and RMS norms in float32 for every dtype.
    in_float32: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    comparable: Callable[[nn.Module], nn.Module] = lambda model: model  # wraps clearhead's model for the same output

    pads_source: ClassVar[bool] = True  # texts of different lengths can share a batch

    def example(self) -> tuple[Tensor, ...]:
        """Return the inputs of both models."""
        return (self.inputs(),)

    def build(self) -> nn.Module:
        transformers = pytest.importorskip(
            "transformers", reason="transformers, the reference to compare with, is missing"
        )
        config = getattr(transformers, self.config)(**self.sizes)
        with in_float64():
            return perturbed(getattr(transformers, self.model)(config, **self.options))

    def save(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)

    def reload(self, folder: Path) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.model)
        model, report = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True, **self.options)
        assert not any(report.values()), report
        return model.eval()

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return getattr(model(inputs), self.output)

    def padded(self, model: nn.Module, inputs: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        """Return the output for texts of different lengths; `is_token` is False for padding."""
        return getattr(model(inputs, attention_mask=is_token[0].long()), self.output)

    def weights(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        """Return attention weights by the path of clearhead's layer, with @run if a layer runs several times."""
        model.set_attn_implementation("eager")
        return {f"blocks.{i}.attention": w for i, w in enumerate(model(inputs, output_attentions=True).attentions)}

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that an export must reproduce bit for bit."""
        return model.state_dict()

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the gradients by the names in memory."""
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    def tokens(self) -> int | tuple[int, int] | None:
        """Return the argument `tokens` of `cost`; None for images."""
        example = self.example()[0]
        return example.shape[1] if example.dim() == 2 else None

    def n_parameters(self, model: nn.Module) -> int:
        """Return the number of trained parameters."""
        return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


class Eager(Peer):
    """A model whose other attention implementations omit an option."""

    def build(self) -> nn.Module:
        model = super().build()
        model.set_attn_implementation("eager")
        return model

    def reload(self, folder: Path) -> nn.Module:
        model = super().reload(folder)
        model.set_attn_implementation("eager")
        return model


class Routed(Peer):
    """Mixtral: its experts are one tensor in memory, and separate tensors in files."""

    def build(self) -> nn.Module:
        return self._with_eager_experts(super().build())

    def reload(self, folder: Path) -> nn.Module:
        return self._with_eager_experts(super().reload(folder))

    def _with_eager_experts(self, model: nn.Module) -> nn.Module:
        model.set_experts_implementation("eager")  # the other implementations do not support float64
        return model

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        gradients = {name.replace(".mlp.", ".block_sparse_moe."): g for name, g in super().gradients(model).items()}
        for name in [name for name in gradients if "experts" in name]:
            prefix, _, kind = name.rpartition(".")
            for i, gradient in enumerate(gradients.pop(name)):
                parts = dict(zip(("w1", "w3"), gradient.chunk(2), strict=True)) if "up" in kind else {"w2": gradient}
                gradients |= {f"{prefix}.{i}.{part}.weight": tensor for part, tensor in parts.items()}
        return gradients


class Answering(Peer):
    """A model that predicts the first and the last token of an answer."""

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return self._stacked(model(inputs))

    def padded(self, model: nn.Module, inputs: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        return self._stacked(model(inputs, attention_mask=is_token[0].long()))

    def _stacked(self, output: Any) -> Tensor:
        return torch.stack((output.start_logits, output.end_logits), dim=-1)


class OneBlock(Peer):
    """ALBERT: one block runs for every layer."""

    def weights(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        layers = super().weights(model, inputs).values()
        return {f"blocks.0.attention@{i}": weights for i, weights in enumerate(layers)}


class TwoSided(Peer):
    """An encoder-decoder."""

    def build(self) -> nn.Module:
        model = super().build()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        return model

    def example(self) -> tuple[Tensor, ...]:
        return self.inputs(), self.inputs()[:, :7]

    def run(self, model: nn.Module, source: Tensor, target: Tensor, **more: Any) -> Any:
        return getattr(model(source, decoder_input_ids=target), self.output)

    def padded(self, model: nn.Module, source: Tensor, target: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        masks = {"attention_mask": is_token[0].long(), "decoder_attention_mask": is_token[1].long()}
        return getattr(model(source, decoder_input_ids=target, **masks), self.output)

    def weights(self, model: nn.Module, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        for part in (model, model.get_encoder(), model.get_decoder()):  # in T5, each stack has its own configuration
            part.set_attn_implementation("eager")
        out = model(source, decoder_input_ids=target, output_attentions=True)
        attentions = {
            "encoder.blocks.{}.attention": out.encoder_attentions,
            "decoder.blocks.{}.attention": out.decoder_attentions,
            "decoder.blocks.{}.cross_attention": out.cross_attentions,
        }
        return {path.format(i): w for path, layers in attentions.items() for i, w in enumerate(layers)}

    def tokens(self) -> tuple[int, int]:
        source, target = self.example()
        return source.shape[1], target.shape[1]

    def n_parameters(self, model: nn.Module) -> int:
        # In transformers the bias of the logits is a buffer.
        return super().n_parameters(model) + getattr(model, "final_logits_bias", torch.empty(0)).numel()


class Towers(Peer):
    """CLIP: a text encoder and an image encoder."""

    def example(self) -> tuple[Tensor, ...]:
        return self.inputs(), squares()[:1].expand(3, -1, -1, -1) * torch.arange(1, 4).reshape(3, 1, 1, 1)

    def run(self, model: nn.Module, ids: Tensor, images: Tensor) -> Tensor:
        return getattr(model(ids, images), self.output)

    def weights(self, model: nn.Module, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
        for part in (model, model.text_model, model.vision_model):
            part.set_attn_implementation("eager")
        out = model(ids, images, output_attentions=True)
        towers = {"text": out.text_model_output, "image": out.vision_model_output}
        return {f"{name}.blocks.{i}.attention": w for name in towers for i, w in enumerate(towers[name].attentions)}

    def tokens(self) -> int:
        return T


class WhisperPeer(TwoSided):
    """Whisper: transformers takes frames as (B, features, frames), clearhead as (B, frames, features)."""

    pads_source: ClassVar[bool] = False  # all recordings have one length

    def example(self) -> tuple[Tensor, ...]:
        frames = torch.randn(B, 2 * WHISPER["max_source_positions"], WHISPER["num_mel_bins"], dtype=torch.float64)
        return frames, words()[:, :7]

    def run(self, model: nn.Module, source: Tensor, target: Tensor, **more: Any) -> Any:
        return super().run(model, source.transpose(1, 2), target)

    def padded(self, model: nn.Module, source: Tensor, target: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        return super().padded(model, source.transpose(1, 2), target, is_token=is_token)

    def weights(self, model: nn.Module, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        return super().weights(model, source.transpose(1, 2), target)


class T5Peer(TwoSided):
    """T5, with norms that compute in the model's dtype instead of float32."""

    def build(self) -> nn.Module:
        model = super().build()
        if self.sizes.get("tie_word_embeddings") is False:
            # T5 1.1 has an untied output matrix; transformers 5 initializes it tied.
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        return self._exact(model)

    def reload(self, folder: Path) -> nn.Module:
        return self._exact(super().reload(folder))

    def _exact(self, model: nn.Module) -> nn.Module:
        for part in model.modules():
            if type(part).__name__ == "T5LayerNorm":
                norm = {"weight": part.weight, "eps": part.variance_epsilon, "normalized_shape": part.weight.shape}
                part.forward = partial(torch.nn.functional.rms_norm, **norm)
        return model


class Dino(Peer):
    """DINOv2, without the mask token of pretraining, which clearhead does not load."""

    def reload(self, folder: Path) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.model)
        model, report = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
        assert all(name.endswith("embeddings.mask_token") for names in report.values() for name in names), report
        return model.eval()

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().state(model).items() if not name.endswith("mask_token")}

    def n_parameters(self, model: nn.Module) -> int:
        return sum(weight.numel() for weight in self.state(model).values())


class Timm(Peer):
    """A model of timm."""

    def build(self) -> nn.Module:
        timm = pytest.importorskip("timm", reason="timm, the reference to compare with, is missing")
        return perturbed(timm.create_model(self.model, **self.sizes))

    def save(self, model: nn.Module, folder: Path) -> None:
        from timm.models import save_for_hf

        save_for_hf(model, folder, model_args=self.sizes, safe_serialization="both")
        for pickle in folder.glob("*.bin"):
            pickle.unlink()

    def reload(self, folder: Path) -> nn.Module:
        import timm

        with in_float64():
            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs)

    def weights(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for i, block in enumerate(model.blocks):
            block.attn.fused_attn = False
            keep = partial(weights.__setitem__, f"blocks.{i}.attention")
            block.attn.attn_drop.register_forward_hook(lambda _m, _i, out, keep=keep: keep(out))
        model(inputs)
        return weights


@contextmanager
def in_float64() -> Iterator[None]:
    """Build models in float64, including buffers; a later conversion would keep values rounded to float32."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def perturbed(model: nn.Module) -> nn.Module:
    """Perturb every parameter (zero biases and unit norms would hide a swap), in float64 and evaluation mode."""
    torch.manual_seed(13)
    model = model.double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # Marian's sinusoids are frozen parameters
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def words() -> Tensor:
    """Return ids without 0 and 1, which are padding in some families."""
    return torch.randint(2, V, (B, T))


def ids_with_end() -> Tensor:
    """Return ids with the end id V − 2 at a different position in each row (twice in one), and a larger id."""
    ids = torch.randint(2, V - 2, (B, T))
    ids[0, 4] = ids[0, 7] = ids[1, 9] = V - 2
    ids[:, 2] = V - 1
    return ids


def squares() -> Tensor:
    return torch.randn(B, 2, 9, 9, dtype=torch.float64)


def images() -> Tensor:
    return torch.randn(B, 2, 6, 9, dtype=torch.float64)


LLAMA = {
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": V,
    "n_positions": MAX_LEN,
    "n_embd": M,
    "n_layer": L,
    "n_head": H,
    "n_inner": F,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1 / 3}
}
BERT = {
    "vocab_size": V,
    "max_position_embeddings": MAX_LEN,
    "hidden_size": M,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": F,
    "type_vocab_size": 3,
}
ROBERTA = BERT | {"type_vocab_size": 1, "max_position_embeddings": MAX_LEN + 2, "layer_norm_eps": 1e-5}
ALBERT = BERT | {"embedding_size": 14, "num_hidden_layers": 3}
MODERN = {key: value for key, value in BERT.items() if key != "type_vocab_size"} | {
    "num_hidden_layers": 5,
    "local_attention": 6,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = {"inputs": words, "output": "last_hidden_state"}
POOLED = TOKENS | {"output": "pooler_output", "comparable": Pooled}
CLASSES = {"inputs": words, "comparable": Classified}
TOKEN_CLASSES = {"inputs": words, "comparable": TokenClassified}
MASKED = {"inputs": words, "comparable": TokenPredicted}
VIT = {
    "image_size": (6, 9),
    "patch_size": 3,
    "num_channels": 2,
    "hidden_size": M,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": F,
    "num_labels": 5,
}
BART = {
    "vocab_size": V,
    "max_position_embeddings": MAX_LEN,
    "d_model": M,
    "encoder_layers": L,
    "decoder_layers": 3,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
WHISPER = {key: value for key, value in BART.items() if "max_pos" not in key and "forced" not in key} | {
    "max_source_positions": 17,
    "max_target_positions": MAX_LEN,
    "num_mel_bins": 5,
}
T5 = {
    "vocab_size": V,
    "d_model": M,
    "d_kv": 5,
    "d_ff": F,
    "num_layers": L,
    "num_decoder_layers": 3,
    "num_heads": H,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
}
CLIP = {
    "text_config": {
        **{key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": H,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": 1,
        "eos_token_id": V - 2,
    },
    "vision_config": {
        "hidden_size": 20,
        "intermediate_size": 19,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 9,
        "patch_size": 3,
        "num_channels": 2,
    },
    "projection_dim": 7,
}
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {
    "image_size": 9,
    "mlp_ratio": 2,
    "layerscale_value": 0.3,
}
TIMM = {
    "img_size": (6, 9),
    "patch_size": 3,
    "in_chans": 2,
    "num_classes": 5,
    "embed_dim": M,
    "depth": L,
    "num_heads": H,
    "mlp_ratio": F / M + 1e-9,
}

PEERS: dict[str, Peer] = {
    "gpt2": Peer("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2 untied": Peer("GPT2LMHeadModel", "GPT2Config", GPT2 | {"tie_word_embeddings": False, "n_inner": None}),
    "llama": Peer("LlamaForCausalLM", "LlamaConfig", LLAMA, in_float32=True),
    "llama biased, tied": Peer(
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_theta": 500.0},
        in_float32=True,
    ),
    "mistral": Peer(
        "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 5, "head_dim": 10}, in_float32=True
    ),
    "mixtral": Routed(
        "MixtralForCausalLM",
        "MixtralConfig",
        LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5},
        in_float32=True,
    ),
    "llama 3.1": Peer(
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 300.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 7,
            },
            "attention_bias": True,
        },
        in_float32=True,
    ),
    "llama linear": Peer(
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
        in_float32=True,
    ),
    "qwen2": Peer("Qwen2ForCausalLM", "Qwen2Config", LLAMA, in_float32=True),
    "qwen2 yarn": Peer(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 3.0,
                "original_max_position_embeddings": 40,
                "beta_fast": 4.0,
            },
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
        in_float32=True,
    ),
    "qwen3": Peer("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 10}, in_float32=True),
    "gpt_neox": Peer("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, in_float32=True),
    "gpt_neox serial": Peer(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        NEOX | {"use_parallel_residual": False, "attention_bias": False},
        in_float32=True,
    ),
    "gemma": Peer("GemmaForCausalLM", "GemmaConfig", LLAMA | {"head_dim": 10}, words, in_float32=True),
    "gemma2": Eager(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        LLAMA
        | {
            "head_dim": 10,
            "num_hidden_layers": 3,
            "sliding_window": 7,  # so that padding attends to a token; transformers returns NaN otherwise
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
        words,
        in_float32=True,
    ),
    "phi3": Peer("Phi3ForCausalLM", "Phi3Config", LLAMA | {"pad_token_id": 0, "sliding_window": 5}, in_float32=True),
    "bert": Peer("BertModel", "BertConfig", BERT, **TOKENS, options={"add_pooling_layer": False}),
    "bert pooled": Peer("BertModel", "BertConfig", BERT | {"hidden_act": "gelu_new"}, **POOLED),
    "roberta": Peer("RobertaModel", "RobertaConfig", ROBERTA, **TOKENS, options={"add_pooling_layer": False}),
    "roberta pooled": Peer("RobertaModel", "RobertaConfig", ROBERTA, **POOLED),
    "albert": OneBlock("AlbertModel", "AlbertConfig", ALBERT, **TOKENS, options={"add_pooling_layer": False}),
    "albert pooled": OneBlock("AlbertModel", "AlbertConfig", ALBERT, **POOLED),
    "modernbert": Peer("ModernBertModel", "ModernBertConfig", MODERN, **TOKENS, in_float32=True),
    "modernbert biased": Peer(
        "ModernBertModel",
        "ModernBertConfig",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu"}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_hidden_layers": 3},
        **TOKENS,
        in_float32=True,
    ),
    "bert classes": Peer("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 5}, **CLASSES),
    "roberta classes": Peer(
        "RobertaForSequenceClassification", "RobertaConfig", ROBERTA | {"num_labels": 5}, **CLASSES
    ),
    "albert classes": OneBlock("AlbertForSequenceClassification", "AlbertConfig", ALBERT, **CLASSES),
    "bert token": Peer("BertForTokenClassification", "BertConfig", BERT | {"num_labels": 5}, **TOKEN_CLASSES),
    "roberta token": Peer(
        "RobertaForTokenClassification", "RobertaConfig", ROBERTA | {"num_labels": 5}, **TOKEN_CLASSES
    ),
    "albert token": OneBlock(
        "AlbertForTokenClassification", "AlbertConfig", ALBERT | {"num_labels": 5}, **TOKEN_CLASSES
    ),
    "bert span": Answering("BertForQuestionAnswering", "BertConfig", BERT, **TOKEN_CLASSES),
    "roberta span": Answering("RobertaForQuestionAnswering", "RobertaConfig", ROBERTA, **TOKEN_CLASSES),
    "bert masked": Peer("BertForMaskedLM", "BertConfig", BERT, **MASKED),
    "roberta masked": Peer("RobertaForMaskedLM", "RobertaConfig", ROBERTA, **MASKED),
    "albert masked": OneBlock("AlbertForMaskedLM", "AlbertConfig", ALBERT, **MASKED),
    "modernbert masked": Peer("ModernBertForMaskedLM", "ModernBertConfig", MODERN, **MASKED, in_float32=True),
    "bart": TwoSided("BartForConditionalGeneration", "BartConfig", BART, words),
    "marian": TwoSided(
        "MarianMTModel",
        "MarianConfig",
        BART | {"scale_embedding": True, "activation_function": "swish"},
        words,
        in_float32=True,
    ),
    "pegasus": TwoSided(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        BART | {"scale_embedding": True, "activation_function": "relu"},
        words,
        in_float32=True,
    ),
    "whisper": WhisperPeer("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "t5": T5Peer("T5ForConditionalGeneration", "T5Config", T5, words),
    "t5 1.1": T5Peer(
        "T5ForConditionalGeneration",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        words,
    ),
    "vit": Peer("ViTForImageClassification", "ViTConfig", VIT, images),
    "deit": Peer("DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT, images),
    "dinov2": Dino("Dinov2ForImageClassification", "Dinov2Config", DINO, squares),
    "dinov2 bare": Dino(
        "Dinov2Model",
        "Dinov2Config",
        DINO | {"use_mask_token": False, "use_swiglu_ffn": True},
        squares,
        output="pooler_output",
    ),
    "dinov2_with_registers": Dino(
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        DINO | {"num_register_tokens": 2},
        squares,
    ),
    "clip": Towers("CLIPModel", "CLIPConfig", CLIP, ids_with_end, output="logits_per_image"),
    "clip largest": Towers(
        "CLIPModel",
        "CLIPConfig",
        CLIP
        | {"text_config": CLIP["text_config"] | {"eos_token_id": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-4}}
        | {"vision_config": CLIP["vision_config"] | {"hidden_act": "gelu_new"}},
        output="logits_per_image",
    ),
    "timm": Timm("vit_base_patch16_224", "", TIMM, images),
    "timm mean": Timm(
        "vit_base_patch16_224", "", TIMM | {"global_pool": "avg", "class_token": False, "fc_norm": False}, images
    ),
}
