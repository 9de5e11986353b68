"""`clearhead generate`: continue a prompt with a decoder, token by token."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead import hub
from clearhead.cli import INTERRUPTED
from clearhead.cli.app import app
from clearhead.cli.options import Device, Dtype, Json, ModelOption, argument, load_kwargs, option
from clearhead.cli.output import show_json
from clearhead.errors import ConfigError, DataError

if TYPE_CHECKING:
    from clearhead.generation import Greedy, Sample

_DEFAULT_TEMPERATURE = 0.8  # of small language models


@app.command()
def generate(
    prompt: Annotated[str, argument("Prompt; for sort-dedup letters such as 'D A A'.")],
    model: ModelOption = "shakespeare",
    max_new_tokens: Annotated[
        int | None, option("Maximum number of new tokens. Default: that of the model, or 128.", min=1)
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
    greedy: Annotated[
        bool,
        option("Always take the most likely token.", "--greedy"),
    ] = False,
    temperature: Annotated[
        float | None, option("Sampling temperature. Default: 0.8 for language models trained by clearhead.")
    ] = None,
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
    """Continue a prompt and stream the result.

    Small language models repeat themselves in greedy decoding, so those trained by clearhead sample by default. Other
    models follow their generation_config.json unless a sampling option or --greedy is given. Ctrl-C ends the text."""
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
    requested = trained.generation_settings.new_tokens(len(ids), max_new_tokens)
    limit, context = remaining_context(trained, len(ids), requested, sliding_context=sliding_context)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    samples_by_default = trained.train_recipe is not None and trained.task == "text"
    strategy = _strategy(sampling, seed, greedy=greedy, samples_by_default=samples_by_default)
    new_ids: list[int] = []
    text = ""
    if not json:
        sys.stdout.write("" if standalone or chat else prompt)
    pieces = stream_text(
        trained,
        ids,
        new_ids,
        standalone=standalone,
        strategy=strategy,
        max_new_tokens=limit,
        sliding_context=sliding_context,
    )
    is_interrupted = False
    try:
        for piece in pieces:
            text += piece
            if not json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:  # the text so far is the result
        is_interrupted = True
    finished = bool(new_ids) and new_ids[-1] in trained.stop_ids
    if json:
        show_json({"model": model, "prompt": prompt, "text": text, "tokens": len(new_ids), "finished": finished})
    else:
        sys.stdout.write("\n")
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if finished or json:
        return
    if limit < requested:
        notice = f"{model} has a context window of {context:,} tokens; --sliding-context continues beyond it"
        sys.stderr.write(f"({notice})\n")
    elif max_new_tokens is None:
        sys.stderr.write(f"(stopped after {limit:,} tokens; --max-new-tokens sets the limit)\n")


def _strategy(
    sampling: Mapping[str, float | None], seed: int, *, greedy: bool, samples_by_default: bool
) -> Greedy | Sample | None:
    """Return the decoding strategy that the options select, or None for that of the model."""
    from clearhead.generation import Greedy, Sample

    if sampling["temperature"] == 0:
        raise ConfigError("--temperature is 0; expected a number above 0, or --greedy, which is the limit")
    options: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if greedy and options:
        raise ConfigError(f"--greedy excludes sampling; remove it or --{next(iter(options)).replace('_', '-')}")
    if options:
        return Sample(**options, seed=seed)
    if samples_by_default and not greedy:
        return Sample(temperature=_DEFAULT_TEMPERATURE, seed=seed)
    return Greedy() if greedy else None
