"""Tolerances, influence, the numerics recorder, and checks of unknown modules."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clearhead.analysis.checks import (
    Caching,
    CallInputs,
    Embeddings,
    Ids,
    IgnoreMask,
    KeepMask,
    ModuleSpec,
    Values,
    Verdict,
    check,
    spec_for,
)
from clearhead.analysis.checks.buggy_modules import CORRECT, GALLERY, NoMask
from clearhead.analysis.checks.harness import Harness
from clearhead.analysis.checks.numerics_recorder import NumericsRecorder
from clearhead.analysis.checks.properties.causality import gradient, influence, receptive_field
from clearhead.analysis.checks.properties.padding import PaddingInvariance
from clearhead.analysis.checks.reference_modules import Language, Pair
from clearhead.analysis.checks.rounding import Rounding, difference
from clearhead.errors import ConfigError, DtypeError, KeywordError
from clearhead.masks import causal, window
from clearhead.models import Decoder, tiny_decoder
from clearhead.nn import KVCache
from clearhead.nn.positions import LearnedPositions
from tests.analysis.checks.models import SCALED, peer


class Weighted(nn.Module):
    """Output i is Σ_j A[i, j] x[j]: its influence is known."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x):
        return self.matrix[: x.shape[1], : x.shape[1]] @ x


def attend(x):
    """Causal self-attention as a function instead of a module."""
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


# ---------------------------------------------------------------------- tolerances


def test_rounding_perturbs_by_at_most_one_unit():
    x = torch.rand(101, dtype=torch.float32) + 0.5
    with Rounding(3):
        y = x * 1.0
    relative = ((y.double() - x.double()) / x.double()).abs().max().item()
    assert 0 < relative <= 1.5 * torch.finfo(torch.float32).eps


def test_rounding_preserves_masks_integers_and_views():
    mask = torch.tensor([[0.0, -math.inf], [torch.finfo(torch.float32).min, 3.0]])
    with Rounding(3):
        assert torch.equal(mask * 1.0, mask)
        assert mask.view(4).data_ptr() == mask.data_ptr()


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float64, 1e-16, 1e-11), (torch.float32, 1e-7, 1e-3)])
def test_tolerance_follows_inner_dtype(dtype, least, most):
    class Inner(nn.Module):
        """Computes in a different dtype, like many norms."""

        def forward(self, x):
            return torch.tanh(x.to(dtype)).to(x.dtype)

    harness = Harness(spec_for(Inner(), inputs=Embeddings(5)))
    assert least < harness.tolerance < most


def test_tolerance_grows_with_depth():
    def deep(n):
        torch.manual_seed(0)
        return Harness(spec_for(nn.Sequential(*(nn.Linear(13, 13) for _ in range(n))), inputs=Embeddings(13)))

    shallow, deeper = deep(1), deep(12)
    scale = [harness.exact.abs().max().item() for harness in (shallow, deeper)]
    assert deeper.tolerance / scale[1] > 1.5 * shallow.tolerance / scale[0]


def test_difference_of_non_finite_value_is_infinite():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])
    assert difference(a, b) == math.inf
    assert difference(b, b) == 0.0
    assert difference(a, a[:1]) == math.inf
    assert difference(a, a + 0.5) == 0.5


# ---------------------------------------------------------------------- influence


def test_influence_and_gradient_recover_the_mixing_matrix():
    torch.manual_seed(0)
    matrix = torch.randn(11, 11) * (torch.rand(11, 11) < 0.4)
    harness = Harness(spec_for(Weighted(matrix), inputs=Embeddings(3), causal=True))
    assert torch.equal(influence(harness, harness.inputs) > 0, matrix != 0)
    slope = gradient(harness, harness.inputs)
    # The gradient at j of output i is |A[i, j]| times a factor per row, so rows are proportional to those of A.
    i = int((matrix != 0).sum(1).argmax())
    ratio = slope[i][matrix[i] != 0] / matrix[i][matrix[i] != 0].abs().double()
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-6)


def test_causality_reports_the_largest_leak():
    matrix = torch.ones(11, 11).tril()
    matrix[4, 9], matrix[2, 5] = 100.0, 1.0
    finding = check(Weighted(matrix), inputs=Embeddings(3), causal=True, only="causality")["causality"]
    assert finding.verdict is Verdict.FAIL
    assert "output 4 depends on the token at 9" in finding.location
    assert finding.example["x"].shape[:2] == (1, 6)  # output 2 sees token 5: six tokens show it


def test_causality_gradient_detects_rounded_leak():
    class Quantised(nn.Module):
        """Leaks the future only through a straight-through gradient; its value cancels."""

        def forward(self, x):
            ahead = x.flip(1).cumsum(1).flip(1)
            return x + (ahead - ahead.detach())

    finding = check(Quantised(), inputs=Embeddings(3), causal=True, only="causality")["causality"]
    assert finding.verdict is Verdict.FAIL
    assert "by gradient" in finding.location


def test_receptive_field_grows_with_layers():
    spec = spec_for(Language(), inputs=Ids(29), mask=causal() & window(2, 0), layers=3)
    T = 11
    far = receptive_field(Harness(spec), T)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    assert torch.equal(far, (j <= i) & (j >= i - 6))  # 3 layers, 2 back each


# ---------------------------------------------------------------------- the recorder


def test_recorder_reads_score_scale():
    q, k = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 5)
    for run in (
        lambda: (q @ k.transpose(-2, -1) * 0.25).softmax(-1),
        lambda: ((q / 2) @ (k.transpose(-2, -1) / 2)).softmax(-1),
        lambda: F.scaled_dot_product_attention(q, k, k, scale=0.25),
    ):
        with NumericsRecorder(2, 7) as recorder:
            run()
        assert recorder.observations.scales == [(0.25, 5, 3)]


def test_causality_position_table_of_ids_passes():
    class PlaceEmbedding(nn.Module):
        """Uses only the number of ids; its rows (T, M) have no batch dimension."""

        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(37, 5))

        def forward(self, ids):
            return self.rows[: ids.shape[1]]

    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.tokens = PlaceEmbedding(), nn.Embedding(29, 5)

        def forward(self, ids):
            return (self.places(ids) + self.tokens(ids)).cumsum(1)

    harness = Harness(spec_for(Running(), inputs=Ids(29), causal=True, max_len=37))
    assert torch.equal(gradient(harness, harness.inputs) > 0, torch.ones(11, 11, dtype=torch.bool).tril())


# ---------------------------------------------------------------------- padding


def test_padding_encoder_decoder_pads_both_inputs():
    harness = Harness(CORRECT["encoder-decoder"]())
    kinds = {x.kind for x in PaddingInvariance().evaluate(harness, harness.inputs)}
    assert kinds == {
        f"{which}{side}, {content}"
        for which in ("", "target, ")
        for side, whats in (
            ("right", ("nothing hidden", "amount", "content")),
            ("left", ("amount", "content")),
        )
        for content in whats
    }


def test_padding_target_is_padded_only_if_supported():
    padded_too = spec_for(Pair(), inputs=Ids(29), source=Ids(29), padding=KeepMask("keep"), max_len=37)
    harness = Harness(padded_too)
    assert not any(x.kind.startswith("target") for x in PaddingInvariance().evaluate(harness, harness.inputs))


def test_mask_polarity_detects_inverted_target_mask():
    options = {"inputs": Ids(29), "source": Ids(29), "causal": True, "padding": KeepMask("keep"), "max_len": 37}
    wrong = check(Pair(), **options, target_padding=IgnoreMask("target_keep"))
    assert {f.property for f in wrong.failures} == {"padding invariance", "mask polarity"}
    assert "of the target" in wrong["mask polarity"].location


# ---------------------------------------------------------------------- unknown modules


def test_check_accepts_function():
    report = check(attend, inputs=Embeddings(5), causal=True)
    assert report.ok, str(report)
    assert report["causality"].verdict is Verdict.PASS
    assert report["context use"].verdict is Verdict.PASS
    leaky = check(lambda x: x.cumsum(1).flip(1), inputs=Embeddings(5), causal=True)
    assert leaky["causality"].verdict is Verdict.FAIL


def test_padding_argument_is_inferred_from_its_name():
    class Sum(nn.Module):
        def forward(self, x, key_padding_mask=None):
            hidden = torch.zeros(x.shape[:2], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
            return x + (x * ~hidden[..., None]).sum(1, keepdim=True)

    guessed = check(Sum(), inputs=Embeddings(3), causal=False)
    assert guessed["padding invariance"].verdict is Verdict.PASS
    wrong = check(Sum(), inputs=Embeddings(3), causal=False, padding=KeepMask("key_padding_mask"))
    assert wrong["mask polarity"].verdict is Verdict.FAIL
    right = check(Sum(), inputs=Embeddings(3), causal=False, padding=IgnoreMask("key_padding_mask"))
    assert right.ok, str(right)


def test_check_accepts_custom_run():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Language()

        def forward(self, request):
            return {"answer": self.inner(request["tokens"], request.get("real"))}

    def run(module, batch: CallInputs):
        return module({"tokens": batch.x, "real": batch.keep})["answer"]

    report = check(Odd(), inputs=Ids(29), causal=True, run=run, padding=KeepMask("real"), max_len=37, positions=True)
    assert report.ok, str(report)
    assert report["padding invariance"].verdict is Verdict.PASS


def test_check_does_not_change_module():
    model = Language().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check(model, inputs=Ids(29), causal=True, max_len=37)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_check_random_module_is_not_applicable():
    report = check(lambda x: x + torch.rand_like(x), inputs=Embeddings(3), causal=True)
    assert report["determinism"].verdict is Verdict.FAIL
    assert report["batch invariance"].verdict is not Verdict.PASS


def test_report_text_html_and_json():
    report = check(GALLERY["no causal mask"].spec())
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    first = next(f for f in document["findings"] if f["property"] == "causality")
    assert first["verdict"] == "fail"
    assert first["max_abs_difference"] > 0
    assert "no causal mask" in first["cause"]
    assert "✗ causality" in str(report)
    assert ">causality</td>" in report._repr_html_()
    assert ">fail</b>" in report._repr_html_()


# ---------------------------------------------------------------------- errors


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (3, {}, DtypeError, "got a int; expected a PyTorch module or a function"),
        (nn.Linear(3, 3), {}, ConfigError, "cannot infer the inputs of Linear; pass inputs=Ids"),
        (nn.Linear(3, 3), {"inputs": 3}, ConfigError, "inputs is 3; expected Ids"),
        (nn.Linear(3, 3), {"inputs": Values((3,)), "colour": 1}, KeywordError, "check has no keyword 'colour'"),
        (
            nn.Linear(3, 3),
            {"inputs": Values((3,)), "padding": "mask"},
            ConfigError,
            "padding is 'mask'; expected KeepMask",
        ),
        (
            nn.Linear(3, 3),
            {"inputs": Values((3,)), "target_padding": "mask"},
            ConfigError,
            "target_padding is 'mask'; expected KeepMask",
        ),
        (
            nn.Linear(3, 3),
            {"inputs": Values((3,)), "caching": 1},
            ConfigError,
            "caching is 1; expected Caching",
        ),
        (
            nn.Linear(3, 3),
            {"inputs": Values((5,))},
            ConfigError,
            "Linear could not be called with values 3 × 5",
        ),
        (
            nn.Linear(3, 3),
            {"inputs": Values((3,)), "length": 0},
            ConfigError,
            "length is 0; expected a whole number",
        ),
        (
            nn.Linear(3, 3),
            {"inputs": Values((3,)), "only": "leak"},
            ConfigError,
            "unknown property 'leak'; there are",
        ),
        (nn.Linear(3, 3), {"inputs": Values((3,)), "only": 5}, ConfigError, "only is 5; expected names"),
    ],
)
def test_check_invalid_arguments_raise(module, options, error, message):
    with pytest.raises(error, match=message):
        check(module, **options)


def test_check_missing_cache_is_not_applicable():
    finding = check(Language(), inputs=Ids(29), causal=True, max_len=37)["cache = no cache"]
    assert finding.verdict is Verdict.NOT_APPLICABLE
    assert "pass caching=" in finding.cause
    assert Caching(new=dict).argument == "cache"


# ---------------------------------------------------------------------- correct but unusual modules


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


# ---------------------------------------------------------------------- declared and undeclared properties


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
