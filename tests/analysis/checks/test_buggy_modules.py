"""Every bug of the gallery is detected with its cause; correct modules pass."""

from __future__ import annotations

import pytest
import torch

from clearhead.analysis.checks import NAMES, Verdict, check
from clearhead.analysis.checks.buggy_modules import CORRECT, GALLERY


@pytest.fixture
def unshrunk(monkeypatch):
    """Skip minimization in tests that do not use the example."""
    monkeypatch.setattr("clearhead.analysis.checks.runner.SECONDS", 0.0)


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("seed", [0, 1])
def test_correct_module_passes(name, seed):
    torch.manual_seed(seed)
    report = check(CORRECT[name](), seed=seed)
    assert report.ok, str(report)


def test_each_property_applies_to_a_correct_module():
    """Ensure that no property passes only because it never applies."""
    tested = set()
    for make in CORRECT.values():
        tested |= {finding.property for finding in check(make()) if finding.verdict is Verdict.PASS}
    assert tested == set(NAMES)


def test_gallery_covers_each_property():
    assert len(GALLERY) >= 15
    assert {bug.property for bug in GALLERY.values()} == set(NAMES)


@pytest.mark.parametrize("name", GALLERY)
def test_gallery_bug_is_detected_with_its_cause(name):
    bug = GALLERY[name]
    finding = check(bug.spec(), only=bug.property)[bug.property]
    assert finding.verdict is Verdict.FAIL, str(finding)
    assert bug.cause in finding.cause
    assert finding.location
    assert finding.minimal_example
    assert finding.max_abs_difference > (finding.tolerance or 0.0)


@pytest.mark.parametrize("name", GALLERY)
def test_gallery_bug_is_detected_with_other_seeds(name, unshrunk):
    bug = GALLERY[name]
    finding = check(bug.spec(7), only=bug.property, seed=5)[bug.property]
    assert finding.verdict is Verdict.FAIL, str(finding)
    assert bug.cause in finding.cause


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("no causal mask", (1, 2)),  # two tokens: the first attends to the second
        ("padding ignored", (1, 1)),  # one token and padding
        # The window covers a token and three before it; the fifth token exceeds it.
        ("window ignored when decoding", (1, 5)),
        ("cache not reordered for beams", (2, 2)),  # two rows that can be swapped
    ],
)
def test_minimal_example_is_minimal(name, size):
    bug = GALLERY[name]
    finding = check(bug.spec(), only=bug.property)[bug.property]
    assert tuple(finding.example["x"].shape) == size
    assert str(finding.example["x"].tolist()) in finding.minimal_example


def test_gallery_bug_fails_only_related_properties(unshrunk):
    """A module with one bug fails only the related properties."""
    expected = {
        "scaled by d_model": {"score scale"},
        "NaN from an empty row": {"finiteness"},
        "−1e9 in float16": {"dtype agreement"},
        "detached output": {"gradient flow"},
        "batch-norm in a decoder": {"train/eval consistency"},
        "dropout in evaluation": {"determinism"},
        "left padding with absolute positions": {"padding invariance"},
        "inverted padding mask": {"padding invariance", "mask polarity"},
        "cache positions restart": {"cache = no cache"},
    }
    for name, properties in expected.items():
        assert {f.property for f in check(GALLERY[name].spec()).failures} == properties, name
