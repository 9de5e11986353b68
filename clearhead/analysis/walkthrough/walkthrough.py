"""Walkthrough of one forward pass: every step with its formula and the values of the run.

    walkthrough = analysis.build_walkthrough(ch.pipeline("en-es"), "Hello world")
    print(walkthrough)                                     # in the terminal; in a notebook it draws itself
    walkthrough["encoder.blocks.0", "weights"].values      # (H, S, S): attention weights of the first block
    walkthrough.predictions[0].top                         # the five most probable first tokens

A text is generated greedily first. One pass over all of it is then recorded, which contains every step because of the
causal mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from clearhead._core.call_types import Kwargs
from clearhead._core.json_types import JSONObject
from clearhead.analysis.inputs import pipelines as tasks
from clearhead.analysis.inputs.outputs import first_tensor
from clearhead.analysis.tracing.trace import trace
from clearhead.analysis.views.page import iframe, render_template
from clearhead.analysis.walkthrough.builder import TokenAxis, WalkthroughBuilder
from clearhead.analysis.walkthrough.recorded_calls import record_calls
from clearhead.analysis.walkthrough.steps import WalkthroughStep, as_text, texts
from clearhead.errors import ConfigError, DataError
from clearhead.generation import Greedy, generate
from clearhead.hub import Pipeline
from clearhead.hub.translate import translations
from clearhead.models import CTCEncoder, Decoder, Encoder, EncoderDecoder, VisionTransformer
from clearhead.nn.modes import eval_mode, iter_modules

WALK_SCRIPTS = ("architecture.js", "walk.js")
TOP_K = 5
NEW_TOKENS = 8  # for open-ended text
SIDE = 64  # maximum cells per side of a matrix in JSON
_NUMBERS = 4096  # values of the vectors of one step in JSON, over all tokens
_ALL_NUMBERS = (
    400_000  # values of the vectors of all steps in JSON, from which each step gets whole vectors if they fit
)
_LEAST, _MOST = 8, 64  # minimum and maximum values of one vector in JSON
_ROWS = 256  # tokens whose vectors are included


@dataclass(frozen=True)
class TokenProbability:
    """A token or class, and its probability."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction of one step: context tokens, most probable tokens, and selected token."""

    context: tuple[str, ...]
    top: tuple[TokenProbability, ...]
    token: TokenProbability


@dataclass(frozen=True)
class Section:
    """Consecutive steps `first` to `last`: input, a block, or output."""

    path: str
    title: str
    first: int
    last: int
    block: int | None = None  # index in its stack
    order: str = ""  # of a block: "pre-norm", "post-norm" or "parallel", as observed in the run


@dataclass(frozen=True, kw_only=True, eq=False)
class Walkthrough:
    """The steps of one run, in order.

    Attributes:
        title: Title of the page.
        model: Name of the model.
        kind: Class of the model.
        steps: The steps.
        predictions: The prediction of each position, or the one answer.
        sizes: Sizes by symbol.
        metadata: Names and values displayed under the title.
    """

    title: str
    model: str
    kind: str
    steps: Sequence[WalkthroughStep]
    predictions: Sequence[Prediction] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # by letter
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, at: tuple[str, str]) -> WalkthroughStep:
        """Return the first step with this `role` in a module or block: `walkthrough["decoder.blocks.0", "scores"]`.

        Raises:
            ConfigError: If the step does not exist.
        """
        where, role = at
        for step in self.steps:
            matches_path = where in ("", step.module, step.section) or step.module.startswith(f"{where}.")
            if matches_path and step.role == role:
                return step
        roles = ", ".join(dict.fromkeys(step.role for step in self.steps))
        raise ConfigError(f"unknown step {role!r} in {where or 'the model'}; the roles are: {roles}")

    @property
    def sections(self) -> list[Section]:
        """The steps grouped by block, in order."""
        together = groupby(range(len(self.steps)), key=lambda i: self.steps[i].section)
        return [_section(self.steps, list(numbers)) for _, numbers in together]

    def to_dict(self) -> JSONObject:
        """Return everything as JSON data: vectors (long ones without their last values), and matrices up to 64 × 64."""
        budget = _ALL_NUMBERS // max(1, sum(step.kind == "vectors" for step in self.steps))
        return {"title": self.title, "model": self.model, "kind": self.kind} | {
            "metadata": dict(self.metadata),
            "sizes": dict(self.sizes),
            "symbols": texts()["symbols"],
            "sections": [asdict(section) for section in self.sections],
            "steps": [_step_to_dict(step, budget) for step in self.steps],
            "predictions": [asdict(prediction) for prediction in self.predictions],
        }

    def text(self, *, layer: str | int = 0, head: int = 0, width: int = 100, color: bool = False) -> str:
        """Return the walkthrough for a terminal, with the blocks of this index (or path) in full."""
        return as_text(self, layer=layer, head=head, width=width, color=color)

    def html(self) -> str:
        """Return the walkthrough as one self-contained page."""
        return render_template(
            "walk.html", self.title, self.to_dict(), styles=("page.css", "walk.css"), scripts=WALK_SCRIPTS
        )

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return iframe(self.html(), self.title)


def build_walkthrough(
    model: Pipeline | nn.Module, *model_input: Any, max_new_tokens: int | None = None, data: Path | None = None
) -> Walkthrough:
    """Run a model on an input and return a walkthrough of the run.

        analysis.build_walkthrough(ch.pipeline("en-es"), "Hello world")

    Args:
        model: A loaded pretrained model, or a module.
        *model_input: A sentence, a prompt, letters, or an image of a digit (file, index or (height, width) bytes); for
            a module, its input tensors.
        max_new_tokens: Maximum number of generated tokens; default: until the end, or 8 for open-ended text.
        data: Data set from which an image is selected by index.

    Returns:
        The walkthrough: steps, predictions and sizes.

    Raises:
        ConfigError: If the model has no attention that can be recorded.
    """
    if isinstance(model, nn.Module):  # without a tokenizer, tokens are labeled by position
        axes = {"encoder": TokenAxis("S", (), 0)} if len(model_input) > 1 else {}
        name = type(model).__name__
        return _WalkthroughRun(model, name, axes | {"": TokenAxis("T", (), 0)}, None, *model_input).result(
            f"A run of {name}"
        )
    trained = model
    text = model_input[0]
    if isinstance(trained.model, EncoderDecoder):
        return _of_pair(trained, text, max_new_tokens)
    if isinstance(trained.model, VisionTransformer):
        return _of_image(trained, text, data)
    if isinstance(trained.model, (Decoder, Encoder)):
        return _of_text(trained, text, max_new_tokens)
    if isinstance(trained.model, CTCEncoder):
        raise DataError(
            f"{trained.name} has the type CTCEncoder, which has no walkthrough; `clearhead inspect` shows its attention"
        )
    raise tasks.no_attention_error(trained)


def _of_text(trained: Pipeline, text: str, max_new_tokens: int | None) -> Walkthrough:
    """Return the walkthrough of a prompt of a decoder, letters to sort, or a text of an encoder."""
    is_sorting = trained.task == "sort-dedup"
    ids, generated = (
        tasks.sorting_ids(trained, text, with_stop=True) if is_sorting else (tasks.encode_prompt(trained, text), [])
    )
    generated = generated[:max_new_tokens]
    if isinstance(trained.model, Decoder) and not generated:
        # The last token is generated but not encoded.
        n_new = min(max_new_tokens or NEW_TOKENS, trained.model.config.max_len - len(ids) + 1)
        new = generate(
            trained.model,
            tasks.ids_tensor(trained, ids),
            strategy=Greedy(),
            max_new_tokens=n_new,
            stop_ids=trained.stop_ids,
        )
        generated = new.sequence(0, with_stop=True).tolist()
    return _of_ids(trained, text, ids, generated)


def _of_pair(trained: Pipeline, text: str, max_new_tokens: int | None) -> Walkthrough:
    generated = translations(trained, [text], strategy=Greedy(), max_new_tokens=max_new_tokens)[0]
    source_ids, target = tasks.source_and_target_ids(trained, generated)
    n_start = len(target) - len(generated.target_ids) + 1
    return _of_ids(trained, text, target[:n_start], list(generated.target_ids), source_ids)


def walkthrough_of_ids(
    trained: Pipeline, ids: Sequence[int], *, n_prompt: int, source_ids: Sequence[int] = ()
) -> Walkthrough:
    """Return the walkthrough of the ids of a run; nothing is encoded or generated, except for the next token.

        walkthrough_of_ids(ch.pipeline("shakespeare"), ids, n_prompt=len(ids))

    Args:
        trained: A pipeline with a tokenizer.
        ids: Ids of the decoder, or of the only stack: the prompt, and the generated ids.
        n_prompt: Number of ids that were not generated.
        source_ids: Ids of the encoder.

    Returns:
        The walkthrough, with the prediction of every generated id. If the last id is not a stop id, there is also the
        most probable next one.
    """
    text = trained.tokenizer.decode([i for i in source_ids or ids[:n_prompt] if i not in trained.stop_ids])
    is_open = isinstance(trained.model, (Decoder, EncoderDecoder)) and (
        len(ids) == n_prompt or ids[-1] not in trained.stop_ids
    )
    generated = list(ids[n_prompt:])
    if is_open:
        with torch.no_grad(), eval_mode(iter_modules(trained.model)):
            inputs = [tasks.ids_tensor(trained, row) for row in (source_ids, ids) if len(row)]
            generated.append(int(trained.model(*inputs)[0, -1].argmax()))
    return _of_ids(trained, text, list(ids[:n_prompt]), generated, list(source_ids))


def _of_ids(
    trained: Pipeline, text: str, prompt_ids: list[int], generated: list[int], source_ids: Sequence[int] = ()
) -> Walkthrough:
    """Return the walkthrough of a run; the last generated id is not encoded."""
    names = trained.tokenizer.tokens
    input_ids = [*prompt_ids, *generated[:-1]]
    axes = {"encoder": TokenAxis("S", names(list(source_ids)), len(source_ids))} if source_ids else {}
    axes |= {"": TokenAxis("T", names(input_ids), len(prompt_ids))}
    inputs = (tasks.ids_tensor(trained, row) for row in (source_ids, input_ids) if row)
    run = _WalkthroughRun(trained.model, trained.name, axes, text, *inputs)
    if not generated:
        return run.result(tasks.shorten_text(text))
    run.add_predictions(generated, names, first=len(prompt_ids) - 1)
    answer = trained.tokenizer.decode([i for i in generated if i not in trained.stop_ids])
    return run.result(f"{tasks.shorten_text(text)} → {answer if source_ids else tasks.shorten_text(answer)}")


def _of_image(trained: Pipeline, model_input: str | Tensor, data: Path | None) -> Walkthrough:
    pixels = model_input if isinstance(model_input, Tensor) else tasks.read_image(trained, model_input, data)
    tokens = tasks.patch_labels(trained)
    axis = TokenAxis("T", tokens, len(tokens))
    run = _WalkthroughRun(trained.model, trained.name, {"": axis}, pixels, tasks.image_input(trained, pixels))
    run.add_predictions([int(run.output[0].argmax())], lambda ids: [str(i) for i in ids])
    name = "an image" if isinstance(model_input, Tensor) else Path(model_input).name
    return run.result(f"{name} → {run.predictions[0].token.token}")


class _WalkthroughRun:
    """A recorded run of the model on these inputs."""

    def __init__(
        self, model: nn.Module, name: str, axes: dict[str, TokenAxis], model_input: str | Tensor | None, *inputs: Tensor
    ) -> None:
        self._model = model
        self._name = name
        self._axes = axes
        self.predictions: list[Prediction] = []
        with torch.no_grad(), eval_mode(iter_modules(model)), trace(model) as recorded, record_calls(model) as visits:
            output = first_tensor(model(*inputs))
        if not recorded.paths or output is None:
            raise ConfigError(f"{name} has no attention that can be recorded. {recorded.report()}")
        self.output: Tensor = output
        for start, axis in axes.items():
            if not axis.tokens:
                size = recorded.attention_inputs([path for path in recorded.paths if path.startswith(start)][-1]).T
                axes[start] = TokenAxis(axis.symbol, [str(i) for i in range(size)], size)
        self._builder = builder = WalkthroughBuilder(recorded, axes)
        if isinstance(model_input, str):
            letters = tuple(model_input.strip())
            builder.add_step(
                "characters", torch.tensor(list(map(ord, letters))), "characters", module="", section="", rows=letters
            )
        elif model_input is not None:
            builder.add_step("pixels", model_input, "height width", module="", section="")
        builder.add_call(visits[0])

    def add_predictions(
        self, token_ids: Sequence[int], tokens: Callable[[list[int]], list[str]], first: int = 0
    ) -> None:
        """Add the predictions from row `first` on, and the final steps."""
        axis = self._axes[""]
        builder = self._builder
        logits = self.output[0].reshape(-1, self.output.shape[-1])  # (T, V), or (1, V) of classes
        is_single = logits.shape[0] == 1 and len(axis.tokens) > 1
        probabilities = logits[first : first + len(token_ids)].float().softmax(-1).cpu()
        best = probabilities.topk(min(TOP_K, probabilities.shape[-1]), dim=-1)
        for i, (id_, ids, shares) in enumerate(
            zip(token_ids, best.indices.tolist(), best.values.tolist(), strict=True)
        ):
            words = tuple(TokenProbability(*parts) for parts in zip(tokens(ids), ids, shares, strict=True))
            word = TokenProbability(tokens([id_])[0], id_, float(probabilities[i, id_]))
            self.predictions.append(Prediction(() if is_single else tuple(axis.tokens[: first + i + 1]), words, word))
        steps = builder.steps
        rows = () if is_single else tuple(axis.tokens[first:])
        common: Kwargs = {"module": steps[-1].module, "section": steps[-1].section, "rows": rows}
        letter = "1" if is_single else axis.symbol if first == 0 else "steps"
        cells = tuple(tuple(word.token for word in prediction.top) for prediction in self.predictions)
        remainder_note = (
            f"The remaining tokens have a total probability of {float(1 - best.values.sum(-1).mean()):.2g} on average."
        )
        kwargs = {"cells": cells, "sources": (len(steps) - 1,), "note": remainder_note}
        at = builder.add_step("softmax", best.values, f"{letter} {best.values.shape[1]}", **kwargs, **common)
        kwargs = {"cells": tuple((prediction.token.token,) for prediction in self.predictions), "sources": (at,)}
        builder.add_step("answer" if is_single else "next", torch.tensor(token_ids), letter, **kwargs, **common)

    def result(self, title: str) -> Walkthrough:
        """Return the walkthrough of the recorded steps."""
        builder, (*earlier, last) = self._builder, self._builder.steps
        if last.role == "norm" and last.shape == self.output.shape[1:]:  # the output of an encoder
            common = {"module": "", "section": "", "rows": last.rows, "sources": (len(earlier),)}
            builder.add_step("vectors", self.output[0], " ".join(last.symbols), **common)
        kind = type(self._model).__name__
        parameters = f"{sum(p.numel() for p in self._model.parameters()):,}"
        metadata = {"model": self._name if self._name == kind else f"{self._name}, {kind}", "parameters": parameters}
        if len(self.predictions) > 1:
            metadata["generated"] = f"{len(self.predictions)} tokens, greedily"
        generated: Kwargs = {"steps": builder.steps, "predictions": self.predictions, "sizes": builder.sizes}
        return Walkthrough(title=title, model=self._name, kind=kind, metadata=metadata, **generated)


def _step_to_dict(step: WalkthroughStep, budget: int) -> JSONObject:
    """Return a step as JSON data; vectors are truncated to about `budget` values over all tokens, but not below 8."""
    plain = {**vars(step), "kind": step.kind, "shape": step.shape}
    x = plain.pop("values")
    if step.kind == "maps":
        fits, (rows, columns) = max(x.shape[-2:]) <= SIDE, (min(n, SIDE) for n in x.shape[-2:])
        small = x if fits else adaptive_avg_pool2d(x.float(), (rows, columns))
        return plain | {"values": _round_values(small), "pooled": not fits}
    if step.kind != "vectors":
        return plain | {"values": _round_values(x)}
    n_vectors = max(1, x[..., 0].numel())
    numbers = max(_LEAST, min(_MOST, _NUMBERS // n_vectors), budget // n_vectors)
    x = x if x.dim() < 2 else x[..., :_ROWS, :]
    return plain | {"values": _round_values(x[..., :numbers]), "norms": _round_values(x.norm(dim=-1))}


def _round_values(x: Tensor) -> object:
    """Return nested lists of values with four digits; None for infinite values, which JSON lacks."""
    if not x.is_floating_point():
        return x.long().tolist()
    flat: list[object] = [float(f"{v:.4g}") if math.isfinite(v) else None for v in x.flatten().tolist()]
    for n in reversed(x.shape[1:]):
        flat = [flat[i : i + n] for i in range(0, len(flat), n)]
    return flat if x.dim() else flat[0]


def _section(steps: Sequence[WalkthroughStep], numbers: list[int]) -> Section:
    first = numbers[0]
    last = numbers[-1]
    where = steps[first].section
    roles = [steps[i].role for i in numbers]
    match = re.fullmatch(r"(?:(.*)\.)?([^.]+)\.(\d+)", where)
    if match is not None:
        stack = (match[1] or "").rpartition(".")[2]
        title = f"{stack} block {match[3]}".strip()
        return Section(where, title[0].upper() + title[1:], first, last, int(match[3]), _order(steps, numbers))
    name = where.rpartition(".")[2] or "model"
    input_title = "The input" if roles in (["characters"], ["pixels"]) else f"Into the {name}"
    return Section(where, input_title if first == 0 or "embedding" in roles else f"Out of the {name}", first, last)


def _order(steps: Sequence[WalkthroughStep], numbers: list[int]) -> str:
    """Return where the norms of a block are, as it ran."""
    norms = {i for i in numbers if steps[i].role == "norm"}
    adds = [steps[i] for i in numbers if steps[i].role == "add"]
    if not norms or not adds:
        return ""
    if numbers[-1] in norms or any(step.sources[0] in norms for step in adds):
        return "post-norm"
    return "parallel" if len(adds[-1].sources) > 2 else "pre-norm"
