"""Tests of the options of third-party architectures, each against its equation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clearhead.analysis import attribute, trace
from clearhead.analysis.checks import check
from clearhead.analysis.cost import cost
from clearhead.attention import Dot, Scaled, SoftCapped, attend
from clearhead.config import Config
from clearhead.data.batch import TokenBatch
from clearhead.errors import ConfigError, ShapeError
from clearhead.generation import generate
from clearhead.generation.engine.program import unsupported_reason
from clearhead.masks import causal, every, full, window
from clearhead.models import DecoderConfig, EncoderConfig
from clearhead.models.storage import load_checkpoint, save_checkpoint
from clearhead.nn import BlockConfig, KVCache, PostNorm, SandwichNorm
from clearhead.nn.positions import LearnedPositions, Rotary
from clearhead.training.objective import loss_sum
from tests.support.rounding import assert_equal_up_to_rounding

CONFIG = DecoderConfig(vocab_size=31, d_model=14, n_heads=2, n_layers=2, max_len=13)
ROTARY = EncoderConfig(vocab_size=31, d_model=16, n_heads=2, n_layers=2, max_len=13, positions=Rotary())
IDS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(3))


def build(config=CONFIG, **options):
    """Return a float64 model with randomly shifted parameters."""
    torch.manual_seed(5)
    model = config.replace(**options).build().double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def with_parameters_of(model, **options):
    """The model without some of its options, with what remains of its weights."""
    other = model.config.replace(**options).build().double().eval()
    report = other.load_state_dict(model.state_dict(), strict=False)
    assert not report.missing_keys
    return other


LOGITS = {"logit_bias": True, "logit_scale": 0.3, "logit_softcap": 1.7}


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_logits_are_scaled_then_biased_then_capped(tie_embeddings):
    model = build(tie_embeddings=tie_embeddings, **LOGITS)
    plain = with_parameters_of(model, logit_bias=False, logit_scale=1.0, logit_softcap=None)(IDS)
    torch.testing.assert_close(model(IDS), 1.7 * torch.tanh((0.3 * plain + model.logit_bias) / 1.7))


@pytest.mark.parametrize("options", [{"logit_bias": True, "logit_scale": 0.3}, LOGITS])
def test_training_loss_equals_cross_entropy_of_modified_logits(options):
    model = build(**options)
    counts = {"n_tokens": 14, "n_padded": 14, "n_labels": 14}
    weights = torch.ones(IDS.shape, dtype=torch.float64)
    batch = TokenBatch(ids=IDS, lengths=torch.tensor([7, 7]), labels=IDS.roll(-1, 1), weights=weights, **counts)
    expected = F.cross_entropy(model(IDS).flatten(0, 1), batch.labels.flatten(), reduction="sum")
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    got, n = loss_sum(model, batch), batch.n_labels
    assert n == IDS.numel()
    torch.testing.assert_close(got, expected)
    for gradient, reference in zip(torch.autograd.grad(got, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_attribute_supports_logit_bias_and_rejects_softcap():
    attribution = attribute(build(logit_bias=True, logit_scale=0.3, residual=SandwichNorm(), layer_scale=0.3), IDS[:1])
    assert abs(attribution.residual) <= attribution.tolerance
    with pytest.raises(ConfigError, match="tanh"):
        attribute(build(logit_softcap=1.7), IDS[:1])


def test_generation_with_skipped_rows_stops_at_last_position():
    model = build(positions=LearnedPositions(max_len=13, skipped=2))
    assert generate(model, IDS[:1], max_new_tokens=7).ids.shape[-1] == 7
    with pytest.raises(ShapeError, match="has 13 rows"):
        generate(model, IDS[:1], max_new_tokens=8)
    assert generate(model, IDS[:1], max_new_tokens=9, sliding_context=True).ids.shape[-1] == 9


@pytest.mark.parametrize("scores", [Dot(), Scaled(0.3), SoftCapped(1.5), SoftCapped(1.5, scale=0.7)])
def test_attention_scores_equal_configured_scores(scores):
    model = build(scores=scores)
    q, k, v = (torch.randn(2, 3, n, 7, dtype=torch.float64) for n in (5, 11, 11))
    s = q @ k.mT * {Dot(): 1.0, Scaled(0.3): 0.3, SoftCapped(1.5): 7**-0.5}.get(scores, 0.7)
    s = 1.5 * torch.tanh(s / 1.5) if isinstance(scores, SoftCapped) else s
    torch.testing.assert_close(attend(q, k, v, scores=scores), s.softmax(-1) @ v)
    with trace(model) as visible:
        model(IDS)
    part = model.blocks[0].attention
    h = model.blocks[0].norm1(model.add_positions(model.embedding(IDS)))
    heads = [x.unflatten(-1, (2, 7)).transpose(1, 2) for x in (part.q_proj(h), part.k_proj(h))]
    expected = scores(*heads).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(visible.weights("blocks.0.attention"), expected)
    assert cost(model.config, tokens=7).parameters.value == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("scores", [Dot(), Scaled(0.3), SoftCapped(1.5)])
def test_generation_with_custom_scores_equals_uncached_generation(scores):
    model = build(scores=scores)
    assert unsupported_reason(model) is None
    fast, plain = (generate(model, IDS, max_new_tokens=5, use_cache=cached) for cached in (True, False))
    assert fast.ids.tolist() == plain.ids.tolist()
    torch.testing.assert_close(fast.scores, plain.scores)


def test_sandwich_norm_and_layer_scale_equal_their_equation():
    block = build(residual=SandwichNorm(), layer_scale=0.1).blocks[0]
    (norm1, scale1), (norm2, scale2) = block.post_attention, block.post_feed_forward
    assert torch.equal(
        CONFIG.replace(layer_scale=0.1).build().blocks[1].post_feed_forward.weight, torch.full((14,), 0.1)
    )
    x = torch.randn(2, 5, 14, dtype=torch.float64)
    y = x + norm1(block.attention(block.norm1(x))) * scale1.weight
    torch.testing.assert_close(block(x), y + norm2(block.feed_forward(block.norm2(y))) * scale2.weight)


def test_layer_masks_cycle_over_layers():
    model = build(n_layers=3, layer_masks=(window(2, 0), full()))
    with trace(model) as visible:
        logits = model(IDS)
    for i, mask in enumerate((causal() & window(2, 0), causal(), causal() & window(2, 0))):
        assert torch.equal(visible.weights(f"blocks.{i}.attention")[0, 0] > 0, mask.dense(7, 7))
    cache = KVCache()
    steps = [model(IDS[:, i : i + 1], cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, dim=1), logits)
    short = build(n_layers=3, layer_masks=(window(1, 0), window(2, 0)))
    assert short.config.union_mask(causal()).dense(7, 7).equal((causal() & window(2, 0)).dense(7, 7))
    assert check(short).ok


@pytest.mark.parametrize(
    "options",
    [
        {"residual": SandwichNorm()},
        {"layer_scale": 0.1},
        {"layer_masks": (window(2, 0), full())},
        {"layer_masks": (window(2, 2), every(3))},
        {"mask": full(), "layer_masks": (causal(), full())},
    ],
)
def test_generation_with_custom_blocks_equals_uncached_generation(options):
    model = build(**options)
    assert unsupported_reason(model) is None
    fast, plain = (
        generate(model, [IDS[0], IDS[1, :4]], max_new_tokens=5, use_cache=cached) for cached in (True, False)
    )
    assert fast.ids.tolist() == plain.ids.tolist()
    torch.testing.assert_close(fast.scores, plain.scores)
    alone = generate(model, IDS[1:, :4], max_new_tokens=5)
    assert fast.ids[1].tolist() == alone.ids[0].tolist()


ENCODER = EncoderConfig(vocab_size=31, d_model=14, n_heads=2, n_layers=3, max_len=13, n_segments=2, embedding_norm=True)


def test_narrow_embeddings_are_projected_before_the_blocks():
    model = build(ENCODER, embedding_dim=6, positions=LearnedPositions(max_len=13))
    x = model.embedding.weight[IDS] + model.segments.weight[0] + model.positions.weight[:7]
    x = F.layer_norm(x, (6,), model.embedding_norm.weight, model.embedding_norm.bias)
    torch.testing.assert_close(
        model(IDS), model.run_blocks(x @ model.embedding_proj.weight.T + model.embedding_proj.bias)
    )
    assert check(model).ok


def test_shared_layers_apply_one_block_repeatedly(tmp_path):
    model = build(ENCODER, share_layers=True)
    x = model.add_positions(model.embedding(IDS) + model.segments.weight[0])
    for _ in range(3):
        x = model.blocks[0](x)
    torch.testing.assert_close(model(IDS), model.norm(x))
    assert check(model).ok
    assert cost(model.config, tokens=7).parameters.value == sum(p.numel() for p in model.parameters())
    save_checkpoint(model, tmp_path / "model")
    assert_equal_up_to_rounding(load_checkpoint(tmp_path / "model")(IDS), model(IDS))


@pytest.mark.parametrize("options", [{"embedding_dim": 6}, {"share_layers": True}])
def test_encoder_options_round_trip_through_toml(options):
    config = ENCODER.replace(**options)
    assert Config.from_toml(config.to_toml()) == config


@pytest.mark.bad_input
@pytest.mark.parametrize("options", [{"embedding_dim": 7}, {"embedding_dim": 0}, {"share_layers": 2}])
def test_invalid_encoder_options_raise(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ENCODER.replace(**options)


STORED = [
    LOGITS,
    {"scores": SoftCapped(1.5, scale=0.7)},
    {"scores": Dot()},
    {"residual": SandwichNorm(), "layer_scale": 0.1},
    {"layer_masks": (window(2, 0), full())},
]


@pytest.mark.parametrize("options", STORED)
def test_decoder_options_round_trip_through_toml(options):
    config = CONFIG.replace(**options)
    assert Config.from_toml(config.to_toml()) == config


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "options",
    [
        {"logit_scale": 0.0},
        {"logit_softcap": -1.0},
        {"logit_bias": 3},
        {"scores": 3},
        {"layer_scale": 0.0},
        {"layer_masks": (3,)},
    ],
)
def test_invalid_decoder_options_raise(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CONFIG.replace(**options)


def test_layer_rotary_cycles_over_layers():
    """Layer i turns as the one of its number in the cycle: the same as a model of such layers with their weights."""
    slow, fast = Rotary(base=500.0), Rotary(base=20.0)
    model = build(ROTARY, n_layers=3, positions=slow, layer_rotary=(slow, fast))
    assert [block.attention.rotary for block in model.blocks] == [slow, fast, slow]
    x = model.embedding(IDS)
    for i, layer_positions in enumerate((slow, fast, slow)):
        layer = BlockConfig(d_model=16, n_heads=2, rotary=layer_positions).build().double().eval()
        layer.load_state_dict(model.blocks[i].state_dict())
        x = layer(x)
    torch.testing.assert_close(model(IDS), model.norm(x))
    assert check(model).ok
    decoder = build(CONFIG, d_model=16, positions=slow, layer_rotary=(slow, fast))
    assert unsupported_reason(decoder) is None
    assert Config.from_toml(decoder.config.to_toml()) == decoder.config


def test_first_norm_false_omits_norm_of_first_block():
    model = build(ROTARY, embedding_norm=True, first_norm=False)
    first, x = model.blocks[0], model.embedding_norm(model.embedding(IDS))
    x = x + first.attention(x)
    x = model.blocks[1](x + first.feed_forward(first.norm2(x)))
    torch.testing.assert_close(model(IDS), model.norm(x))
    assert "blocks.0.norm1.weight" not in model.state_dict()


@pytest.mark.bad_input
def test_contradictory_encoder_options_raise():
    for options, outputs in (
        ({"layer_rotary": (Rotary(base=7.0),)}, "expected the first of layer_rotary"),
        ({"layer_rotary": (ROTARY.positions,), "share_layers": True}, "are one block"),
        ({"first_norm": False, "residual": PostNorm()}, "leave first_norm out"),
    ):
        with pytest.raises(ConfigError, match=outputs):
            ROTARY.replace(**options)
