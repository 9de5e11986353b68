"""Tests of Block against torch's encoder and decoder layers, transformers' Llama layer, and its equation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.masks import causal, padding
from clearhead.nn import (
    GELU,
    Block,
    BlockConfig,
    KVCache,
    LayerNorm,
    Parallel,
    PostNorm,
    PreNorm,
    ReLU,
    RMSNorm,
    SwiGLU,
)
from clearhead.nn.positions import ALiBi, Rotary
from tests.support.rounding import assert_equal_up_to_rounding

B, T, S, M, H, D_FF = 2, 5, 7, 21, 3, 13
F64 = torch.float64
ACTIVATIONS = {"relu": ReLU(), "gelu": GELU()}


def config(**changes) -> BlockConfig:
    return BlockConfig(**{"d_model": M, "n_heads": H, "d_ff": D_FF} | changes)


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with every parameter (norms and biases too) away from its start."""
    module = module.to(F64)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return module


def x_and_memory() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, T, M, dtype=F64), torch.randn(B, S, M, dtype=F64)


# ------------------------------------------------------------------------------------------- torch's layers


def pairs(block: Block, layer: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter, slice]]:
    """Return triples: clearhead parameter, torch parameter, and the rows of the torch parameter that it equals."""
    result = []
    attentions = [(block.attention, layer.self_attn)]
    norms = [(block.norm1, layer.norm1), (block.norm2, layer.norm2)]
    if block.cross_attention is not None:
        attentions.append((block.cross_attention, layer.multihead_attn))
        norms = [(block.norm1, layer.norm1), (block.norm_cross, layer.norm2), (block.norm2, layer.norm3)]
    for module, reference in attentions:
        for n, part in enumerate((module.q_proj, module.k_proj, module.v_proj)):
            rows = slice(n * M, (n + 1) * M)
            result += [(part.weight, reference.in_proj_weight, rows), (part.bias, reference.in_proj_bias, rows)]
        result += module_pairs(module.o_proj, reference.out_proj)
    result += module_pairs(block.feed_forward.up, layer.linear1)
    result += module_pairs(block.feed_forward.down, layer.linear2)
    for module, reference in norms:
        result += module_pairs(module, reference)
    assert len(result) == len(list(block.parameters()))
    return result


def module_pairs(module: nn.Module, reference: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter, slice]]:
    return [(module.weight, reference.weight, slice(None)), (module.bias, reference.bias, slice(None))]


def copy(block: Block, layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter, reference, rows in pairs(block, layer):
            parameter.copy_(reference[rows])


def assert_same_gradients(block: Block, layer: nn.Module) -> None:
    for parameter, reference, rows in pairs(block, layer):
        torch.testing.assert_close(parameter.grad, reference.grad[rows], rtol=1e-10, atol=1e-10)


def torch_layer(kind: type[nn.Module], norm_first: bool, activation: str, dropout: float = 0.0) -> nn.Module:
    return shaken(
        kind(
            M,
            H,
            D_FF,
            dropout=dropout,
            activation=activation,
            batch_first=True,
            norm_first=norm_first,
            dtype=F64,
        )
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("lengths", [None, [5, 3]])
def test_block_equals_torch_encoder_layer(norm_first, activation, lengths):
    layer = torch_layer(nn.TransformerEncoderLayer, norm_first, activation)
    residual = PreNorm() if norm_first else PostNorm()
    block = Block(config(residual=residual, activation=ACTIVATIONS[activation])).to(F64)
    copy(block, layer)
    x = x_and_memory()[0].requires_grad_()
    twin = x.detach().clone().requires_grad_()
    hidden = None if lengths is None else torch.arange(T)[None] >= torch.tensor(lengths)[:, None]

    expected = layer(twin, src_key_padding_mask=hidden)
    out = block(x, mask=None if lengths is None else padding(lengths))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)

    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-10, atol=1e-10)
    assert_same_gradients(block, layer)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_block_equals_torch_decoder_layer(norm_first, activation):
    layer = torch_layer(nn.TransformerDecoderLayer, norm_first, activation)
    residual = PreNorm() if norm_first else PostNorm()
    block = Block(config(residual=residual, activation=ACTIVATIONS[activation]), cross=True).to(F64)
    copy(block, layer)
    x, memory = (tensor.requires_grad_() for tensor in x_and_memory())
    twins = [tensor.detach().clone().requires_grad_() for tensor in (x, memory)]
    lengths = [7, 2]

    expected = layer(
        *twins,
        tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),
        memory_key_padding_mask=torch.arange(S)[None] >= torch.tensor(lengths)[:, None],
    )
    out = block(x, mask=causal(), memory=memory, memory_mask=padding(lengths))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)

    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for leaf, reference in zip((x, memory), twins, strict=True):
        torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-10, atol=1e-10)
    assert_same_gradients(block, layer)


@pytest.mark.parametrize("where", ["dropout", "feed_forward_dropout"])
def test_block_dropout_is_applied_as_in_torch_layer(where):
    """From one seed both draw the same features to drop, so that training outputs are equal too."""
    layer = torch_layer(nn.TransformerEncoderLayer, True, "gelu", dropout=0.4)
    layer.self_attn.dropout = 0.0
    if where == "dropout":
        layer.dropout.p = 0.0  # the one inside the feed-forward
    else:
        layer.dropout1.p = layer.dropout2.p = 0.0  # those on the branches
    block = Block(config(**{where: 0.4})).to(F64)
    copy(block, layer)
    x = x_and_memory()[0][:1]  # torch lays its batch out another way, which would pair the draws differently
    outputs = []
    for module in (block, layer):
        torch.manual_seed(5)
        outputs.append(module(x))
    torch.testing.assert_close(*outputs, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(outputs[0], block.eval()(x))


@pytest.mark.parametrize("where", ["dropout", "attention_dropout", "feed_forward_dropout"])
def test_block_dropout_is_applied_in_training_only(where):
    x, memory = x_and_memory()
    block = shaken(Block(config(**{where: 0.5}), cross=True))
    plain = Block(config(), cross=True).to(F64)
    plain.load_state_dict(block.state_dict())
    assert not torch.equal(block(x, memory=memory), block(x, memory=memory))
    block.eval()
    assert_equal_up_to_rounding(block(x, memory=memory), plain(x, memory=memory))


# ------------------------------------------------------------------------------------- by hand and by Llama


@pytest.mark.parametrize("norm", [LayerNorm(), LayerNorm(bias=False), RMSNorm()], ids=str)
@pytest.mark.parametrize("cross", [True, False])
def test_pre_and_post_norm_equal_their_equations(norm, cross):
    x, memory = x_and_memory()
    memory_kwargs = {"memory": memory} if cross else {}
    pre = shaken(Block(config(norm=norm), cross=cross))
    post = Block(config(norm=norm, residual=PostNorm()), cross=cross).to(F64)
    post.load_state_dict(pre.state_dict())
    read = pre.cross_attention

    y = x + pre.attention(pre.norm1(x), mask=causal())
    y = y + read(pre.norm_cross(y), memory) if cross else y
    y = y + pre.feed_forward(pre.norm2(y))
    assert_equal_up_to_rounding(pre(x, mask=causal(), **memory_kwargs), y)

    y = pre.norm1(x + pre.attention(x, mask=causal()))
    y = pre.norm_cross(y + read(y, memory)) if cross else y
    y = pre.norm2(y + pre.feed_forward(y))
    assert_equal_up_to_rounding(post(x, mask=causal(), **memory_kwargs), y)


def test_block_equals_transformers_llama_layer():
    """RMSNorm, SwiGLU, rotary positions and grouped heads, all at once."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    width, heads, kv_heads, d_head = 24, 6, 2, 4
    settings = LlamaConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=d_head,
        intermediate_size=37,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    layer = shaken(LlamaDecoderLayer(settings, layer_idx=0))
    block = Block(
        BlockConfig(
            d_model=width,
            n_heads=heads,
            n_kv_heads=kv_heads,
            d_head=d_head,
            d_ff=37,
            bias=False,
            norm=RMSNorm(),
            activation=SwiGLU(),
            rotary=Rotary(),
        )
    ).to(F64)
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **{f"attention.{p}_proj": f"self_attn.{p}_proj" for p in "qkvo"},
        **{f"feed_forward.{p}": f"mlp.{p}_proj" for p in ("up", "gate", "down")},
    }
    reference = layer.state_dict()
    block.load_state_dict({f"{target}.weight": reference[f"{name}.weight"] for target, name in names.items()})

    x = torch.randn(B, T, width, dtype=F64)
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, d_head, 2, dtype=F64) / d_head)
    turn = torch.cat((angle, angle), -1).expand(B, -1, -1)
    hidden = torch.full((T, T), -torch.inf, dtype=F64).triu(1).expand(B, 1, T, T)
    expected = layer(x, attention_mask=hidden, position_embeddings=(turn.cos(), turn.sin()))
    expected = expected[0] if isinstance(expected, tuple) else expected
    # Llama's norm computes in float32 for every input dtype.
    torch.testing.assert_close(block(x, mask=causal()), expected, rtol=1e-5, atol=1e-5)


def test_position_bias_is_added_to_self_attention_scores_only():
    x, memory = x_and_memory()
    block = shaken(Block(config(), cross=True))
    bias = ALiBi().build(H)(T, T, 0).dense().to(F64)
    y = x + block.attention(block.norm1(x), bias=bias)
    y = y + block.cross_attention(block.norm_cross(y), memory)
    expected = y + block.feed_forward(block.norm2(y))
    out = block(x, memory=memory, bias=bias)
    assert_equal_up_to_rounding(out, expected)
    assert not torch.allclose(out, block(x, memory=memory))


# ------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("rotary", [None, Rotary(partial_rotary_factor=6 / 7)])
def test_block_in_chunks_with_cache_equals_full_forward(cross, rotary):
    x, memory = x_and_memory()
    memory_kwargs = {"memory": memory, "memory_mask": padding([7, 3])} if cross else {}
    block = shaken(Block(config(rotary=rotary), cross=cross)).eval()
    full_output = block(x, mask=causal(), **memory_kwargs)
    cache = KVCache()
    parts = [block(x[:, a:b], mask=causal(), cache=cache, **memory_kwargs) for a, b in ((0, 2), (2, 3), (3, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), full_output, rtol=1e-12, atol=1e-12)
    assert cache.length == T


def test_rotary_is_not_applied_to_cross_attention():
    """Permuting the tokens of an unmasked memory must not change the output, because rotary skips cross-attention."""
    x, memory = x_and_memory()
    block = shaken(Block(config(n_heads=1, d_head=8, rotary=Rotary()), cross=True))
    order = torch.randperm(S)
    torch.testing.assert_close(block(x, memory=memory), block(x, memory=memory[:, order]))


# --------------------------------------------------------------------------------------- sizes and refusals


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_block_parameter_counts_equal_formulas():
    attention, feed_forward, norm = 4 * (M * M + M), 2 * M * D_FF + D_FF + M, 2 * M
    assert count(Block(config())) == attention + feed_forward + 2 * norm
    assert count(Block(config(), cross=True)) == 2 * attention + feed_forward + 3 * norm
    small = config(bias=False, norm=RMSNorm(), activation=SwiGLU(), n_kv_heads=1, d_head=5)
    assert count(Block(small)) == 2 * M * H * 5 + 2 * M * 5 + 3 * M * D_FF + 2 * M


@pytest.mark.parametrize("cross", [True, False])
def test_block_accepts_empty_and_single_token_inputs(cross):
    memory_kwargs = {"memory": torch.randn(B, S, M)} if cross else {}
    block = Block(config(), cross=cross)
    assert block(torch.zeros(B, 0, M), **memory_kwargs).shape == (B, 0, M)
    assert block(torch.zeros(B, 1, M), **memory_kwargs).isfinite().all()


def test_block_with_wrong_memory_raises():
    x, memory = torch.zeros(B, T, M), torch.zeros(B, S, M)
    with pytest.raises(ConfigError, match=r"got a memory, but this block has no cross-attention.*cross=True"):
        Block(config())(x, memory=memory)
    with pytest.raises(ConfigError, match=r"this block has cross-attention; expected memory="):
        Block(config(), cross=True)(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 0}, "d_model is 0; expected a whole number of at least 1"),
        ({"n_heads": 4}, "d_model is 21 and n_heads is 4; expected a multiple of n_heads"),
        ({"n_kv_heads": 2}, "n_heads is 3 and n_kv_heads is 2; expected a multiple of n_kv_heads"),
        ({"d_head": 0}, "d_head is 0; expected a whole number"),
        ({"d_ff": -1}, "d_ff is -1; expected a whole number"),
        ({"dropout": 1}, "dropout is 1; expected a number of at least 0 and below 1"),
        ({"attention_dropout": "a"}, "attention_dropout is 'a'; expected a number of at least 0"),
        ({"feed_forward_dropout": -0.1}, "feed_forward_dropout is -0.1; expected a number of at least 0"),
        ({"bias": None}, "bias is None; expected True or False"),
        ({"norm": "layer"}, r"norm is 'layer'; expected LayerNorm\(…\) or RMSNorm\(…\)"),
        ({"residual": PreNorm}, r"expected PreNorm\(…\) or PostNorm\(…\).*add parentheses"),
        ({"activation": torch.relu}, r"expected ReLU\(…\) or GELU\(…\) or SiLU\(…\) or SwiGLU\(…\)"),
        ({"rotary": True}, r"rotary is True; expected Rotary\(…\) or None"),
        ({"rotary": Rotary()}, r"rotates 7 of 7 features per head; expected an even number"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_block_config_with_invalid_values_raises(unchecked, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_block_config_is_frozen_and_hashable(unchecked):
    block_config = config(norm=RMSNorm(), rotary=Rotary(partial_rotary_factor=2 / 7), dropout=0)
    assert block_config == config(norm=RMSNorm(), rotary=Rotary(partial_rotary_factor=2 / 7), dropout=0.0)
    assert len({block_config, dataclasses.replace(block_config), config()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        block_config.d_model = 3


@pytest.mark.compiled
@pytest.mark.parametrize("residual", [PreNorm(), PostNorm()], ids=str)
def test_block_compiles_to_a_full_graph_forward_and_backward(residual):
    """Traced whole, both ways. The models' tests generate code too, which takes far longer."""
    x, memory = torch.randn(B, T, M), torch.randn(B, S, M)
    block = Block(config(residual=residual), cross=True)
    results = []
    for module in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        block.zero_grad()
        out = module(x, mask=causal(), memory=memory)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in block.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_parallel_branches_use_the_block_input():
    block = BlockConfig(d_model=14, n_heads=2, d_ff=11, residual=Parallel()).build().double().eval()
    x = torch.randn(2, 5, 14, dtype=torch.float64)
    expected = x + block.attention(block.norm1(x), mask=causal()) + block.feed_forward(block.norm2(x))
    torch.testing.assert_close(block(x, mask=causal()), expected)
