"""Other people's models as oracles: how to import them, and whose weight is whose.

A table maps a peer's tensors to ours by splitting and turning them. It serves weights and gradients alike, because both
are rearranged in the same way.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from torch import Tensor, nn

Tensors = dict[str, Tensor]


def import_transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="transformers, the peer to compare with, is not installed")


def import_timm() -> ModuleType:
    return pytest.importorskip("timm", reason="timm, the peer to compare with, is not installed")


def weights(model: nn.Module) -> Tensors:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def gradients(model: nn.Module) -> Tensors:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def copy_into(model: nn.Module, tensors: Tensors) -> None:
    """Every parameter of ours is set, and nothing is left over."""
    names = {name for name, _ in model.named_parameters()}  # a tied weight has one name here
    assert names == set(tensors)
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, strict=False)


def linear(theirs: Tensors, ours: str, name: str) -> Tensors:
    """One linear map or norm, weight and (if there is one) bias."""
    return {f"{ours}.{part}": theirs[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in theirs}


def split(tensors: tuple[Tensor, ...], ours: str) -> Tensors:
    """A fused (q, k, v) weight and bias, rows stacked, as three linear maps."""
    found: Tensors = {}
    for part, tensor in zip(("weight", "bias"), tensors, strict=False):
        for name, piece in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
            found[f"{ours}.{name}.{part}"] = piece
    return found


def from_gpt2(t: Tensors, n_layers: int) -> Tensors:
    """transformers' GPT-2 keeps its maps as (inputs, outputs)."""
    t = {name: x.T if name.endswith("weight") and x.dim() == 2 and ".h." in name else x for name, x in t.items()}
    ours = {"embedding.weight": t["transformer.wte.weight"], "positions.weight": t["transformer.wpe.weight"]}
    ours |= linear(t, "norm", "transformer.ln_f")
    for i in range(n_layers):
        a, b = f"blocks.{i}", f"transformer.h.{i}"
        ours |= split((t[f"{b}.attn.c_attn.weight"], t[f"{b}.attn.c_attn.bias"]), f"{a}.attention")
        ours |= linear(t, f"{a}.attention.o_proj", f"{b}.attn.c_proj")
        ours |= linear(t, f"{a}.norm1", f"{b}.ln_1") | linear(t, f"{a}.norm2", f"{b}.ln_2")
        ours |= linear(t, f"{a}.feed_forward.up", f"{b}.mlp.c_fc") | linear(
            t, f"{a}.feed_forward.down", f"{b}.mlp.c_proj"
        )
    return ours


def from_bert(t: Tensors, n_layers: int, *, fold: bool) -> Tensors:
    """`fold` adds the embedding of segment 0, which every token gets, to the positions: right for weights, and for
    gradients left out, since a sum passes its gradient on to each part unchanged."""
    places = t["embeddings.position_embeddings.weight"]
    ours = {"embedding.weight": t["embeddings.word_embeddings.weight"]}
    ours["positions.weight"] = places + t["embeddings.token_type_embeddings.weight"][0] if fold else places
    ours |= linear(t, "embedding_norm", "embeddings.LayerNorm")
    for i in range(n_layers):
        a, b = f"blocks.{i}", f"encoder.layer.{i}"
        for mine, theirs in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            ours |= linear(t, f"{a}.attention.{mine}", f"{b}.attention.self.{theirs}")
        ours |= linear(t, f"{a}.attention.o_proj", f"{b}.attention.output.dense")
        ours |= linear(t, f"{a}.norm1", f"{b}.attention.output.LayerNorm")
        ours |= linear(t, f"{a}.norm2", f"{b}.output.LayerNorm")
        ours |= linear(t, f"{a}.feed_forward.up", f"{b}.intermediate.dense")
        ours |= linear(t, f"{a}.feed_forward.down", f"{b}.output.dense")
    return ours


# transformers 5 renamed the parts of its ViT; version 4's names, in this order, become version 5's.
VIT_NAMES = {
    "vit.encoder.layer.": "vit.layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def from_vit(t: Tensors, n_layers: int) -> Tensors:
    """transformers' ViT."""
    for old, new in VIT_NAMES.items():
        t = {name.replace(old, new): x for name, x in t.items()}
    ours = {
        "cls": t["vit.embeddings.cls_token"][0],
        "positions.weight": t["vit.embeddings.position_embeddings"][0],
    }
    ours |= _patches(t, "vit.embeddings.patch_embeddings.projection")
    ours |= linear(t, "norm", "vit.layernorm") | linear(t, "head", "classifier")
    for i in range(n_layers):
        a, b = f"blocks.{i}", f"vit.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            ours |= linear(t, f"{a}.attention.{name}", f"{b}.attention.{name}")
        ours |= linear(t, f"{a}.norm1", f"{b}.layernorm_before") | linear(t, f"{a}.norm2", f"{b}.layernorm_after")
        ours |= linear(t, f"{a}.feed_forward.up", f"{b}.mlp.fc1") | linear(t, f"{a}.feed_forward.down", f"{b}.mlp.fc2")
    return ours


def from_timm(t: Tensors, n_layers: int) -> Tensors:
    ours = {"cls": t["cls_token"][0]} if "cls_token" in t else {}
    ours |= {"positions.weight": t["pos_embed"][0]} | _patches(t, "patch_embed.proj")
    ours |= linear(t, "norm", "norm") | linear(t, "head", "head")
    for i in range(n_layers):
        b = f"blocks.{i}"
        ours |= split((t[f"{b}.attn.qkv.weight"], t[f"{b}.attn.qkv.bias"]), f"{b}.attention")
        ours |= linear(t, f"{b}.attention.o_proj", f"{b}.attn.proj")
        ours |= linear(t, f"{b}.norm1", f"{b}.norm1") | linear(t, f"{b}.norm2", f"{b}.norm2")
        ours |= linear(t, f"{b}.feed_forward.up", f"{b}.mlp.fc1") | linear(t, f"{b}.feed_forward.down", f"{b}.mlp.fc2")
    return ours


def _patches(t: Tensors, theirs: str) -> Tensors:
    """A strided convolution's kernel, flattened, is the linear map over flattened patches."""
    return {
        "embedding.projection.weight": t[f"{theirs}.weight"].flatten(1),
        "embedding.projection.bias": t[f"{theirs}.bias"],
    }


def from_llama(t: Tensors, n_layers: int) -> Tensors:
    ours = {"embedding.weight": t["model.embed_tokens.weight"], "head.weight": t["lm_head.weight"]}
    ours |= linear(t, "norm", "model.norm")
    for i in range(n_layers):
        a, b = f"blocks.{i}", f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            ours |= linear(t, f"{a}.attention.{name}", f"{b}.self_attn.{name}")
        for name in ("gate", "up", "down"):
            ours |= linear(t, f"{a}.feed_forward.{name}", f"{b}.mlp.{name}_proj")
        ours |= linear(t, f"{a}.norm1", f"{b}.input_layernorm")
        ours |= linear(t, f"{a}.norm2", f"{b}.post_attention_layernorm")
    return ours


def from_torch(t: Tensors, n_layers: int, stack: str) -> Tensors:
    """One half, "encoder" or "decoder", of nn.Transformer."""
    ours = linear(t, f"{stack}.norm", f"{stack}.norm")
    for i in range(n_layers):
        a, b = f"{stack}.blocks.{i}", f"{stack}.layers.{i}"
        parts = [("attention", "self_attn")] + [("cross_attention", "multihead_attn")] * (stack == "decoder")
        for mine, theirs in parts:
            ours |= split((t[f"{b}.{theirs}.in_proj_weight"], t[f"{b}.{theirs}.in_proj_bias"]), f"{a}.{mine}")
            ours |= linear(t, f"{a}.{mine}.o_proj", f"{b}.{theirs}.out_proj")
        names = ["norm1", "norm_cross", "norm2"] if stack == "decoder" else ["norm1", "norm2"]
        for place, name in enumerate(names, start=1):
            ours |= linear(t, f"{a}.{name}", f"{b}.norm{place}")
        ours |= linear(t, f"{a}.feed_forward.up", f"{b}.linear1") | linear(t, f"{a}.feed_forward.down", f"{b}.linear2")
    return ours
