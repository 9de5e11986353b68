"""Run the tests of all model families, and write which family passes which test to docs/results/families.json.

python tools/families.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/families.json"
# Names of the tests of tests/hub/test_families.py, and what they show.
CHECKS = {
    "test_loaded_model_has_the_outputs_and_gradients_of_the_reference": "outputs and gradients",
    "test_exported_model_is_bit_equal_to_the_reference": "bit-exact export",
    "test_padded_batch_matches_the_reference": "padding",
    "test_cached_decoding_equals_uncached_decoding": "cache",
    "test_generation_equals_uncached_loop": "generation",
    "test_check_reports_no_failures": "check",
    "test_trace_records_the_attention_weights_of_the_reference": "trace",
    "test_cost_counts_every_parameter": "cost",
}


class Recorder:
    """Records the outcome of each test by reference model and test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a report: of the call, or of a setup that did not pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        test, _, model = report.nodeid.rpartition("::")[2].removesuffix("]").partition("[")
        if test in CHECKS:
            self.outcomes.setdefault(model, {})[CHECKS[test]] = report.outcome


def by_family(outcomes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the worst outcome of the reference models of each family: failed, passed or skipped."""
    order = ("failed", "passed", "skipped")
    families: dict[str, dict[str, str]] = {}
    for model, checks in outcomes.items():
        family = families.setdefault(model.split()[0], {})
        for check, outcome in checks.items():
            family[check] = min(family.get(check, "skipped"), outcome, key=order.index)
    return families


def main() -> int:
    """Run the tests, write the table, and return the exit status of the tests."""
    recorder = Recorder()
    path = ROOT / "tests/hub/test_families.py"
    status = pytest.main(["-q", "-p", "no:cacheprovider", str(path)], plugins=[recorder])
    models: dict[str, int] = {}
    for model in recorder.outcomes:
        models[model.split()[0]] = models.get(model.split()[0], 0) + 1
    table = by_family(recorder.outcomes)
    rows = {family: {"models": models[family], **checks} for family, checks in sorted(table.items())}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} families, {len(recorder.outcomes)} reference models: {RESULTS.relative_to(ROOT)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
