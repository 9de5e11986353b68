"""A small Llama of transformers, trained on packed documents with a new layout at every step.

clearhead runs as an attention implementation of transformers ("backend") and through `apply_mask`. The peers are
FlexAttention in transformers, and padding: the same documents as rows of a batch, with scaled_dot_product_attention.
A step is forward, backward and a fused AdamW update; all contenders train on the same documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.changing.layouts import Layout, draw_layout
from benchmarks.changing.options import Options
from benchmarks.timed import Contender, Job, Timing, time_contenders
from clearhead.errors import MissingDependencyError
from clearhead.masks import documents
from clearhead.nn import apply_mask

LENGTHS = (16384,)
VOCAB_SIZE = 8192
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
SMOKE_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SPEEDUPS = {"flex": 1.2, "padding": 1.5}  # required

Inputs = tuple[dict[str, Tensor], Layout]


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each length."""
    name = "Llama, packed documents"
    if not options.peers or options.name_filter not in name:
        return
    for length in options.lengths_or(LENGTHS):
        row = Timing(section="training", name=name, sizes={"length": length})
        measure, without_flex = (partial(_measure, options, length, has_flex) for has_flex in (options.is_gpu, False))
        ahead = (partial(_run_once, options, length),) if options.is_gpu else ()
        yield Job(row, measure, ahead, without_peer=without_flex)


def _measure(options: Options, length: int, has_flex: bool, row: Timing) -> None:
    """Measure one row."""
    ways = ("backend", "apply_mask")
    row.targets = {f"{way} / {peer}": 1 / SPEEDUPS[peer] for way in ways for peer in SPEEDUPS}
    contenders = [_packed(options, length, "clearhead"), _applied(options, length), _padded(options, length)]
    if has_flex:
        contenders.append(_packed(options, length, "flex_attention"))
    time_contenders(row, contenders, seconds=4 * options.seconds, device=options.device)
    row.facts["parameters"] = sum(p.numel() for p in _model(options, length, "sdpa").parameters())
    row.facts |= {f"tokens/s, {name}": 1e3 * length / milliseconds for name, milliseconds in row.times.items()}


def _model(options: Options, length: int, implementation: str) -> nn.Module:
    """Build the model with random parameters."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM

        import clearhead.hub.transformers_backend  # noqa: F401  (registers the implementation "clearhead")
    except ImportError as error:
        raise MissingDependencyError(f"the baseline needs transformers, which cannot be imported: {error}") from error

    torch.manual_seed(0)
    sizes: dict[str, Any] = SMOKE_SIZES if options.smoke else SIZES
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=4,
        max_position_embeddings=length,
        attn_implementation=implementation,
        use_cache=False,
        **sizes,
    )
    return LlamaForCausalLM(config).to(options.device, options.dtype).train()


def _step(options: Options, model: nn.Module) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that makes one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=options.is_gpu)

    def step(inputs: dict[str, Tensor]) -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _packed(options: Options, length: int, implementation: str) -> Contender:
    """Return training on packed documents, which transformers recognizes by positions that start again at 0."""
    step = _step(options, _model(options, length, implementation))
    name = "backend" if implementation == "clearhead" else "flex"
    return Contender(name, lambda inputs: step(inputs[0]), partial(_packed_inputs, options, length))


def _applied(options: Options, length: int) -> Contender:
    """Return training with a document mask that `apply_mask` adds to the causal mask of the model."""
    model = _model(options, length, "sdpa")
    step = _step(options, model)

    def run(inputs: Inputs) -> None:
        with apply_mask(model, documents(inputs[1].ids)):
            step(inputs[0])

    def prepare(number: int) -> Inputs:
        inputs, layout = _packed_inputs(options, length, number)
        # Positions that start again would make transformers build a dense mask.
        return {name: tensor for name, tensor in inputs.items() if name != "position_ids"}, layout

    return Contender("apply_mask", run, prepare)


def _padded(options: Options, length: int) -> Contender:
    """Return training on the same documents as rows of a padded batch."""
    step = _step(options, _model(options, length, "sdpa"))
    return Contender("padding", step, partial(_padded_inputs, options, length))


def _run_once(options: Options, length: int) -> None:
    """Compile the kernels of FlexAttention, in a worker."""
    contender = _packed(options, length, "flex_attention")
    contender.run(contender.prepare(0))


def _ids(number: int, length: int) -> Tensor:
    """Draw the token ids of a step, (1, T)."""
    return torch.randint(VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(number))


def _packed_inputs(options: Options, length: int, number: int) -> Inputs:
    """Return the inputs of a step on packed documents, and their layout."""
    layout = draw_layout(number, 1, length, options.device)
    ids = _ids(number, length).to(options.device)
    starts = layout.starts.long()[layout.ids[0]]
    positions = torch.arange(length, device=options.device) - starts
    return {"input_ids": ids, "labels": ids, "position_ids": positions[None]}, layout


def _padded_inputs(options: Options, length: int, number: int) -> dict[str, Tensor]:
    """Return the inputs of a step with one document per row."""
    layout = draw_layout(number, 1, length, "cpu")
    parts = _ids(number, length)[0].split(layout.starts.diff().tolist())
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    ids = pad(list(parts))
    is_real = pad([torch.ones_like(part) for part in parts])
    inputs = {"input_ids": ids, "attention_mask": is_real, "labels": ids.masked_fill(is_real == 0, -100)}
    return {name: tensor.to(options.device) for name, tensor in inputs.items()}
