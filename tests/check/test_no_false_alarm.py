"""Models that are right pass, whatever their weights.

One seed each, for time; CLEARHEAD_CHECK_SEEDS=20 in the environment runs twenty (some minutes).
"""

from __future__ import annotations

import os

import pytest
import torch

from clearhead.check import check
from tests.check.models import OURS, PEERS, ours, peer

SEEDS = range(int(os.environ.get("CLEARHEAD_CHECK_SEEDS", "1")))


def no_alarm(make, name, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        report = check(make(name), seed=seed)
        assert report.ok, f"seed {seed}: {report}"
        refused = [finding for finding in report if "refused" in finding.cause]
        assert not refused, f"seed {seed}: {refused}"


@pytest.mark.parametrize("name", [*OURS, "attention"])
def test_models_of_this_project(name):
    no_alarm(ours, name, SEEDS)


@pytest.mark.parametrize("name", PEERS)
def test_models_of_transformers(name):
    pytest.importorskip("transformers", reason="the peers are an optional dependency")
    no_alarm(peer, name, SEEDS)


@pytest.mark.parametrize("batch_first", [True, False])
def test_modules_of_torch(batch_first):
    sizes = {"dim_feedforward": 19, "dropout": 0.1, "batch_first": batch_first}
    torch.manual_seed(0)
    for module in (
        torch.nn.MultiheadAttention(12, 3, batch_first=batch_first),
        torch.nn.TransformerEncoderLayer(12, 3, **sizes),
        torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(12, 3, **sizes), 2, enable_nested_tensor=False
        ),
        torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(12, 3, **sizes), 2),
    ):
        report = check(module)
        assert report.ok, str(report)
        assert report["padding invariance"].verdict == "pass"


def test_a_vision_transformer_of_timm():
    timm = pytest.importorskip("timm", reason="the peers are an optional dependency")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 7}
    report = check(timm.models.VisionTransformer(**sizes))
    assert report.ok, str(report)
    assert report["batch invariance"].verdict == "pass"
