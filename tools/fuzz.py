"""Fuzz the package: draw random cases, compare results with plain definitions, and shrink the cases that fail.

    python tools/fuzz.py --seconds 60 --device cpu --seed 0
    python tools/fuzz.py --draws 20000 --seed 1 --json

Draw n of a seed is the same on every machine and in every run. The report lists the cases tried, by kind, and each
distinct failure: the smallest case with the same failure, and the Python line that repeats it. The exit status is
1 if there was a failure. `--only attend` draws a single kind. On a CPU each case runs in a child process with a budget
of CPU time and memory. `make test` does not run this tool.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

import torch

from tools.fuzz_cases import KIND_WEIGHTS, Case, kinds
from tools.fuzz_cases.sandbox import Budget, OverBudgetError, run_limited

MAX_SHRINK_CHECKS = 400
MAX_SHRINK_SECONDS = 120.0


def check(kind: str, case: Case) -> None:
    """Repeat a case in this process, without a budget; failures are raised."""
    kinds()[kind].check(case)


def fuzz(
    *, seed: int, device: str = "cpu", seconds: float = float("inf"), draws: int | None = None, only: str | None = None
) -> dict[str, Any]:
    """Draw until the time or the number of draws is reached; return the report as plain values."""
    end, tried, parts = time.monotonic() + seconds, Counter[str](), Counter[str]()
    failures: dict[tuple[str, str], dict[str, Any]] = {}
    number = 0
    while (draws is None or number < draws) and time.monotonic() < end:
        kind, case = draw_case(seed, number, device, only)
        outcome = attempt(kind, case)
        tried[kind] += 1
        if isinstance(outcome, list):
            parts.update(f"{kind}: {part}" for part in outcome)
        elif (kind, outcome[0]) in failures:
            failures[kind, outcome[0]]["times"] += 1
        else:
            small, message = shrink(kind, case, outcome)
            line = f'python -c "from math import inf; from tools.fuzz import check; check({kind!r}, {small!r})"'
            failures[kind, outcome[0]] = {
                "kind": kind,
                "draw": number,
                "times": 1,
                "message": message,
                "case": small,
                "repeat": line,
            }
        number += 1
    return {
        "seed": seed,
        "device": device,
        "draws": number,
        "tried": dict(tried),
        "parts": dict(sorted(parts.items())),
        "broken": list(failures.values()),
    }


def draw_case(seed: int, number: int, device: str, only: str | None = None) -> tuple[str, Case]:
    """Return draw `number` of a seed: a kind and a case of it."""
    chance = random.Random(f"{seed} {number}")
    (kind,) = [only] if only else chance.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))
    return kind, kinds()[kind].draw(chance, device)


def attempt(kind: str, case: Case) -> list[str] | tuple[str, str]:
    """Check a case within its budget: the list of parts it covered, or (failure signature, message)."""
    module = kinds()[kind]
    getattr(module, "prepare", lambda: None)()  # once per process: a forked child inherits the result
    if case.get("device", "cpu") != "cpu":  # CUDA cannot be used in a forked process
        outcome = _outcome(module, case)
    else:
        try:
            outcome = run_limited(lambda: _outcome(module, case), getattr(module, "BUDGET", Budget()))
        except OverBudgetError as error:
            outcome = {"failure": f"OverBudgetError: {error}"}
    if "parts" in outcome:
        parts: list[str] = outcome["parts"]
        return parts
    message = outcome["failure"]
    # Messages that differ only in numbers or in brackets have the same cause.
    first = message.splitlines()[0].partition(" | ")[0]
    signature = re.sub(r"\([^()]*\)|[-+]?\d[\d.,e+-]*|\binf\b|\bnan\b", "#", first)
    return signature[:60], message[:1000]


def _outcome(module: ModuleType, case: Case) -> dict[str, Any]:
    """Check a case without changing torch's random state."""
    torch.set_num_threads(1)
    state = torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"parts": module.check(case)}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    finally:
        torch.random.set_rng_state(state)


def shrink(kind: str, case: Case, failure: tuple[str, str]) -> tuple[Case, str]:
    """Return the smallest case found with the same failure, and its message."""
    signature, message = failure
    end = time.monotonic() + MAX_SHRINK_SECONDS
    checks, improved = 0, True
    while improved and checks < MAX_SHRINK_CHECKS and time.monotonic() < end:
        improved = False
        for small in smaller(case):
            checks += 1
            outcome = attempt(kind, small)
            if not isinstance(outcome, list) and outcome[0] == signature:
                case, message, improved = small, outcome[1], True
                break
            if checks >= MAX_SHRINK_CHECKS or time.monotonic() >= end:
                break
    return case, message


def smaller(value: Any) -> Iterator[Any]:
    """Yield simpler values, the simplest first."""
    if isinstance(value, dict):
        for key, item in value.items():
            for simple in _simplest(key, item):
                yield value | {key: simple}
        for key, item in value.items():
            yield from (value | {key: small} for small in smaller(item))
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, list))  # a subexpression
        for n, item in enumerate(value):
            yield from ([*value[:n], small, *value[n + 1 :]] for small in smaller(item))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        yield from sorted({0, 1, value // 2, value - 1} - {value})
    elif isinstance(value, float) and value not in (0.0, 1.0):
        yield 1.0


def _simplest(key: str, item: Any) -> Iterator[Any]:
    plain: dict[str, Any] = {
        "mask": None,
        "bias": None,
        "scores": "ScaledDot",
        "dtype": "float32",
        "damage": [],
        "changes": {},
    }
    if key in plain and item != plain[key] and item is not None:
        yield plain[key]


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{report['draws']:,} draws of seed {report['seed']} on {report['device']}"
    for kind, n in report["tried"].items():
        parts = {name.partition(": ")[2]: m for name, m in report["parts"].items() if name.startswith(kind + ":")}
        covered = [f"{name} {m:,}" for name, m in parts.items()]
        yield f"  {kind:9} {n:6,}   {', '.join(covered)}"
    yield "no failures" if not report["broken"] else f"{len(report['broken'])} distinct failures:"
    for failure in report["broken"]:
        yield f"\n{failure['kind']}, draw {failure['draw']}, {failure['times']} times: {failure['message']}"
        yield f"  {failure['repeat']}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after N seconds", metavar="N")
    parser.add_argument("--draws", type=int, help="stop after N draws", metavar="N")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KIND_WEIGHTS), help="draw only this kind")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if options.draws is None and options.seconds == float("inf"):
        parser.error("expected --seconds N or --draws N, got neither")
    torch.set_num_threads(1)
    report = fuzz(
        seed=options.seed, device=options.device, seconds=options.seconds, draws=options.draws, only=options.only
    )
    print(json.dumps(report) if options.json else "\n".join(lines(report)))
    return int(bool(report["broken"]))


if __name__ == "__main__":
    sys.exit(main())
