"""Models that check derivations: `model = "vision"` in a file compares its steps with the model.

A model receives the inputs and steps in float64 and returns its own results by key of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clearhead.models import EncoderDecoder, EncoderDecoderConfig, VisionConfig, VisionTransformer
from clearhead.nn import LayerNorm, MultiHeadAttention, PatchEmbedding, PostNorm, ReLU
from clearhead.nn.positions import LearnedPositions

Values = dict[str, Tensor]
Outputs = dict[str, Any]  # tensors or tables of integers
_COLDEST = 1e-5  # a temperature at which the float64 softmax equals its limit
_TINY = 1e-300  # too small to change a variance


def meta_layer(d: int, h: int, bias: bool = False) -> MultiHeadAttention:
    """Return a layer on the meta device."""
    with torch.device("meta"):
        return MultiHeadAttention(d, h, bias=bias)


def line_counts(layer: MultiHeadAttention, queries: int, keys: int) -> list[int]:
    """Return torch's operation counts of Q, K, V, scores, weighted sum and output.

    A multiplication and its addition count as one operation; torch counts two.
    """
    x, y = (torch.empty(length, layer.d_model, device="meta") for length in (queries, keys))
    counts: list[int] = []

    def line(function: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            result = function(*parts)
        counts.append(counter.get_total_flops() // 2)
        return result

    projected = (line(layer.q_proj, x), line(layer.k_proj, y), line(layer.v_proj, y))
    q, k, v = (z.unflatten(-1, (layer.n_heads, -1)).transpose(0, 1) for z in projected)
    o = line(torch.matmul, line(torch.matmul, q, k.mT).softmax(-1), v)
    line(layer.o_proj, o.transpose(0, 1).flatten(1))
    return counts


def _heads(inputs: Values) -> Outputs:
    n, m, d, h = (int(inputs[name]) for name in "nmdh")
    layer = meta_layer(d, h)
    biased = meta_layer(d, h, bias=True)
    x, y = (torch.empty(1, length, d, device="meta") for length in (n, m))
    projected = (layer.q_proj(x), layer.k_proj(y), layer.v_proj(y))
    q, k, v = (z.unflatten(-1, (h, -1)).transpose(1, 2) for z in projected)
    scores = q @ k.mT
    head = scores.softmax(-1) @ v
    tensors = (x, y, q, k, v, scores, scores.softmax(-1), head, head.transpose(1, 2).flatten(2), layer(x, y))
    return {
        "shapes": [list(tensor.shape[-2:]) for tensor in tensors],
        "total": [[sum(p.numel() for p in layer.parameters())]],
        "biased": [[sum(p.numel() for p in biased.parameters())]],
        "weights": [[scores.numel()]],
    }


def _lines(inputs: Values) -> Outputs:
    d, h, t, s = (int(inputs[name]) for name in "dhts")
    counts = [[count] for count in line_counts(meta_layer(d, h), t, s)]
    return {"lines": counts, "numbers": counts}


def _vision(inputs: Values) -> Outputs:
    P, H, W, c, d = (int(inputs[name]) for name in "PHWcd")
    config = VisionConfig(
        image_size=(H, W), patch_size=P, n_channels=c, d_model=d, n_heads=1, d_ff=1, n_layers=1, n_classes=2
    )
    with torch.device("meta"):
        model = VisionTransformer(config)
        larger = VisionTransformer(config.replace(image_size=(2 * H, 2 * W)))
    sizes, doubled = ({name: p.numel() for name, p in m.named_parameters()} for m in (model, larger))
    (table,) = (name for name in sizes if name.startswith("positions"))
    tokens, more = sizes[table] // d, doubled[table] // d
    assert isinstance(model.embedding, PatchEmbedding)
    patches = model.embedding.patches(torch.empty(1, c, H, W, device="meta"))
    return {
        "grid": [config.grid],
        "patches": [[patches.shape[1]]],
        "tokens": [[tokens]],
        "pixels": [[patches.shape[2]]],
        "projection": [[sum(size for name, size in sizes.items() if name.startswith("embedding"))]],
        "embeddings": [[sizes["cls"], sizes[table]]],
        "doubled": [[more, more**2]],
    }


def _encoder_decoder(inputs: Values) -> Outputs:
    """Run the model with these parameters; W_Q is scaled so that the scores are divided by T."""
    V, M = inputs["E_t"].shape
    config = EncoderDecoderConfig(
        vocab_size=V,
        source_vocab_size=len(inputs["E_s"]),
        max_len=len(inputs["pos"]),
        d_model=M,
        n_heads=1,
        d_head=inputs["Q_e"].shape[1],
        d_ff=inputs["A_e"].shape[1],
        bias=False,
        norm=LayerNorm(eps=_TINY, bias=False),
        residual=PostNorm(),
        activation=ReLU(),
        positions=LearnedPositions(max_len=len(inputs["pos"])),
        n_encoder_layers=1,
        n_decoder_layers=1,
    )
    model = EncoderDecoder(config).double()
    scale = config.d_head**0.5 / max(float(inputs["T"]), _COLDEST) if config.d_head else 1.0
    block_paths = {"e": "encoder.blocks.0", "d": "decoder.blocks.0"}
    parts = {side: f"{path}.attention" for side, path in block_paths.items()} | {
        "c": "decoder.blocks.0.cross_attention"
    }
    state = {"encoder.embedding.weight": inputs["E_s"], "decoder.embedding.weight": inputs["E_t"]}
    for side, path in parts.items():
        state |= {f"{path}.{name.lower()}_proj.weight": inputs[f"{name}_{side}"].T for name in "QKVO"}
        state[f"{path}.q_proj.weight"] = state[f"{path}.q_proj.weight"] * scale
    for side, path in block_paths.items():
        state[f"{path}.feed_forward.up.weight"] = inputs[f"A_{side}"].T
        state[f"{path}.feed_forward.down.weight"] = inputs[f"B_{side}"].T
    state |= {
        name: inputs["pos"] for name, _ in model.named_parameters() if name.partition(".")[2].startswith("positions")
    }
    model.load_state_dict(state, strict=False)
    source, target, targets = (inputs[name].long() - 1 for name in ("read", "write", "next"))
    with torch.no_grad():
        memory = model.encoder(source)[0]
        logits = model(source, target)[0]
    return {
        "memory": memory,
        "logits": logits,
        "p": logits.softmax(-1),
        "loss": torch.nn.functional.cross_entropy(logits, targets[0], reduction="sum").reshape(1, 1),
    }


MODELS: dict[str, tuple[str, Callable[[Values], Outputs]]] = {
    "heads": ("MultiHeadAttention, its shapes and parameters", _heads),
    "lines": ("torch's count of the operations of each line", _lines),
    "vision": ("VisionTransformer, its tokens and parameters", _vision),
    "encoder-decoder": ("EncoderDecoder in float64 with these weights", _encoder_decoder),
}
