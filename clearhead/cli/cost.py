"""`clearhead cost`: predict what a module costs by running it on fake tensors, and optionally measure it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from clearhead.cli.app import app
from clearhead.cli.module_options import InputDim, InputShape, VocabSize, input_spec
from clearhead.cli.options import MODEL_HELP, Dtype, Json, ModelCommand, argument, option, parse_dtype, resolve_device
from clearhead.cli.output import console, emit, progress, show_json
from clearhead.errors import ConfigError


@app.command(cls=ModelCommand)
def cost(
    model: Annotated[
        str | None, argument(f"{MODEL_HELP} Or a preset such as gpt2, a TOML file, or package.module:factory.")
    ] = None,
    d_model: Annotated[int | None, option("Instead of a model: one attention layer with this d_model.")] = None,
    n_heads: Annotated[int | None, option("Number of heads of the attention layer.")] = None,
    n_kv_heads: Annotated[int | None, option("Number of key/value heads, if fewer.")] = None,
    d_head: Annotated[int | None, option("Head dim, if not d_model / n_heads.")] = None,
    bias: Annotated[bool, option("The projections of the layer have biases.", "--bias")] = False,
    tokens: Annotated[int | None, option("Sequence length (of the target).", "--tokens", "-n")] = None,
    source_length: Annotated[int | None, option("Source length, if it differs.")] = None,
    batch: Annotated[int, option("Batch size (per GPU).", "--batch", "-b")] = 1,
    dtype: Dtype = "float32",
    train: Annotated[bool, option("A training step with AdamW instead of a forward pass.", "--train")] = False,
    activation_checkpointing: Annotated[
        bool,
        option("Save only the input of each block and recompute the block in backward.", "--activation-checkpointing"),
    ] = False,
    vocab_size: VocabSize = None,
    input_dim: InputDim = None,
    input_shape: InputShape = None,
    mask: Annotated[str | None, option("A mask, such as 'causal() & window(256, 0)'.")] = None,
    impl: Annotated[str, option("Attention implementation: auto, sdpa, sparse or reference.")] = "auto",
    device: Annotated[
        str | None, option("cuda, cpu, or a machine to predict the time for: h200, or a --save-machine file.")
    ] = None,
    gpus: Annotated[int | None, option("Predict one of this many GPUs in a training step.")] = None,
    parallel: Annotated[str | None, option("Parallelism: ddp or fsdp.")] = None,
    interconnect: Annotated[str | None, option("Bandwidth between GPUs, such as 450GB/s; needed for the time.")] = None,
    measure: Annotated[
        bool,
        option("Also run the model here, and show the ratio of predicted to measured.", "--measure"),
    ] = False,
    save_machine: Annotated[Path | None, option("Measure this machine and write it to a file.")] = None,
    memory_limit: Annotated[str | None, option("Find the largest batch and length that fit, such as 24GiB.")] = None,
    formulas: Annotated[bool, option("Show closed forms of the values.", "--formulas")] = False,
    json: Json = False,
) -> None:
    """Predict parameters, FLOPs, bytes, memory and kernel launches of a module without computing anything.

    FLOPs count matrix products, two per multiply-add. Describe the inputs of an unknown module with --vocab-size,
    --input-dim or --input-shape."""
    from clearhead import masks
    from clearhead.analysis.cost.fit import parse_bytes
    from clearhead.analysis.cost.predict import model_builder
    from clearhead.cli import cost_output as output
    from clearhead.cli import cost_query

    layer = cost_query.LayerSizes(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias)
    has_no_model = model is None and d_model is None and n_heads is None and tokens is None
    if save_machine is not None:
        if not has_no_model or measure:
            raise ConfigError("--save-machine only measures this machine; omit the model and --measure")
        return _measure_machine(device, save_machine, json)
    if measure and has_no_model:
        raise ConfigError("--measure needs a model; `python -m benchmarks cost` measures the reference models")
    if source_length is not None and tokens is None:
        raise ConfigError("--source-length needs --tokens, the length of the target")
    subject = cost_query.resolve_model(model, layer)
    inputs = input_spec(vocab_size, input_dim, input_shape)
    if inputs:
        subject = replace(model_builder(subject), inputs=inputs["inputs"])
    target_device, machine = cost_query.choose_device(device, measure=measure)
    query = cost_query.CostQuery(
        subject=subject,
        tokens=tokens if source_length is None or tokens is None else (source_length, tokens),
        batch=batch,
        dtype=parse_dtype(dtype),
        training=train,
        mask=None if mask is None else masks.parse(mask),
        impl=impl,
        device=target_device,
        activation_checkpointing=activation_checkpointing,
    )
    sections: list[output.CostSection] = []
    with progress("running on tensors without data", hidden=json) as advance:
        prediction = query.predict()
        if formulas or json:
            advance(0, None, "finding formulas")
            prediction.to_dict(formulas=True)
        if machine is not None:
            sections.append(output.TimeSection(prediction, machine))
        if (gpus, parallel, interconnect) != (None, None, None):
            sections.append(output.PerGPUSection.predict(prediction, gpus, parallel, interconnect, machine))
        if memory_limit is not None:
            advance(0, None, "finding the largest batch and length")
            sections.append(output.FitSection(query, query.largest_fit(parse_bytes(memory_limit))))
        if measure:
            advance(0, None, "measuring")
            sections.append(output.MeasuredSection.measure(query, prediction))
    if json:
        return show_json(prediction.to_dict(formulas=True) | {part.key: part.to_dict() for part in sections})
    output.show(prediction, model or "one attention layer", formulas, is_layer=model is None)
    for section in sections:
        console.print()
        section.show()


def _measure_machine(device: str | None, path: Path, json: bool) -> None:
    """Measure this machine and write it to a file."""
    import torch

    from clearhead.analysis.cost.measure import measure_this_machine

    device_type = resolve_device(device)
    machine = measure_this_machine(
        device_type, (torch.float32, torch.bfloat16) if device_type == "cuda" else (torch.float32,)
    )
    machine.write(path)
    emit(json, machine.to_dict(), f"{machine.name}: written to {path}; predict for it with --device {path}")
