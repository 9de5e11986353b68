"""Correct but unusual modules, and modules whose properties are declared, inferred or unknown."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clearhead.analysis.checks import (
    Caching,
    Embeddings,
    Ids,
    KeepMask,
    ModuleSpec,
    Values,
    Verdict,
    check,
)
from clearhead.analysis.checks.buggy_modules import CORRECT, GALLERY, NoMask
from clearhead.analysis.checks.reference_modules import Language
from clearhead.errors import ConfigError
from clearhead.models import Decoder, tiny_decoder
from clearhead.nn import KVCache
from clearhead.nn.positions import LearnedPositions
from tests.analysis.checks.models import SCALED, peer


def attend(x):
    """Causal self-attention as a function instead of a module."""
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class ValueHead(Language):
    """One value per token, (B, T), like a reward model."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).mean(-1)


class LeakyValueHead(ValueHead, NoMask):
    """The same without a causal mask."""


def test_check_scalar_per_token_counts_as_output():
    options = {"inputs": Ids(29), "causal": True, "caching": Caching(new=KVCache), "padding": KeepMask("keep")}
    report = check(ValueHead(), **options)
    assert report.ok, report
    verdicts = {finding.property: finding.verdict for finding in report.findings}
    for name in ("causality", "context use", "cache = no cache", "padding invariance"):
        assert verdicts[name] is Verdict.PASS
    finding = check(LeakyValueHead(), **options, only="causality").findings[0]
    assert finding.verdict is Verdict.FAIL
    assert "no causal mask reaches the attention" in finding.cause


def zeroed(model):
    """Set output projections to zero, like ReZero at initialization."""
    for name, parameter in model.named_parameters():
        if ".o." in name:
            nn.init.zeros_(parameter)
    return model


def test_check_zero_initialized_parameters_hide_no_leak():
    options = {"inputs": Ids(29), "causal": True, "caching": Caching(new=KVCache), "padding": KeepMask("keep")}
    right, wrong = zeroed(Language()), zeroed(NoMask())
    assert check(right, **options).ok, check(right, **options)
    assert check(wrong, **options)["causality"].verdict is Verdict.FAIL
    assert not any(p.any() for name, p in wrong.named_parameters() if ".o." in name), "only a copy is moved"


class OwnDropout(Language):
    """Dropout as a function, its rate under a name that does not say so."""

    p = 0.3

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        q = F.scaled_dot_product_attention(out, out, out, None, self.p * self.training, is_causal=True)
        return F.dropout(out, 0.1, self.training) + torch.dropout(out, self.p, self.training) + q


class Noisy(Language):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return out + torch.randn_like(out) if self.training else out


def test_train_eval_consistency_ignores_functional_dropout():
    options = {"inputs": Ids(29), "only": "train/eval consistency"}
    assert check(OwnDropout(), **options).ok
    assert not check(Noisy(), **options).ok


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_check_ignores_no_grad_and_autocast_of_caller(around):
    spec = CORRECT["language model"]()
    with around():
        report = check(spec)
    assert report.ok, report
    assert report.to_dict() == check(spec).to_dict()


@pytest.mark.parametrize("length", [1, 2])
def test_check_short_inputs_pass(length):
    for make in (CORRECT["language model"], CORRECT["encoder-decoder"]):
        report = check(make(), length=length)
        assert report.ok, report
    room = length + 4
    short = Decoder(tiny_decoder().replace(max_len=room, positions=LearnedPositions(max_len=room)))
    assert check(short).ok, check(short)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ids(0), "vocab_size is 0"),
        (lambda: Ids(True), "vocab_size is True"),
        (lambda: Embeddings(-1), "width is -1"),
        (lambda: Values((3, 0)), "a size of shape is 0"),
        (lambda: check(attend, inputs=Embeddings(3), length=True), "length is True"),
        (lambda: check(attend, inputs=Embeddings(3), seed="x"), "seed is 'x'"),
    ],
)
def test_spec_invalid_sizes_raise_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("name", SCALED)
def test_score_scale_uses_declared_scale(name):
    pytest.importorskip("transformers", reason="the peers are an optional dependency")
    model = peer(name)
    assert check(model, only="score scale")["score scale"].verdict is Verdict.PASS
    finding = check(model, only="score scale", scale=0.25)["score scale"]
    assert finding.verdict is Verdict.FAIL
    assert "0.25 is declared" in finding.location
    assert "declared" in finding.cause


def test_spec_needs_only_module_and_inputs():
    spec = ModuleSpec(CORRECT["language model"]().module, inputs=Ids(29))
    assert spec.name == "Language"
    assert check(spec, only="determinism").ok


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "message"), [({"inputs": 50}, "inputs is 50; expected Ids"), ({"scale": 0}, "scale is 0;")]
)
def test_spec_invalid_fields_raise_config_error(words, message):
    with pytest.raises(ConfigError, match=message):
        ModuleSpec(nn.Identity(), **{"inputs": Ids(7)} | words)


class FromTheEnd(nn.Module):
    """A causal model whose positions are counted from the end of the text, or whose output is scaled by its length."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.positions = nn.Embedding(40, 6)

    def forward(self, x):
        T = x.shape[1]
        if self.kind == "positions":
            x = x + self.positions(T - 1 - torch.arange(T))
        x = attend(x)
        return x * math.log(T + 1) if self.kind == "scale" else x


@pytest.mark.parametrize(("kind", "verdict"), [("positions", "fail"), ("scale", "fail"), ("none", "pass")])
def test_causality_fails_if_outputs_depend_on_the_number_of_later_tokens(kind, verdict):
    finding = check(FromTheEnd(kind), inputs=Embeddings(6), causal=True, only="causality")["causality"]
    assert finding.verdict is Verdict(verdict)
    if verdict == "fail":
        assert "alone and followed by" in finding.location
        assert "no single later token changes an output" in finding.cause


class CountsPadding(nn.Module):
    """Adds positions that are counted from the first token, padding or not."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(40, 6)

    def forward(self, x, keep=None):
        return x + self.positions(torch.arange(x.shape[1]))


def test_padding_invariance_of_one_token_names_cause():
    finding = check(CountsPadding(), inputs=Embeddings(6), length=1, only="padding invariance")["padding invariance"]
    assert finding.verdict is Verdict.FAIL
    assert "positions are counted from the padding" in finding.cause


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": 3}, "mask is 3; expected a mask such as causal"),
        ({"causal": "yes"}, "causal is 'yes'; expected True or False"),
        ({"positions": 1}, "positions is 1; expected True or False"),
        ({"layers": 0}, "layers is 0; expected a whole number of at least 1"),
        ({"max_len": -3}, "max_len is -3; expected a whole number of at least 1"),
        ({"run": 3}, r"run is 3; expected a function of \(module, inputs\)"),
        ({"padding": KeepMask("valid")}, "Language has no argument 'valid' for a padding mask; its arguments are ids"),
    ],
)
def test_check_invalid_options_raise_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        check(Language(), inputs=Ids(29), **options)


@pytest.mark.bad_input
def test_check_on_meta_device_raises_config_error():
    with pytest.raises(ConfigError, match="weight of Linear is on the meta device and has no values"):
        check(nn.Linear(5, 3, device="meta"), inputs=Embeddings(5))


def test_check_unknown_causality_is_undecided():
    report = check(GALLERY["no causal mask"].spec(), mask=None, only=["causality", "determinism"])
    assert report.ok
    assert [finding.property for finding in report.undecided] == ["causality"]
    assert "1 undecided" in str(report)
    assert "? causality: UNDECIDED: output " in str(report)
    assert "undecided" in report._repr_html_()
