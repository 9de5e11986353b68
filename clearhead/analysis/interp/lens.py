"""Logit lens: the model's prediction after each of its blocks.

The model's own final norm and head are applied to the residual stream after each block, where they always run: the
model is called again, its blocks immediately return their recorded outputs, and the last block returns the stream of
another layer. After the last block, the lens is therefore bit-identical to the model's output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clearhead._core.json_types import JSONObject
from clearhead._core.keywords import explain_keywords
from clearhead.analysis.inputs.model_inputs import ModelArgs, run_logits
from clearhead.analysis.inputs.outputs import replace_first_tensor
from clearhead.analysis.inputs.pipelines import resolve_inputs
from clearhead.analysis.interp.residual_stream import BlockCall, record_residual_stream
from clearhead.analysis.tracing.recompute import Indices, resolve_indices, select_indices
from clearhead.analysis.views.chart import Chart, HasCharts
from clearhead.errors import ConfigError
from clearhead.hub import Pipeline

TokenNames = Callable[[int], str]
"""Maps a token id to its display form."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitLens(HasCharts):
    """Logits after each layer.

    Args:
        layers: Paths; the first is the input of the blocks.
        logits: Logits after each layer, (L + 1, B, T, V) for text.
        positions: Positions of the logits; only 0 for a classifier.
        tokens: The text, if one was given.
        token_name: Maps an output id to its display form.
    """

    layers: tuple[str, ...]
    logits: Tensor
    positions: tuple[int, ...]  # positions of the logits; only 0 for a classifier
    tokens: tuple[str, ...] = ()  # the text, if the lens was given one
    token_name: TokenNames = str  # maps an output id to its display form

    def top(self, k: int = 1) -> tuple[Tensor, Tensor]:
        """Return the k most probable tokens and their probabilities, in descending order: each (L + 1, B, T, k)."""
        best = self.logits.float().softmax(-1).topk(min(k, self.logits.shape[-1]), -1)
        return best.indices, best.values

    def ranks(self) -> Tensor:
        """Return the rank, (L + 1, B, T), of the model's final prediction after each layer; 0 is the first."""
        final_ids = self.logits[-1].argmax(-1)[None, ..., None].expand(*self.logits.shape[:-1], 1)
        return (self.logits > self.logits.gather(-1, final_ids)).sum(-1)

    def charts(self, tokens: Sequence[str] | None = None, name: TokenNames | None = None) -> list[Chart]:
        """Return a chart of the prediction after each layer and token, the last layer on top."""
        tokens = (self.tokens or None) if tokens is None else tokens
        name = self.token_name if name is None else name
        top_ids, top_probabilities = self.top()
        token_ids = top_ids[:, 0].reshape(len(self.layers), -1)
        probabilities = top_probabilities[:, 0].reshape(len(self.layers), -1)
        words = [[name(token) for token in row] for row in token_ids.tolist()]
        columns = [str(i) if tokens is None else tokens[i] for i in self.positions]
        rows = [*(f"layer {i}" for i in reversed(range(len(self.layers) - 1))), "in"]
        columns = columns if self.logits.dim() > 3 else ["prediction"]
        note = "Strong colors are probable. The top row is the model's output; “in” is the input of its first block."
        title = "Prediction after each layer"
        texts = words[::-1]
        return [Chart(title=title, rows=rows, columns=columns, values=probabilities.flip(0), texts=texts, note=note)]

    def to_dict(self, name: TokenNames | None = None, *, k: int = 5) -> JSONObject:
        """Return the k most probable tokens for each layer and position of the first sequence."""
        display = self.token_name if name is None else name
        top_ids, top_probabilities = self.top(k)
        shape = (len(self.layers), len(self.positions), -1)
        tokens = top_ids[:, 0].reshape(shape).tolist()
        probabilities = top_probabilities[:, 0].reshape(shape).tolist()

        def best(ids: list[int], probabilities: list[float]) -> list[JSONObject]:
            return [{"id": i, "token": display(i), "probability": p} for i, p in zip(ids, probabilities, strict=True)]

        predictions = [list(map(best, *pair)) for pair in zip(tokens, probabilities, strict=True)]
        rows = [{"layer": layer, "predictions": call} for layer, call in zip(self.layers, predictions, strict=True)]
        return {"positions": list(self.positions), "layers": rows}


@explain_keywords
def logit_lens(model: nn.Module | Pipeline, args: ModelArgs | str, *, positions: Indices = None) -> LogitLens:
    """Apply the model's final norm and head to the residual stream after each block.

        lens = analysis.logit_lens(model, ids, positions=-1)
        lens.top()                             # the prediction after each block, and its probability
        lens.logits[-1]                        # the output of the model
        analysis.logit_lens(ch.pipeline("shakespeare"), "To be, or not")

    Args:
        model: Model in evaluation mode, or a pipeline.
        args: Input tensor, tuple of arguments, or dict of keyword arguments; for a pipeline also a text.
        positions: Positions whose logits are kept; all logits of a long text take much memory.

    Returns:
        The logits after each block, with tokens and probabilities in its tables and charts.

    Raises:
        ConfigError: If no blocks are found between input and logits.
    """
    model, inputs = resolve_inputs(model, args)
    args = inputs.args
    stream = record_residual_stream(model, args)
    if not stream.blocks:
        raise ConfigError(
            "no blocks were found between input and logits; expected layers in an nn.ModuleList or nn.Sequential that "
            "each add to the output of the previous one"
        )
    is_text = stream.logits.dim() > 2
    position_ids = resolve_indices(positions, stream.logits.shape[-2], "position") if is_text else [0]
    blocks, ran = stream.blocks, stream.ran
    last = blocks[-1]
    end = ran[last].number
    earlier = {path: call for path, call in ran.items() if call.number < end and not path.startswith(last)}
    logits_by_layer = []
    for state in (ran[blocks[0]].input_value, *(ran[block].value for block in blocks)):
        calls = earlier | {last: replace(ran[last], value=ran[last].value if state is None else state)}
        by_module = {model.get_submodule(path): call for path, call in calls.items()}
        logits = run_logits(_with_fixed_outputs(model, by_module), args)
        logits_by_layer.append((select_indices(logits, -2, position_ids) if is_text else logits).clone())
    return LogitLens(
        layers=(f"into {blocks[0]}", *blocks),
        logits=torch.stack(logits_by_layer),
        positions=tuple(position_ids),
        tokens=inputs.tokens,
        token_name=inputs.name,
    )


def _with_fixed_outputs(model: nn.Module, calls: Mapping[nn.Module, BlockCall]) -> nn.Module:
    """Return a copy of the model in which these modules return the recorded values without running.

    Only these modules and those that contain them are copied; parameters are shared.
    """
    if model in calls:
        call = calls[model]

        def forward(*args: object, **kwargs: object) -> object:
            # A copy, because the model may change it in place.
            return call.output if call.value is None else replace_first_tensor(call.output, call.value.clone())

        clone = copy.copy(model)
        vars(clone)["forward"] = forward
        return clone
    clones = {child: _with_fixed_outputs(child, calls) for child in model.children()}
    if all(clone is child for child, clone in clones.items()):
        return model
    clone = copy.copy(model)
    children = {name: None if child is None else clones[child] for name, child in model._modules.items()}
    vars(clone)["_modules"] = children
    return clone
