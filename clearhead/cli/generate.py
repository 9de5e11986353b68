"""`clearhead generate`: go on from a prompt with a trained decoder, token by token."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.how import MinP, Seed, Temperature, TopK, TopP, sampling
from clearhead.cli.output import A_MODEL, Json, show_json
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
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Go on from a prompt. Text appears as it is made; without sampling options, always the likeliest token."""
    import torch

    from clearhead import pretrained
    from clearhead.generation import stream

    trained = pretrained.load(model)
    trained.require("text", "sort-dedup")
    tokenizer = trained.tokenizer
    stops = trained.stops
    ids = tokenizer.prompt(prompt)
    if trained.task == "sort-dedup":
        ids = [*ids, tokenizer.bos_id]
    if not ids:
        raise DataError("the prompt is empty: give some text to go on from")
    how = sampling(temperature, top_k, top_p, min_p, seed)
    wanted = _WANTED if max_new is None else max_new
    longest = getattr(trained.model.config, "max_len", len(ids) + wanted)
    if len(ids) >= longest:
        raise DataError(f"the prompt has {len(ids):,} tokens and {model} reads at most {longest:,}; give a shorter one")
    room = min(wanted, longest - len(ids))
    steps = stream(trained.model, torch.tensor([ids]), how=how, max_new=room, stop=stops)
    made: list[int] = []
    shown = ""
    for step in steps:
        made.append(int(step.ids[0]))
        if json or made[-1] in stops:
            continue
        # Decoding the whole each time keeps pieces together that are one character only in company; alone they read as
        # �, which is held back until the rest has come.
        text = tokenizer.decode(made).rstrip("\N{REPLACEMENT CHARACTER}")
        sys.stdout.write(text.removeprefix(shown))
        sys.stdout.flush()
        shown = text
    finished = bool(made) and made[-1] in stops
    text = tokenizer.decode(made[:-1] if finished else made)
    if json:
        show_json({"model": model, "prompt": prompt, "text": text, "tokens": len(made), "finished": finished})
        return
    sys.stdout.write(text.removeprefix(shown) + "\n")
    if not finished and max_new is not None and room < max_new:
        sys.stderr.write(f"({model} reads at most {longest:,} tokens, which is where this ends)\n")
