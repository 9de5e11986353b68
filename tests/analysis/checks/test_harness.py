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
    Values,
    Verdict,
    check,
    spec_for,
)
from clearhead.analysis.checks.buggy_modules import CORRECT, GALLERY
from clearhead.analysis.checks.harness import Harness
from clearhead.analysis.checks.numerics_recorder import NumericsRecorder
from clearhead.analysis.checks.properties.causality import gradient, influence, receptive_field
from clearhead.analysis.checks.properties.padding import PaddingInvariance
from clearhead.analysis.checks.reference_modules import Language, Pair
from clearhead.analysis.checks.rounding import Rounding, difference
from clearhead.errors import ConfigError, DtypeError, KeywordError
from clearhead.masks import causal, window


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
