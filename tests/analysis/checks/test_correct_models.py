"""Correct models pass with any parameters.

One seed each, for time; CLEARHEAD_CHECK_SEEDS=20 in the environment runs twenty (some minutes).
"""

from __future__ import annotations

import os

import pytest
import torch

from clearhead.analysis.checks import check
from tests.analysis.checks.models import CLEARHEAD, PEERS, clearhead_model, peer

SEEDS = range(int(os.environ.get("CLEARHEAD_CHECK_SEEDS", "1")))


def assert_passes(make, name, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        report = check(make(name), seed=seed)
        assert report.ok, f"seed {seed}: {report}"
        refused = [finding for finding in report if "refused" in finding.cause]
        assert not refused, f"seed {seed}: {refused}"


@pytest.mark.parametrize("name", [*CLEARHEAD, "attention"])
def test_clearhead_models_pass(name):
    assert_passes(clearhead_model, name, SEEDS)


@pytest.mark.parametrize("name", PEERS)
def test_transformers_models_pass(name):
    pytest.importorskip("transformers", reason="the peers are an optional dependency")
    assert_passes(peer, name, SEEDS)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_modules_pass(batch_first):
    sizes = {"dim_feedforward": 19, "dropout": 0.1, "batch_first": batch_first}
    torch.manual_seed(0)
    for module in (
        torch.nn.MultiheadAttention(12, 3, batch_first=batch_first),
        torch.nn.TransformerEncoderLayer(12, 3, **sizes),
        torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(12, 3, **sizes), 2, enable_nested_tensor=False),
        torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(12, 3, **sizes), 2),
        torch.nn.Transformer(12, 3, 2, 2, **sizes),
    ):
        report = check(module)
        assert report.ok, str(report)
        assert report["padding invariance"].verdict == "pass"


def test_timm_vision_transformer_passes():
    timm = pytest.importorskip("timm", reason="the peers are an optional dependency")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 7}
    report = check(timm.models.VisionTransformer(**sizes))
    assert report.ok, str(report)
    assert report["batch invariance"].verdict == "pass"


@pytest.mark.parametrize("kind", ["decoder", "decoder, rotary", "decoder, a window", "encoder", "pair", "pictures"])
def test_x_transformers_models_pass(kind):
    pytest.importorskip("loguru", reason="x-transformers is an optional peer with optional parts of its own")
    x = pytest.importorskip("x_transformers", reason="the peers are an optional dependency")
    sizes = {"dim": 12, "depth": 2, "heads": 3, "attn_dim_head": 4}
    more = {
        "decoder, rotary": {"rotary_pos_emb": True, "rotary_emb_dim": 4},
        "decoder, a window": {"attn_max_attend_past": 3},
    }

    def text(layers):
        return x.TransformerWrapper(num_tokens=31, max_seq_len=37, attn_layers=layers)

    torch.manual_seed(0)
    if kind == "pair":
        half = {"num_tokens": 31, "depth": 2, "heads": 3, "max_seq_len": 37}
        module = x.XTransformer(dim=12, **{f"{side}_{key}": n for side in ("enc", "dec") for key, n in half.items()})
    elif kind == "pictures":
        module = x.ViTransformerWrapper(image_size=16, patch_size=8, num_classes=7, attn_layers=x.Encoder(**sizes))
    elif kind == "encoder":
        module = text(x.Encoder(**sizes))
    else:
        module = text(x.Decoder(**sizes, **more.get(kind, {})))
    report = check(module)
    assert report.ok, str(report)
    assert not [finding for finding in report if "refused" in finding.cause]
