"""`clearhead models`: the trained models in the box, with what is on their cards."""

from __future__ import annotations

from typing import Annotated, Any

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument
from clearhead.cli.output import answer, console, show_json, table


@app.command()
def models(name: Annotated[str | None, argument("Show this model's whole card.")] = None, json: Json = False) -> None:
    """List the trained models that come with clearhead, or show one's card."""
    from clearhead.errors import StorageError
    from clearhead.pretrained.box import find, read_card

    if name is not None:
        folder = find(name)
        card = read_card(folder)
        if not card:
            raise StorageError(f"{folder} has no card; measure the model with: clearhead evaluate {name}")
        if json:
            return show_json(card)
        tables = {"": {key: value for key, value in card.items() if not isinstance(value, dict)}}
        tables |= {f"measured, {how}": metrics for how, metrics in card.get("metrics", {}).items()}
        for title, values in tables.items():
            console.print(table((title, ""), [(key.replace("_", " "), _read(value)) for key, value in values.items()]))
            console.print()
        return
    cards = pretrained.cards()
    lines = [
        (
            name,
            card.get("task", ""),
            f"{card.get('parameters', 0):,}",
            card.get("description", ""),
            card.get("summary", ""),
        )
        for name, card in cards.items()
    ]
    answer(json, cards, table(("model", "task", "weights", "what it does", "how well"), lines))


def _read(value: Any) -> Any:
    """A number as people read it: four digits of a measure, and whole numbers by thousands."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
