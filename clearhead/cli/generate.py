"""`clearhead generate`: go on from a prompt with a trained decoder, token by token."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import ByModel, Device, Dtype, Json, argument, option, placed
from clearhead.cli.output import show_json
from clearhead.errors import DataError

_WANTED = 300  # tokens, where nobody says how many


@app.command()
def generate(
    prompt: Annotated[str, argument("The beginning; for sort-dedup the letters, such as 'D A A'.")],
    model: ByModel = "shakespeare",
    max_new_tokens: Annotated[
        int | None, option("How many tokens at most; by default 300, or fewer where the model ends.", min=1)
    ] = None,
    chat: Annotated[
        bool, option("The prompt is what a user says; the model answers, by its chat template.", "--chat")
    ] = False,
    sliding_context: Annotated[
        bool, option("With learned positions, go on beyond them, over the last tokens.", "--sliding-context")
    ] = False,
    temperature: Annotated[float | None, option("Sample at this temperature instead of greedily.")] = None,
    top_k: Annotated[int | None, option("Sample among the k likeliest.")] = None,
    top_p: Annotated[float | None, option("Sample among the likeliest that hold this probability.")] = None,
    min_p: Annotated[
        float | None, option("Sample among those at least this many times as likely as the likeliest.")
    ] = None,
    seed: Annotated[int, option("The seed of sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Go on from a prompt. Text appears after it as it is made; without sampling options, always the
    likeliest token."""
    from clearhead.generation import Greedy, Sample
    from clearhead.pretrained.speak import remaining_context, stream_text

    trained = pretrained.load(model, **placed(device, dtype))
    trained.require("text", "sort-dedup")
    tokenizer = trained.tokenizer
    ids = pretrained.conversation(trained, [{"role": "user", "content": prompt}]) if chat else tokenizer.prompt(prompt)
    alone = trained.task == "sort-dedup"  # there the answer stands for itself
    if alone:
        ids = [*ids, tokenizer.bos_id]
    if not ids:
        raise DataError("the prompt is empty: give some text to go on from")
    room, longest = remaining_context(
        trained, len(ids), _WANTED if max_new_tokens is None else max_new_tokens, sliding_context=sliding_context
    )
    asked: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    chance = {name: value for name, value in asked.items() if value is not None}
    how = {
        "strategy": Sample(**chance, seed=seed) if chance else Greedy(),
        "max_new_tokens": room,
        "sliding_context": sliding_context,
    }
    made: list[int] = []
    text = ""
    if not json:
        sys.stdout.write("" if alone or chat else prompt)
    for piece in stream_text(trained, ids, made, alone=alone, **how):
        text += piece
        if not json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finished = bool(made) and made[-1] in trained.stops
    if json:
        return show_json({"model": model, "prompt": prompt, "text": text, "tokens": len(made), "finished": finished})
    sys.stdout.write("\n")
    if not finished and max_new_tokens is not None and room < max_new_tokens:
        sys.stderr.write(
            f"({model} reads at most {longest:,} tokens, which is where this ends; --sliding-context goes on)\n"
        )
