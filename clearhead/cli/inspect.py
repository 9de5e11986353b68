"""`clearhead inspect`: attention and other internals of a forward pass, in the terminal, as a figure or as a page."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

from clearhead.cli.app import app
from clearhead.cli.module_options import InputDim, InputShape, VocabSize, input_spec, is_factory
from clearhead.cli.options import (
    BeamWidth,
    Device,
    Dtype,
    Factory,
    Json,
    ModelCommand,
    Penalty,
    Theme,
    ThemeName,
    argument,
    decoding_strategy,
    load_kwargs,
    option,
)
from clearhead.cli.output import console, print_line, print_wrapped, show_json, show_picture, table, use_color
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clearhead.analysis.measures import ValueWeightedNorm
    from clearhead.analysis.views.attention_map import AttentionMap
    from clearhead.analysis.views.report import AttentionReport

# The last six are computed by interpretability methods.
View = StrEnum(
    "View",
    "heatmap heads lines measures contributions rollout norms patches "
    "lens attribution patching ablation induction vectors",
)
DEEPER = (View.lens, View.attribution, View.patching, View.ablation, View.induction, View.vectors)


@app.command("inspect", cls=ModelCommand)
def inspect_model(
    model: Factory,
    input_: Annotated[
        str | None,
        argument("A sentence, a prompt, letters or an image file; token ids for a factory.", metavar="INPUT"),
    ] = None,
    layer: Annotated[str | None, option("Layer index, or a module path such as encoder.blocks.2.attention.")] = None,
    head: Annotated[
        int | None, option("Head index. Default: mean over heads (all heads in the `lines` view).", min=0)
    ] = None,
    query: Annotated[int | None, option("Position of the query, or of the target token.", min=0)] = None,
    view: Annotated[
        View | None, option(f"One of: {', '.join(View)}. Default: heatmap, or patches for images.", metavar="VIEW")
    ] = None,
    html: Annotated[Path | None, option("Write a page with all layers and heads to this file.")] = None,
    out: Annotated[Path | None, option("Write a figure: .png, .svg or .pdf.", "--out", "-o")] = None,
    theme: Theme = ThemeName.light,
    target_token: Annotated[str | None, option("Target token or its id. Default: the most likely token.")] = None,
    baseline_token: Annotated[str | None, option("Token whose logit is subtracted from the target's.")] = None,
    corrupted: Annotated[str | None, option("A corrupted input of the same length, for activation patching.")] = None,
    granularity: Annotated[str | None, option("Unit of patching and ablation: position, head or module.")] = None,
    modules: Annotated[str | None, option("Pattern of the modules to patch or ablate.")] = None,
    vocab_size: VocabSize = None,
    input_dim: InputDim = None,
    input_shape: InputShape = None,
    seed: Annotated[int, option("Random seed of a generated input.")] = 0,
    length: Annotated[int, option("Length of a generated input.", min=1)] = 11,
    data: Annotated[Path | None, option("Data set to take image N from.")] = None,
    beam: BeamWidth = None,
    length_penalty: Penalty = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Inspect a forward pass on a translation, a text, letters or an image: attention and other internals.

    The forward pass uses its fast path; attention weights are recomputed from the inputs of each layer. Further views:
    lens (predictions of each layer), attribution (contributions of heads and layers to the target logit), patching
    (with --corrupted), ablation, induction, vectors (token embeddings in two dimensions)."""
    from clearhead._core.plotting import plot_style
    from clearhead.analysis import save_page
    from clearhead.analysis.views import figures
    from clearhead.cli.inspect_views import ViewSettings, model_inspection, module_inspection, show_analysis
    from clearhead.hub.translate import DEFAULT_STRATEGY

    if is_factory(model):
        inputs = input_spec(vocab_size, input_dim, input_shape)
        inspection = module_inspection(model, input_, inputs, load_kwargs(device, dtype), seed=seed, length=length)
    else:
        if (vocab_size, input_dim, input_shape) != (None, None, None):
            raise ConfigError(
                f"{model} has known inputs; --vocab-size, --input-dim and --input-shape are for a factory"
            )
        strategy = decoding_strategy(beam, length_penalty, DEFAULT_STRATEGY)
        inspection = model_inspection(model, input_, load_kwargs(device, dtype), strategy=strategy, data=data)
    view = View.patching if corrupted is not None and view is None else view
    if view in DEEPER:
        if (corrupted is None) == (view is View.patching):
            raise ConfigError(
                "the patching view needs --corrupted, a second input of the same length; no other view takes it"
            )
        settings = ViewSettings(
            query=query,
            target_token=target_token,
            baseline_token=baseline_token,
            corrupted=corrupted,
            granularity=granularity,
            modules=modules,
        )
        return show_analysis(inspection, view, settings, html=html, out=out, theme=theme.value, json=json)
    report = inspection.report()
    attention_map = choose_map(report, layer)
    if head is not None:
        attention_map.weights(head)  # raises if the head does not exist, before anything is written
    view = view or (View.patches if report.image is not None else View.heatmap)
    if html is not None:
        save_page(report, html)
    if out is not None:
        with plot_style(theme.value):
            figures.save(_drawings(report, attention_map, view, head, query)[2](), out)
    if json:
        selection = {"path": attention_map.path, "head": head, "weights": attention_map.weights(head).tolist()}
        return show_json(report.to_dict() | {"shown": selection})
    if html is None and out is None:
        return show(report, attention_map, view, head, query)
    print_wrapped(report.title)
    for path in filter(None, (html, out)):
        print_line(f"written to {path}")


def choose_map(report: AttentionReport, layer: str | None) -> AttentionMap:
    """Return the map of a layer, named by its module path or by its index in the default stack."""
    first = report.default_map
    if layer is None:
        return first
    stack = report.stacks[first.stack]
    matches = [attention_map for attention_map in stack if str(attention_map.layer) == layer]
    matches = matches or [attention_map for attention_map in report.maps if attention_map.path == layer]
    if not matches:
        paths = ", ".join(attention_map.path for attention_map in report.maps)
        raise ConfigError(f"unknown layer {layer!r}; expected 0 to {len(stack) - 1}, or one of: {paths}")
    return matches[0]


def name_of(attention_map: AttentionMap, head: int | None, together: str = "mean of") -> str:
    """Return a title with layer and head."""
    heads = f"{together} {attention_map.n_heads} heads" if head is None else f"head {head}"
    return f"{attention_map.title}, layer {attention_map.layer}, {heads}"


def show(report: AttentionReport, attention_map: AttentionMap, view: View, head: int | None, query: int | None) -> None:
    """Print the title of the report and one view under its title."""
    title, text, _ = _drawings(report, attention_map, view, head, query)
    print_wrapped(f"{report.title}\n\n{title}\n")
    drawn = text()
    if isinstance(drawn, str):
        show_picture(drawn)
    else:
        console.print(drawn)
    if view in (View.heatmap, View.patches):
        console.print()
        console.print(_measures(attention_map))
    if attention_map.difference is not None and view not in (View.rollout, View.norms):
        print_wrapped(
            f"\nrecomputed weights × values differ from the layer's output by {attention_map.difference:.1g} at most "
            f"(allowed {attention_map.tolerance:.1g})",
            style="dim",
        )


def _drawings(
    report: AttentionReport, attention_map: AttentionMap, view: View, head: int | None, query: int | None
) -> tuple[str, Callable[[], str | Table], Callable[[], Figure]]:
    """Return the title of a view and the functions that draw it in the terminal and as a figure."""
    from clearhead.analysis.views import figures, terminal

    p = attention_map
    layer = f"{attention_map.title}, layer {attention_map.layer}"
    wide = console.width
    match view:
        case View.heatmap:
            title = name_of(p, head)
            cells = (p.weights(head), p.rows, p.columns)
            drawn = partial(terminal.heatmap, *cells, width=wide, color=use_color())
            return title, drawn, partial(figures.heat, *cells, title=title)
        case View.heads:
            stack = partial(figures.head_grid, report.stacks[p.stack], title=p.title)
            return layer, partial(terminal.head_grid, p, width=wide), stack
        case View.lines:
            weights = p.all_heads() if head is None else p.weights(head)
            title = name_of(p, head, "all")
            drawn = partial(terminal.link_list, weights, p.rows, p.columns)
            return title, drawn, partial(figures.arcs, weights, p.rows, p.columns, title=title)
        case View.measures:
            return layer, partial(_measures, p), partial(figures.measures, report.maps, title=report.title)
        case View.contributions:
            contributions_, title = _contributions(p, query)
            rows = terminal.contribution_table(contributions_, p.columns)
            bars = partial(figures.contribution_bars, contributions_, p.columns, title=title)
            return title, partial(table, ("key", "head", "weight", "share"), rows), bars
        case View.rollout:
            rollouts = report.rollouts()
            group = p.stack if p.stack in rollouts else next(iter(rollouts), None)  # the shown one, if it can be
            if group is None:
                raise ConfigError(
                    "rollout needs two or more layers of self-attention over the same tokens, 1,024 at most"
                )
            first = report.stacks[group][0]
            matrix = rollouts[group]
            names = (first.rows, first.rows)
            title = f"Rollout through all layers: {first.title} (shades relative to the largest)"
            drawn = partial(terminal.heatmap, matrix / matrix.max(), *names, width=wide, color=use_color())
            return title, drawn, partial(figures.heat, matrix, *names, title=f"Rollout: {first.title}")
        case View.norms:
            title = "Norm of the residual stream: mean (min … max)"
            norms = report.norms
            drawn = partial(terminal.norm_bars, norms, width=wide)
            return title, drawn, partial(figures.norms, norms, title=report.title)
        case _:
            grey = report.image
            grid = p.layout.grid
            if grey is None or grid is None:
                raise ConfigError("the patches view is for images; choose another view for text, such as heatmap")
            weights = (p.all_heads().mean(1) if query is None else p.query_weights(query))[:, -grid[0] * grid[1] :]
            image_weights = weights.mean(0) if head is None else weights[head]
            patch = None if query is None else query - (len(p.rows) - grid[0] * grid[1])
            drawn = partial(terminal.patch_map, grey, image_weights, grid, color=use_color())
            return name_of(p, head), drawn, partial(figures.patches, grey, weights, grid, query=patch, title=layer)


def _measures(attention_map: AttentionMap) -> Table:
    from clearhead.analysis.views.terminal import head_table

    return table(("head", "pattern", "score", "entropy", "distance"), head_table(attention_map))


def _contributions(attention_map: AttentionMap, query: int | None) -> tuple[list[ValueWeightedNorm], str]:
    """Return the contribution of each key and head to one query, and a title."""
    from clearhead.analysis.measures import value_weighted_norms

    if attention_map.value_norms is None:
        raise ConfigError(
            f"cannot compute contributions of {attention_map.path}: its output projection was not recognized"
        )
    i = len(attention_map.rows) - 1 if query is None else query
    contributions_ = value_weighted_norms(attention_map.query_weights(i), attention_map.value_norms)
    token = attention_map.rows[i].strip() or attention_map.rows[i]
    return contributions_, f"{attention_map.title}, layer {attention_map.layer}: largest contributions to {token} ({i})"
