"""`clearhead cost`: what any module costs, by watching it run on nothing, and, if asked, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from clearhead.cli.app import app
from clearhead.cli.options import MODEL_HELP, Dtype, Json, argument, option, resolve_device
from clearhead.cli.output import console, emit, show_json
from clearhead.errors import ConfigError


@app.command()
def cost(
    model: Annotated[
        str | None, argument(f"A preset (gpt2). {MODEL_HELP} Or a TOML file, or package.module:factory.")
    ] = None,
    d_model: Annotated[int | None, option("Instead of a model: one attention layer of this width.")] = None,
    n_heads: Annotated[int | None, option("Number of heads of the attention layer.")] = None,
    n_kv_heads: Annotated[int | None, option("Number of key/value heads, if fewer.")] = None,
    d_head: Annotated[int | None, option("Head dim, if not d_model / n_heads.")] = None,
    bias: Annotated[bool, option("Its projections have biases.", "--bias")] = False,
    tokens: Annotated[int | None, option("Length of the sequence (of the target).", "--tokens", "-n")] = None,
    source_length: Annotated[int | None, option("Length of the source, if not the same.")] = None,
    batch: Annotated[int, option("Batch size (per GPU).", "--batch", "-b")] = 1,
    dtype: Dtype = "float32",
    train: Annotated[bool, option("A training step with AdamW instead of a forward pass.", "--train")] = False,
    activation_checkpointing: Annotated[
        bool,
        option("Save only the input of each block and recompute the block in backward.", "--activation-checkpointing"),
    ] = False,
    mask: Annotated[str | None, option("A mask, such as 'causal() & window(256, 0)'.")] = None,
    impl: Annotated[str, option("Attention implementation: auto, sdpa, sparse or reference.")] = "auto",
    device: Annotated[
        str | None, option("cuda, cpu, or a machine whose time is wanted: h200, or a --save-machine file.")
    ] = None,
    gpus: Annotated[int | None, option("Number of GPUs of a training step.")] = None,
    parallel: Annotated[str | None, option("Parallelism: ddp or fsdp.")] = None,
    interconnect: Annotated[
        str | None, option("Bandwidth of each GPU to the others, such as 450GB/s; needed for the time.")
    ] = None,
    measure: Annotated[
        bool,
        option("Run it here too, and show the ratio of predicted to measured.", "--measure"),
    ] = False,
    save_machine: Annotated[Path | None, option("Measure this machine and write it to a file.")] = None,
    memory_limit: Annotated[str | None, option("Find the largest batch and length within it, such as 24GiB.")] = None,
    formulas: Annotated[bool, option("Show the formulas of the values.", "--formulas")] = False,
    json: Json = False,
) -> None:
    """Parameters, operations, bytes, memory and kernels of any module, before anything is computed.

    Operations are those of the matrix products, two for each multiplication with its addition."""
    from clearhead.analysis.cost import cost as predict
    from clearhead.cli import cost_output as answers

    alone = model is None and d_model is None and n_heads is None and tokens is None
    if save_machine is not None:
        if not alone or measure:
            raise ConfigError(
                "--save-machine measures this machine and nothing else; leave the model and --measure out"
            )
        return _measure_machine(device, save_machine, json)
    if measure and alone:
        raise ConfigError("--measure needs a model; `python -m benchmarks cost` measures the reference models")
    if source_length is not None and tokens is None:
        raise ConfigError("--source-length needs --tokens, the length of the target")
    subject = answers.subject_of(model, d_model, n_heads, {"n_kv_heads": n_kv_heads, "d_head": d_head, "bias": bias})
    how, machine = answers.how_of(dtype, train, mask, impl, device, measure)
    length: Any = tokens if source_length is None or tokens is None else (source_length, tokens)
    found = predict(subject, tokens=length, batch=batch, activation_checkpointing=activation_checkpointing, **how)
    document = found.to_dict(formulas=formulas or json)
    if machine is not None:
        document["time"] = answers.time_of(found, machine)
    if gpus is not None or parallel is not None:
        document["per_gpu"] = answers.share_of(found, gpus, parallel, interconnect, machine)
    if memory_limit is not None:
        options = how | {"activation_checkpointing": activation_checkpointing}
        document["memory_limit"] = answers.fit_of(subject, memory_limit, length, batch, options)
    if measure:
        document["measured"] = answers.measured(subject, found, length, batch, how)
    if json:
        return show_json(document)
    answers.show(found, model or "one attention layer", formulas, is_layer=model is None)
    for key, show in answers.SHOWN.items():
        if key in document:
            console.print()
            show(document[key])


def _measure_machine(device: str | None, path: Path, json: bool) -> None:
    import torch

    from clearhead.analysis.cost.measure import measure_this_machine

    where = resolve_device(device)
    machine = measure_this_machine(where, (torch.float32, torch.bfloat16) if where == "cuda" else (torch.float32,))
    machine.write(path)
    emit(json, machine.to_dict(), f"{machine.name}: written to {path}; predict for it with --device {path}")
