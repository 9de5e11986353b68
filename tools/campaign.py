"""Looks for what breaks: draws calls, compares them with definitions in plain loops, and shrinks what differs.

    python tools/campaign.py --seconds 60 --device cpu --seed 0
    python tools/campaign.py --draws 20000 --seed 1 --json

Draw n of a seed is the same on every machine and in every run. It prints what was tried, by kind, and what broke: the
smallest case found that breaks in the same way, and the Python line that repeats it. The exit status is 1 if anything
did. `--only attend` draws one kind. It is no part of `make test`.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

import torch

from tools.trials import SHARES, Case, kinds

MOST_CHECKS = 400  # of smaller cases, for one that broke


def check(kind: str, case: Case) -> None:
    """Repeat one case; whatever is wrong is raised."""
    kinds()[kind].check(case)


def campaign(
    *, seed: int, device: str = "cpu", seconds: float = float("inf"), draws: int | None = None, only: str | None = None
) -> dict[str, Any]:
    """Draws until the time or the number of draws is over; what was tried and what broke, as plain values."""
    end, tried, parts = time.monotonic() + seconds, Counter[str](), Counter[str]()
    broken: dict[tuple[str, str], dict[str, Any]] = {}
    number = 0
    while (draws is None or number < draws) and time.monotonic() < end:
        kind, case = drawn(seed, number, device, only)
        found = attempt(kind, case)
        tried[kind] += 1
        if isinstance(found, list):
            parts.update(f"{kind}: {part}" for part in found)
        elif (kind, found[0]) in broken:
            broken[kind, found[0]]["times"] += 1
        else:
            small = shrunk(kind, case, found[0])
            message = attempt(kind, small)[1]
            line = f'python -c "from math import inf; from tools.campaign import check; check({kind!r}, {small!r})"'
            broken[kind, found[0]] = {
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
        "broken": list(broken.values()),
    }


def drawn(seed: int, number: int, device: str, only: str | None = None) -> tuple[str, Case]:
    """Draw `number` of a seed: a kind, and a case of it."""
    chance = random.Random(f"{seed} {number}")
    (kind,) = [only] if only else chance.choices(list(SHARES), list(SHARES.values()))
    return kind, kinds()[kind].draw(chance, device)


def attempt(kind: str, case: Case) -> Any:
    """What was tried, a list of names; or, where it broke, (a word for the way it broke, the message)."""
    state = torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kinds()[kind].check(case)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        # Two messages that differ only in numbers, or in what stands in brackets, tell of one fault.
        words = re.sub(
            r"\([^()]*\)|[-+]?\d[\d.,e+-]*|\binf\b|\bnan\b", "#", message.splitlines()[0].partition(" | ")[0]
        )
        return words[:60], message[:1000]
    finally:
        torch.random.set_rng_state(state)


def shrunk(kind: str, case: Case, word: str) -> Case:
    """A case as small as can be found that breaks in the same way."""
    checks, again = 0, True
    while again and checks < MOST_CHECKS:
        again = False
        for small in smaller(case):
            checks += 1
            found = attempt(kind, small)
            if not isinstance(found, list) and found[0] == word:
                case, again = small, True
                break
            if checks >= MOST_CHECKS:
                break
    return case


def smaller(value: Any) -> Iterator[Any]:
    """Values simpler than one of a case, the boldest first."""
    if isinstance(value, dict):
        for key, item in value.items():
            for simple in _simplest(key, item):
                yield value | {key: simple}
        for key, item in value.items():
            yield from (value | {key: small} for small in smaller(item))
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, list))  # a part of an expression
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


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield f"{found['draws']:,} draws of seed {found['seed']} on {found['device']}"
    for kind, n in found["tried"].items():
        some = [f"{name.partition(': ')[2]} {m:,}" for name, m in found["parts"].items() if name.startswith(kind + ":")]
        yield f"  {kind:9} {n:6,}   {', '.join(some)}"
    yield "nothing broke" if not found["broken"] else f"{len(found['broken'])} different things broke:"
    for each in found["broken"]:
        yield f"\n{each['kind']}, draw {each['draw']}, {each['times']} times: {each['message']}"
        yield f"  {each['repeat']}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--draws", type=int, help="stop after so many draws")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SHARES), help="draw this kind alone")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    if given.draws is None and given.seconds == float("inf"):
        parser.error("say when to stop: --seconds N or --draws N")
    torch.set_num_threads(1)
    found = campaign(seed=given.seed, device=given.device, seconds=given.seconds, draws=given.draws, only=given.only)
    print(json.dumps(found) if given.json else "\n".join(lines(found)))
    return int(bool(found["broken"]))


if __name__ == "__main__":
    sys.exit(main())
