"""The tables of the README, made from committed results: `python -m clearhead.bench.readme` writes them again.

Each table stands between two marks, `<!-- name -->` and `<!-- /name -->`. No figure in it is typed by hand: measurements
come from the files in docs/results, which commands write, and the models' numbers from their cards.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
BOX = ROOT / "clearhead" / "pretrained"


def core() -> str:
    """What `clearhead bench core` measured."""
    document = json.loads((RESULTS / "core.json").read_text(encoding="utf-8"))
    rows = [(row["name"], f"{row['ratio']:.3f}", f"≤ {row['bound']:g}") for row in document["rows"]]
    machine, torch = document["machine"], document["versions"]["torch"]
    where = f"{machine['processor']}, {machine['threads']} threads, torch {torch}"
    return _table(("ours / peer", "ratio of times", "wanted"), rows) + f"\n\nMeasured on {where}."


def models() -> str:
    """What the models in the box do, from their cards."""
    rows = []
    for path in sorted(BOX.glob("*/card.toml")):
        card = tomllib.loads(path.read_text(encoding="utf-8"))
        rows.append((f"`{path.parent.name}`", card["about"], f"{card['weights']:,}", card["headline"]))
    return _table(("model", "what it does", "weights", "measured"), rows)


TABLES = {"core": core, "models": models}


def updated(text: str) -> str:
    """The README with every table made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        table = make()
        text, found = pattern.subn(lambda match, table=table: match[1] + table + "\n" + match[2], text)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"README.md has {found} places for the table {name!r}; expected one")
    return text


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write("README.md is up to date\n")


if __name__ == "__main__":
    main()
