"""`clearhead generate`: go on from a prompt with a trained decoder, token by token."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.how import MinP, Seed, Temperature, TopK, TopP, sampling
from clearhead.cli.output import A_MODEL, Json, show_json
from clearhead.cli.where import AUTO, FLOAT32, Device, Dtype, placed
from clearhead.errors import DataError

_WANTED = 300  # tokens, where nobody says how many


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The beginning; for sort-dedup the letters, such as 'D A A'.")],
    model: Annotated[str, typer.Option(help=A_MODEL)] = "shakespeare",
    max_new: Annotated[
        int | None,
        typer.Option(help="How many tokens at most; by default 300, or fewer where the model ends.", min=1),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says; the model answers, by its chat template.")
    ] = False,
    slide: Annotated[
        bool, typer.Option("--slide", help="With learned positions, go on beyond them, over the last tokens.")
    ] = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    device: Device = AUTO,
    dtype: Dtype = FLOAT32,
    json: Json = False,
) -> None:
    """Go on from a prompt. Text appears after it as it is made; without sampling options, always the
    likeliest token."""
    import torch

    from clearhead import pretrained
    from clearhead.generation import stream
    from clearhead.pretrained.speak import conversation

    trained = pretrained.load(model, **placed(device, dtype))
    trained.require("text", "sort-dedup")
    tokenizer = trained.tokenizer
    stops = trained.stops
    ids = conversation(trained, [{"role": "user", "content": prompt}]) if chat else tokenizer.prompt(prompt)
    if trained.task == "sort-dedup":
        ids = [*ids, tokenizer.bos_id]
    if not ids:
        raise DataError("the prompt is empty: give some text to go on from")
    how = sampling(temperature, top_k, top_p, min_p, seed)
    wanted = _WANTED if max_new is None else max_new
    room, longest = _room(trained.model, len(ids), wanted, slide, model)
    bounds: dict[str, Any] = {"max_new": room, "stop": stops, "limits": trained.limits}
    steps = stream(trained.model, torch.tensor([ids]), how=how, slide=slide, **bounds)
    made: list[int] = []
    continues = trained.task != "sort-dedup" and not chat  # there the answer stands for itself
    before = tokenizer.decode(ids) if continues else ""
    shown = ""
    if continues and not json:
        sys.stdout.write(prompt)

    def written(new: list[int]) -> str:
        """The new text: of the whole, so that signs stay together that are one character only in company."""
        return tokenizer.decode([*ids, *new] if continues else new).removeprefix(before)

    for step in steps:
        made.append(int(step.ids[0]))
        if json or made[-1] in stops:
            continue
        # A torn character reads as �, which is held back until the rest has come.
        text = written(made).rstrip("\N{REPLACEMENT CHARACTER}")
        sys.stdout.write(text.removeprefix(shown))
        sys.stdout.flush()
        shown = text
    finished = bool(made) and made[-1] in stops
    text = written(made[:-1] if finished else made)
    if json:
        show_json({"model": model, "prompt": prompt, "text": text, "tokens": len(made), "finished": finished})
        return
    sys.stdout.write(text.removeprefix(shown) + "\n")
    if not finished and max_new is not None and room < max_new:
        sys.stderr.write(f"({model} reads at most {longest:,} tokens, which is where this ends; --slide goes on)\n")


def _room(model: Any, prompt: int, wanted: int, slide: bool, name: str) -> tuple[int, int | None]:
    """How many new tokens there can be, and how many tokens the model reads at most: only learned positions end."""
    from clearhead.positions import LearnedPositions

    table = getattr(model, "positions", None)
    if slide or not isinstance(table, LearnedPositions):
        return wanted, None
    longest = len(table.weight)
    if prompt >= longest:
        raise DataError(
            f"the prompt has {prompt:,} tokens and {name} reads at most {longest:,}; give a shorter one, or --slide, "
            "which goes on from the last of them"
        )
    return min(wanted, longest - prompt), longest
