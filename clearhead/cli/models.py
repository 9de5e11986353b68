"""`clearhead models`: list the bundled models and show their cards."""

from __future__ import annotations

from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Json, ModelCommand, argument
from clearhead.cli.output import console, emit, show_json, table


@app.command(cls=ModelCommand)
def models(name: Annotated[str | None, argument("Show the card of this model.")] = None, json: Json = False) -> None:
    """List the bundled models, or show the card of one."""
    from clearhead.errors import StorageError
    from clearhead.hub.bundled import model_folder, read_card

    if name is not None:
        folder = model_folder(name)
        card = read_card(folder)
        if not card:
            raise StorageError(f"{folder} has no card; measure the model with: clearhead evaluate {name}")
        if json:
            return show_json(card)
        tables: dict[str, dict[str, object]] = {
            "": {key: value for key, value in card.items() if not isinstance(value, dict)}
        }
        tables |= {f"measured, {decoding}": {**metrics} for decoding, metrics in card.get("metrics", {}).items()}
        for title, values in tables.items():
            console.print(
                table((title, ""), [(key.replace("_", " "), _format_value(value)) for key, value in values.items()])
            )
            console.print()
        return
    cards = hub.cards()
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
    emit(json, cards, table(("model", "task", "parameters", "description", "summary"), lines))


def _format_value(value: object) -> object:
    """Format a value: four digits for floats, thousands separators for integers."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
