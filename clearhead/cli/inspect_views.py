"""Interpretability views of `clearhead inspect`: lens, attribution, patching, ablation, induction, vectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead import analysis, hub
from clearhead._core.json_types import JSONObject
from clearhead._core.plotting import plot_style
from clearhead.analysis import AttentionReport, LogitMetric, ModelInputs
from clearhead.analysis.checks import spec_for
from clearhead.analysis.inputs.model_inputs import run_logits
from clearhead.analysis.inputs.module_spec import CallInputs, Ids
from clearhead.analysis.views import figures
from clearhead.analysis.views.chart import Chart, PCAProjection
from clearhead.cli.module_options import load_named, user_code_errors
from clearhead.cli.options import LoadKwargs
from clearhead.cli.output import console, print_line, print_wrapped, show_json, show_picture, use_color
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.cli.module_options import InputKind
    from clearhead.generation import Strategy


class ViewResult(NamedTuple):
    """The content of a view: title, document for programs, and pictures."""

    title: str
    document: JSONObject
    charts: Sequence[Chart | PCAProjection]


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """Options of the views.

    Attributes:
        query: Position of the query, or of the target token.
        target_token: Target token or its id; by default the most likely token.
        baseline_token: Token whose logit is subtracted from the target's.
        corrupted: A corrupted input, for activation patching.
        granularity: Unit of patching and ablation.
        modules: Pattern of the modules to patch or ablate.
    """

    query: int | None = None
    target_token: str | None = None
    baseline_token: str | None = None
    corrupted: str | None = None
    granularity: str | None = None
    modules: str | None = None


@dataclass(frozen=True)
class Inspection:
    """A model and its input; `inputs` converts a text to model inputs, `report` computes the attention report."""

    model: nn.Module
    text: str | None
    inputs: Callable[[str | None], ModelInputs]
    report: Callable[[], AttentionReport]
    name: Callable[[int], str] = str
    n_tokens: int = 0  # with a name


def model_inspection(
    name: str, text: str | None, load: LoadKwargs, *, strategy: Strategy, data: Path | None
) -> Inspection:
    """Return the inspection of a named model, which has a tokenizer or takes images."""
    trained = hub.pipeline(name, **load)

    def require_text(text: str | None) -> str:
        if text is None:
            raise ConfigError(f"{name} needs an input; give a text or an image file")
        return text

    inspection = Inspection(
        trained.model,
        text,
        lambda new_text: analysis.model_inputs(trained, require_text(new_text), strategy=strategy, data=data),
        lambda: analysis.attention_report(trained, require_text(text), strategy=strategy, data=data),
    )
    if trained.task in ("digits", "speech"):
        return inspection
    tokenizer = trained.tokenizer
    return replace(inspection, name=lambda token: tokenizer.tokens([token])[0], n_tokens=tokenizer.vocab_size)


def module_inspection(
    name: str, text: str | None, inputs: dict[str, InputKind], load: LoadKwargs, *, seed: int, length: int
) -> Inspection:
    """Return the inspection of a factory's module; its input is random unless token ids are given."""
    spec = spec_for(load_named(name), **inputs)
    model = spec.module
    input_kind = spec.inputs
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{name} returned a {type(model).__name__}; expected a PyTorch module")
    model = model.to(**load).eval()

    def make_inputs(text: str | None) -> ModelInputs:
        generator = torch.Generator().manual_seed(seed)

        def move(x: Tensor) -> Tensor:
            return x.to(load["device"], load["dtype"] if x.is_floating_point() else None)

        source = None if spec.source is None else move(spec.source.draw(1, length, generator))
        x = input_kind.draw(1, length, generator)
        if text is not None:
            if not isinstance(input_kind, Ids):
                raise ConfigError(f"{name} does not take token ids; omit INPUT to use a random input")
            x = torch.tensor([parse_ids(text, input_kind.vocab_size)])
        x = move(x)
        arguments: dict[str, Any] = {}

        def record_arguments(module: nn.Module, args: tuple[object, ...], kwargs: JSONObject) -> None:
            arguments.update(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

        handle = model.register_forward_pre_hook(record_arguments, with_kwargs=True)
        try:
            with torch.no_grad(), user_code_errors(f"{name} could not be called with this input"):
                spec.run(model, CallInputs(x=x, source=source))
        finally:
            handle.remove()
        tokens = x[0].tolist() if isinstance(input_kind, Ids) else range(x.shape[1] if spec.is_sequence else 0)
        return analysis.ModelInputs(arguments, tuple(map(str, tokens)), str, spec.name)

    def report() -> AttentionReport:
        model_inputs = make_inputs(text)
        assert isinstance(model_inputs.args, Mapping)
        with torch.no_grad(), analysis.trace(model, "**.weights") as t:
            model(**model_inputs.args)
        is_single_sequence = spec.source is None and spec.is_sequence
        return analysis.build_report(t, model_inputs.tokens if is_single_sequence else None, title=model_inputs.title)

    return Inspection(model, text, make_inputs, report)


def parse_ids(text: str, vocab_size: int) -> list[int]:
    """Parse token ids such as `3 1 4`."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) < vocab_size for word in words):
        raise ConfigError(f"got {text!r}; expected token ids from 0 to {vocab_size - 1}, such as '3 1 4'")
    return [int(word) for word in words]


def show_analysis(
    inspection: Inspection,
    view: str,
    settings: ViewSettings,
    *,
    html: Path | None,
    out: Path | None,
    theme: str,
    json: bool,
) -> None:
    """Show one view in the terminal, as JSON, as a figure or as a page."""
    title, document, charts = _VIEWS[view](inspection, settings)
    if html is not None:
        analysis.save_page(charts, html, title=title)
    if out is not None:
        with plot_style(theme):
            figures.save(figures.chart(charts[0]), out)
    if json:
        return show_json({"title": title, "view": view, **document})
    print_wrapped(title)
    for path in filter(None, (html, out)):
        print_line(f"written to {path}")
    for chart in charts if html is None and out is None else ():
        print_wrapped(f"\n{chart.title}\n")
        show_picture(chart.text(width=console.width, color=use_color()))
        if note := getattr(chart, "note", ""):
            console.print(f"\n{note}", markup=False, style="dim")


def _lens(inspection: Inspection, settings: ViewSettings) -> ViewResult:
    """Show the prediction after each layer."""
    inputs = inspection.inputs(inspection.text)
    result = analysis.logit_lens(inspection.model, inputs.args, positions=settings.query)
    return ViewResult(inputs.title, result.to_dict(inputs.name), result.charts(inputs.tokens, inputs.name))


def _attribution(inspection: Inspection, settings: ViewSettings) -> ViewResult:
    """Show the contribution of each part to a logit."""
    inputs, metric, title = _resolve_metric(inspection, settings)
    result = analysis.attribute(inspection.model, inputs.args, metric)
    return ViewResult(title, result.to_dict(), result.charts())


def _patching(inspection: Inspection, settings: ViewSettings) -> ViewResult:
    """Patch from the corrupted input, or ablate if there is none."""
    inputs, metric, title = _resolve_metric(inspection, settings)
    options = {"granularity": settings.granularity, "modules": settings.modules}
    kwargs: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if settings.corrupted is None:
        grid = analysis.ablate(inspection.model, inputs.args, metric, **kwargs)
    else:
        corrupted: Any = inspection.inputs(settings.corrupted).args
        if inputs.source:  # the source of a translation differs, not the target
            corrupted = (corrupted[0], inputs.args[1])  # type: ignore[index]
        grid = analysis.patch(inspection.model, inputs.args, corrupted, metric, **kwargs)
    is_source = bool(inputs.source) and grid.rows[0].startswith("encoder")
    return ViewResult(title, grid.to_dict(), grid.charts(inputs.source if is_source else inputs.tokens))


def _induction(inspection: Inspection, settings: ViewSettings) -> ViewResult:
    """Show the induction score of each head."""
    result = analysis.induction_scores(inspection.model)
    return ViewResult("Induction scores on repeated random tokens", result.to_dict(), result.charts())


def _vectors(inspection: Inspection, settings: ViewSettings) -> ViewResult:
    """Show the token embeddings in two dimensions."""
    table = next((m for m in inspection.model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise ConfigError("this model has no token embeddings")
    result = analysis.pca(table.weight, [inspection.name(i) for i in range(table.num_embeddings)])
    return ViewResult("Token embeddings in two dimensions", result.to_dict(), [result])


def _resolve_metric(inspection: Inspection, settings: ViewSettings) -> tuple[ModelInputs, LogitMetric, str]:
    """Return the model inputs, the metric and a title."""
    inputs = inspection.inputs(inspection.text)
    logits: Tensor = run_logits(inspection.model, inputs.args)
    token = _token(settings.target_token, inspection)
    baseline = _token(settings.baseline_token, inspection)
    position = -1 if settings.query is None else settings.query
    metric = LogitMetric(token, baseline, position).resolve(logits)
    names = [inputs.name(t).strip() or inputs.name(t) for t in (metric.token, baseline) if t is not None]
    context = f" after {inputs.tokens[metric.position].strip()}" if logits.dim() > 2 else ""
    return inputs, metric, f"Why {' rather than '.join(names)}{context}? {inputs.title}"


def _token(word: str | None, inspection: Inspection) -> int | None:
    """Return the id of a token given by name or id."""
    if word is None:
        return None
    index = next(
        (i for i in range(inspection.n_tokens) if word in (inspection.name(i), inspection.name(i).strip())), None
    )
    if index is None and not word.isdecimal():
        raise ConfigError(f"the vocabulary has no token {word!r}; give a token as the views show it, or its id")
    return int(word) if index is None else index


_VIEWS: dict[str, Callable[[Inspection, ViewSettings], ViewResult]] = {
    "lens": _lens,
    "attribution": _attribution,
    "patching": _patching,
    "ablation": _patching,
    "induction": _induction,
    "vectors": _vectors,
}
