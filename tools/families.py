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
ODD = "odd configurations"
FILES = ("tests/hub/test_families.py", "tests/hub/test_odd_configurations.py")
# Names of the tests of these files, and what they show.
CHECKS = {
    "test_loaded_model_has_the_outputs_and_gradients_of_the_reference": "outputs and gradients",
    "test_exported_model_is_bit_equal_to_the_reference": "bit-exact export",
    "test_padded_batch_matches_the_reference": "padding",
    "test_cached_decoding_equals_uncached_decoding": "cache",
    "test_generation_equals_uncached_loop": "generation",
    "test_engine_equals_the_forward_of_the_model": "engine",
    "test_check_reports_no_failures": "check",
    "test_trace_records_the_attention_weights_of_the_reference": "trace",
    "test_cost_counts_every_parameter": "cost",
    "test_odd_configuration_loads_and_exports": ODD,
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


def by_family(outcomes: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the number of reference models of each family, and their worst outcomes: failed, passed or skipped."""
    order = ("failed", "passed", "skipped")
    families: dict[str, dict[str, Any]] = {}
    for model, checks in sorted(outcomes.items()):
        # A reference model is named "family" or "family variant", and an odd configuration "family-seed".
        name = model.rpartition("-")[0] if ODD in checks else model.split()[0]
        family = families.setdefault(name, {"models": 0})
        family["models"] += ODD not in checks
        for check, outcome in checks.items():
            family[check] = min(family.get(check, "skipped"), outcome, key=order.index)
    return {name: families[name] for name in sorted(families)}


def main() -> int:
    """Run the tests, write the table, and return the exit status of the tests."""
    recorder = Recorder()
    status = pytest.main(["-q", "-p", "no:cacheprovider", *(str(ROOT / file) for file in FILES)], plugins=[recorder])
    rows = by_family(recorder.outcomes)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} families, {sum(row['models'] for row in rows.values())} reference models: {RESULTS}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
