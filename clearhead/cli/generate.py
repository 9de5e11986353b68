"""`clearhead generate`: continue a prompt with a decoder, token by token."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Device, Dtype, Json, ModelOption, argument, load_kwargs, option
from clearhead.cli.output import show_json
from clearhead.errors import DataError

_DEFAULT_NEW_TOKENS = 300


@app.command()
def generate(
    prompt: Annotated[str, argument("Prompt; for sort-dedup letters such as 'D A A'.")],
    model: ModelOption = "shakespeare",
    max_new_tokens: Annotated[
        int | None, option("Maximum number of new tokens. Default: 300, or the model's context limit.", min=1)
    ] = None,
    chat: Annotated[
        bool, option("Format the prompt as a user message with the model's chat template.", "--chat")
    ] = False,
    sliding_context: Annotated[
        bool,
        option(
            "Continue past the context window by dropping the oldest tokens (learned positions only).",
            "--sliding-context",
        ),
    ] = False,
    temperature: Annotated[float | None, option("Sampling temperature. Default: greedy decoding.")] = None,
    top_k: Annotated[int | None, option("Sample among the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, option("Sample among the most likely tokens that together have this probability.")
    ] = None,
    min_p: Annotated[
        float | None, option("Sample among tokens at least this many times as likely as the most likely token.")
    ] = None,
    seed: Annotated[int, option("Random seed of sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Continue a prompt and stream the result. Greedy unless a sampling option is given."""
    from clearhead.generation import Greedy, Sample
    from clearhead.hub.text_generation import remaining_context, stream_text

    trained = hub.pipeline(model, **load_kwargs(device, dtype))
    trained.require("text", "sort-dedup")
    tokenizer = trained.tokenizer
    ids = hub.encode_chat(trained, [{"role": "user", "content": prompt}]) if chat else tokenizer.prompt(prompt)
    standalone = trained.task == "sort-dedup"  # its output does not continue the prompt
    if standalone:
        ids = [*ids, tokenizer.bos_id]
    if not ids:
        raise DataError("the prompt is empty; give a text to continue")
    limit, context = remaining_context(
        trained,
        len(ids),
        _DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        sliding_context=sliding_context,
    )
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = {name: value for name, value in settings.items() if value is not None}
    kwargs = {
        "strategy": Sample(**sampling, seed=seed) if sampling else Greedy(),
        "max_new_tokens": limit,
        "sliding_context": sliding_context,
    }
    new_ids: list[int] = []
    text = ""
    if not json:
        sys.stdout.write("" if standalone or chat else prompt)
    for piece in stream_text(trained, ids, new_ids, standalone=standalone, **kwargs):
        text += piece
        if not json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finished = bool(new_ids) and new_ids[-1] in trained.stop_ids
    if json:
        return show_json({"model": model, "prompt": prompt, "text": text, "tokens": len(new_ids), "finished": finished})
    sys.stdout.write("\n")
    if not finished and max_new_tokens is not None and limit < max_new_tokens:
        sys.stderr.write(
            f"({model} has a context window of {context:,} tokens; --sliding-context continues beyond it)\n"
        )
