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
    from clearhead import pretrained
    from clearhead.pretrained.speak import pieces, room_for

    trained = pretrained.load(model, **placed(device, dtype))
    trained.require("text", "sort-dedup")
    tokenizer = trained.tokenizer
    ids = pretrained.conversation(trained, [{"role": "user", "content": prompt}]) if chat else tokenizer.prompt(prompt)
    if trained.task == "sort-dedup":
        ids = [*ids, tokenizer.bos_id]
    if not ids:
        raise DataError("the prompt is empty: give some text to go on from")
    room, longest = room_for(trained, len(ids), _WANTED if max_new is None else max_new, slide=slide)
    how: dict[str, Any] = {"how": sampling(temperature, top_k, top_p, min_p, seed), "max_new": room, "slide": slide}
    alone = trained.task == "sort-dedup"  # there the answer stands for itself
    made: list[int] = []
    text = ""
    if not json:
        sys.stdout.write("" if alone or chat else prompt)
    for piece in pieces(trained, ids, made, alone=alone, **how):
        text += piece
        if not json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finished = bool(made) and made[-1] in trained.stops
    if json:
        show_json({"model": model, "prompt": prompt, "text": text, "tokens": len(made), "finished": finished})
        return
    sys.stdout.write("\n")
    if not finished and max_new is not None and room < max_new:
        sys.stderr.write(f"({model} reads at most {longest:,} tokens, which is where this ends; --slide goes on)\n")
