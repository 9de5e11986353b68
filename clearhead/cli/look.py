"""`clearhead look`: who attends to whom in one run of a model, in the terminal, as a figure, or as a page."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from clearhead.cli.app import app
from clearhead.cli.named import MaybeEmbeddings, MaybeIds, MaybeValues, is_factory
from clearhead.cli.options import BeamWidth, Device, Dtype, Factory, Json, Penalty, argument, option, placed, searching
from clearhead.cli.output import colour, console, say, show_json, show_picture, table, tell
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clearhead.look.album import AttentionReport
    from clearhead.look.picture import AttentionMap

# What is drawn; the last six ask further.
View = StrEnum(
    "View",
    "heatmap heads lines measures contributions rollout norms patches "
    "lens attribution patching ablation induction vectors",
)
DEEPER = (View.lens, View.attribution, View.patching, View.ablation, View.induction, View.vectors)


@app.command()
def look(
    model: Factory,
    given: Annotated[
        str | None,
        argument(
            "A sentence, a beginning, letters, the file of a picture; for a factory, token numbers.", metavar="INPUT"
        ),
    ] = None,
    layer: Annotated[str | None, option("Its number, or a module path such as encoder.blocks.2.attention.")] = None,
    head: Annotated[int | None, option("One head; by default the mean of all, as lines each of them.", min=0)] = None,
    row: Annotated[int | None, option("The query, or the position of the answer, that is meant.", min=0)] = None,
    view: Annotated[
        View | None, option(f"What is drawn, by default heatmap or patches: {', '.join(View)}.", metavar="VIEW")
    ] = None,
    html: Annotated[Path | None, option("Write the page with all layers and heads here.")] = None,
    out: Annotated[Path | None, option("Draw a figure: .png, .svg or .pdf.", "--out", "-o")] = None,
    answer: Annotated[
        str | None, option("The token asked about, or its number; else the model's first choice.")
    ] = None,
    versus: Annotated[str | None, option("A token that the answer is compared with.")] = None,
    patch: Annotated[str | None, option("A corrupted input of the same length, into which the run is patched.")] = None,
    over: Annotated[str | None, option("What is patched or ablated, one by one: position, head or module.")] = None,
    paths: Annotated[str | None, option("The modules that are patched or ablated: a pattern.")] = None,
    ids: MaybeIds = None,
    embeddings: MaybeEmbeddings = None,
    values: MaybeValues = None,
    seed: Annotated[int, option("The seed of an input that is drawn.")] = 0,
    length: Annotated[int, option("Tokens of an input that is drawn.", min=1)] = 11,
    data: Annotated[Path | None, option("Pictures by number: where they are.")] = None,
    beam: BeamWidth = None,
    length_penalty: Penalty = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Look inside a run: a translation, a text, a sorting, or a picture, with what attends to what.

    The run stays on its fast path; weights are recomputed from what each layer was given. Views that ask further:
    lens (what each layer would say), attribution (what each head and layer added to the answer), patching (with
    --patch), ablation, induction, vectors (the token embeddings in two dimensions)."""
    from clearhead.cli.look_into import into, module_asked, trained_asked
    from clearhead.look import figures, save_page
    from clearhead.pretrained.translate import DEFAULT

    if is_factory(model):
        inputs = (ids, embeddings, values)
        asked = module_asked(model, given, inputs, placed(device, dtype), seed=seed, length=length)
    else:
        if (ids, embeddings, values) != (None, None, None):
            raise ConfigError(f"{model} knows what it reads; --ids, --embeddings and --values are for a factory")
        how = {"how": searching(beam, length_penalty, DEFAULT), "data": data}
        asked = trained_asked(model, given, placed(device, dtype), how)
    view = View.patching if patch is not None and view is None else view
    if view in DEEPER:
        if (patch is None) == (view is View.patching):
            raise ConfigError("patching needs a second input of the same length, --patch, and no other view takes one")
        told = {"row": row, "answer": answer, "versus": versus, "patch": patch, "granularity": over, "modules": paths}
        return into(asked, view, told, html=html, out=out, json=json)
    album = asked.album()
    picture = choose(album, layer)
    if head is not None:
        picture.weights(head)  # refuses a head that is not there before anything is written
    view = view or (View.patches if album.image is not None else View.heatmap)
    if html is not None:
        save_page(album, html)
    if out is not None:
        figures.save(_drawings(album, picture, view, head, row)[2](), out)
    if json:
        shown = {"path": picture.path, "head": head, "weights": picture.weights(head).tolist()}
        return show_json(album.to_dict() | {"shown": shown})
    say(album.title)
    for path in filter(None, (html, out)):
        tell(f"written to {path}")
    if html is None and out is None:
        show(album, picture, view, head, row)


def choose(album: AttentionReport, layer: str | None) -> AttentionMap:
    """The layer that was asked for, by its module path or by its number in the stack that is shown first."""
    first = album.default_map
    if layer is None:
        return first
    stack = album.stacks[first.stack]
    found = [picture for picture in stack if str(picture.layer) == layer]
    found = found or [picture for picture in album.maps if picture.path == layer]
    if not found:
        known = ", ".join(picture.path for picture in album.maps)
        raise ConfigError(f"there is no layer {layer!r}; expected 0 to {len(stack) - 1}, or one of: {known}")
    return found[0]


def name_of(picture: AttentionMap, head: int | None, together: str = "mean of") -> str:
    """The layer and head in words."""
    heads = f"{together} {picture.n_heads} heads" if head is None else f"head {head}"
    return f"{picture.title}, layer {picture.layer}, {heads}"


def show(album: AttentionReport, picture: AttentionMap, view: View, head: int | None, row: int | None) -> None:
    """One view in the terminal, under a line that says what it is."""
    title, text, _ = _drawings(album, picture, view, head, row)
    say(f"\n{title}\n")
    drawn = text()
    if isinstance(drawn, str):
        show_picture(drawn)
    else:
        console.print(drawn)
    if view in (View.heatmap, View.patches):
        console.print()
        console.print(_measures(picture))
    if picture.difference is not None and view not in (View.rollout, View.norms):
        say(
            f"\nrecomputed weights × values differ from what the run produced by {picture.difference:.1g} at most "
            f"(allowed {picture.tolerance:.1g})",
            style="dim",
        )


def _drawings(
    album: AttentionReport, picture: AttentionMap, view: View, head: int | None, row: int | None
) -> tuple[str, Callable[[], str | Table], Callable[[], Figure]]:
    """A view in words, and what draws it: in the terminal, and as a figure."""
    from clearhead.look import figures, terminal

    p, layer, wide = picture, f"{picture.title}, layer {picture.layer}", console.width
    match view:
        case View.heatmap:
            title, cells = name_of(p, head), (p.weights(head), p.rows, p.columns)
            drawn = partial(terminal.heatmap, *cells, width=wide, color=colour())
            return title, drawn, partial(figures.heat, *cells, title=title)
        case View.heads:
            stack = partial(figures.head_grid, album.stacks[p.stack], title=p.title)
            return layer, partial(terminal.head_grid, p, width=wide), stack
        case View.lines:
            weights, title = p.all_heads() if head is None else p.weights(head), name_of(p, head, "all")
            drawn = partial(terminal.link_list, weights, p.rows, p.columns)
            return title, drawn, partial(figures.arcs, weights, p.rows, p.columns, title=title)
        case View.measures:
            return layer, partial(_measures, p), partial(figures.measures, album.maps, title=album.title)
        case View.contributions:
            found, title = _contributions(p, row)
            rows = terminal.contribution_table(found, p.columns)
            bars = partial(figures.contribution_bars, found, p.columns, title=title)
            return title, partial(table, ("key", "head", "weight", "share"), rows), bars
        case View.rollout:
            rollouts = album.rollouts()
            group = p.stack if p.stack in rollouts else next(iter(rollouts), None)  # the shown one, if it can be
            if group is None:
                raise ConfigError(
                    "rollout needs two or more layers of self-attention over the same tokens, 1,024 at most"
                )
            first, matrix = album.stacks[group][0], rollouts[group]
            names = (first.rows, first.rows)
            title = f"Rollout through all layers: {first.title} (shades relative to the largest)"
            drawn = partial(terminal.heatmap, matrix / matrix.max(), *names, width=wide, color=colour())
            return title, drawn, partial(figures.heat, matrix, *names, title=f"Rollout: {first.title}")
        case View.norms:
            title, norms = "Length of the residual stream: mean (shortest … longest)", album.norms
            drawn = partial(terminal.norm_bars, norms, width=wide)
            return title, drawn, partial(figures.norms, norms, title=album.title)
        case _:
            grey, grid = album.image, p.layout.grid
            if grey is None or grid is None:
                raise ConfigError("patches are a view of pictures; choose another view for text, such as heatmap")
            weights = (p.all_heads().mean(1) if row is None else p.query_weights(row))[:, -grid[0] * grid[1] :]
            shown = weights.mean(0) if head is None else weights[head]
            chosen = None if row is None else row - (len(p.rows) - grid[0] * grid[1])
            drawn = partial(terminal.patch_map, grey, shown, grid, color=colour())
            return name_of(p, head), drawn, partial(figures.patches, grey, weights, grid, chosen=chosen, title=layer)


def _measures(picture: AttentionMap) -> Table:
    from clearhead.look.terminal import head_table

    return table(("head", "pattern", "score", "entropy", "distance"), head_table(picture))


def _contributions(picture: AttentionMap, row: int | None) -> tuple[list[Any], str]:
    """What each key and head adds to one query, and that in words."""
    from clearhead.look.measures import value_weighted_norms

    if picture.value_norms is None:
        raise ConfigError(f"what {picture.path} adds is not known: its output projection is none that we can read")
    i = len(picture.rows) - 1 if row is None else row
    found = value_weighted_norms(picture.query_weights(i), picture.value_norms)
    token = picture.rows[i].strip() or picture.rows[i]
    return found, f"{picture.title}, layer {picture.layer}: what adds most to {token} ({i})"
