"""`clearhead look`: who attends to whom in one run of a model, in the terminal, as a figure, or as a page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.how import BeamWidth, LengthPenalty, searching
from clearhead.cli.named import MaybeEmbeddings, MaybeIds, MaybeValues, is_factory
from clearhead.cli.output import A_MODEL, Json, console, say, show_json, show_picture, table
from clearhead.cli.where import AUTO, FLOAT32, Device, Dtype, placed
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.look.album import Album
    from clearhead.look.picture import Picture


class View(StrEnum):
    """What is drawn."""

    heatmap = "heatmap"
    heads = "heads"
    lines = "lines"
    measures = "measures"
    contributions = "contributions"
    rollout = "rollout"
    norms = "norms"
    patches = "patches"
    lens = "lens"
    attribution = "attribution"
    patching = "patching"
    ablation = "ablation"
    induction = "induction"
    vectors = "vectors"


DEEPER = (View.lens, View.attribution, View.patching, View.ablation, View.induction, View.vectors)


@app.command()
def look(
    model: Annotated[str, typer.Argument(help=f"{A_MODEL} Or package.module:factory, which is imported and called.")],
    given: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="A sentence, a beginning, letters, the file of a picture; for a factory, token numbers.",
        ),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Its number, or a module path such as encoder.blocks.2.attention.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="One head; by default the mean of all, as lines each of them.", min=0)
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="The query, or the position of the answer, that is meant.", min=0)
    ] = None,
    view: Annotated[
        View | None,
        typer.Option(metavar="VIEW", help=f"What is drawn, by default heatmap or patches: {', '.join(View)}."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page with all layers and heads here.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw a figure: .png, .svg or .pdf.")] = None,
    answer: Annotated[
        str | None, typer.Option(help="The token asked about, or its number; else the model's first choice.")
    ] = None,
    versus: Annotated[str | None, typer.Option(help="A token that the answer is compared with.")] = None,
    patch: Annotated[
        str | None, typer.Option(help="A corrupted input of the same length, into which the run is patched.")
    ] = None,
    over: Annotated[
        str | None, typer.Option(help="What is patched or ablated, one by one: positions, heads or whole.")
    ] = None,
    paths: Annotated[str | None, typer.Option(help="The modules that are patched or ablated: a pattern.")] = None,
    ids: MaybeIds = None,
    embeddings: MaybeEmbeddings = None,
    values: MaybeValues = None,
    seed: Annotated[int, typer.Option(help="The seed of an input that is drawn.")] = 0,
    length: Annotated[int, typer.Option(help="Tokens of an input that is drawn.", min=1)] = 11,
    data: Annotated[Path | None, typer.Option(help="Pictures by number: where they are.")] = None,
    beam: BeamWidth = None,
    length_penalty: LengthPenalty = None,
    device: Device = AUTO,
    dtype: Dtype = FLOAT32,
    json: Json = False,
) -> None:
    """Look inside a run: a translation, a text, a sorting, or a picture, with what attends to what.

    The run stays on its fast path; weights are recomputed from what each layer was given. Views that ask further:
    lens (what each layer would say), attribution (what each head and layer added to the answer), patching (with
    --patch), ablation, induction, vectors (the token embeddings in two dimensions)."""
    from clearhead.cli.look_into import into, module_asked, trained_asked
    from clearhead.look import save_page
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
        told = {"row": row, "answer": answer, "versus": versus, "patch": patch, "over": over, "paths": paths}
        into(asked, view.value, told, html=html, out=out, json=json)
        return
    album = asked.album()
    picture = choose(album, layer)
    if head is not None:
        picture.weights(head)  # refuses a head that is not there before anything is written
    view = view or (View.patches if album.image is not None else View.heatmap)
    if html is not None:
        save_page(album, html)
    if out is not None:
        draw(album, picture, view, head, row, out)
    if json:
        shown = {"path": picture.path, "head": head, "weights": picture.weights(head).tolist()}
        show_json(album.to_dict() | {"shown": shown})
        return
    say(album.title)
    for path in (html, out):
        if path is not None:
            console.print(f"written to {path}", markup=False, soft_wrap=True)
    if html is None and out is None:
        show(album, picture, view, head, row)


def choose(album: Album, layer: str | None) -> Picture:
    """The layer that was asked for, by its module path or by its number in the stack that is shown first."""
    first = album.first
    if layer is None:
        return first
    stack = album.groups[first.group]
    found = [picture for picture in stack if str(picture.layer) == layer]
    found = found or [picture for picture in album.pictures if picture.path == layer]
    if not found:
        known = ", ".join(picture.path for picture in album.pictures)
        raise ConfigError(f"there is no layer {layer!r}; expected 0 to {len(stack) - 1}, or one of: {known}")
    return found[0]


def name_of(picture: Picture, head: int | None, together: str = "mean of") -> str:
    """The layer and head in words."""
    heads = f"{together} {picture.n_heads} heads" if head is None else f"head {head}"
    return f"{picture.title}, layer {picture.layer}, {heads}"


def show(album: Album, picture: Picture, view: View, head: int | None, row: int | None) -> None:
    """One view in the terminal, under a line that says what it is."""
    from clearhead.look import terminal

    wide, colour = console.width, console.is_terminal and not console.no_color
    title = name_of(picture, head)
    match view:
        case View.heatmap:
            weights = picture.weights(head)
            _text(title, terminal.heatmap(weights, picture.rows, picture.columns, width=wide, colour=colour))
        case View.heads:
            _text(f"{picture.title}, layer {picture.layer}", terminal.head_grid(picture, width=wide))
        case View.lines:
            weights = picture.everything() if head is None else picture.weights(head)
            _text(name_of(picture, head, "all"), terminal.link_list(weights, picture.rows, picture.columns))
        case View.contributions:
            rows = terminal.contribution_table(_contributions(picture, row), picture.columns)
            _text(_contributed(picture, row), "")
            console.print(table(("key", "head", "weight", "share"), rows))
        case View.rollout:
            first, matrix = _rollout(album, picture)
            drawn = terminal.heatmap(matrix / matrix.max(), first.rows, first.rows, width=wide, colour=colour)
            _text(_rolled(first), drawn)
        case View.norms:
            _text(
                "Length of the residual stream: mean (shortest … longest)",
                terminal.norm_bars(album.norms, width=wide),
            )
        case View.patches:
            grey, grid, found = _patches(album, picture, row)
            chosen = found.mean(0) if head is None else found[head]
            _text(title, terminal.patch_map(grey, chosen, grid, colour=colour))
    if view in (View.heatmap, View.measures, View.patches):
        console.print()
        if view is View.measures:
            console.print(f"{picture.title}, layer {picture.layer}\n", markup=False)
        console.print(table(("head", "pattern", "score", "entropy", "distance"), terminal.head_table(picture)))
    if picture.difference is not None and view not in (View.rollout, View.norms):
        say(
            f"\nrecomputed weights × values differ from what the run produced by {picture.difference:.1g} at most "
            f"(allowed {picture.tolerance:.1g})",
            style="dim",
        )


def _text(title: str, drawn: str) -> None:
    say(f"\n{title}\n")
    if drawn:
        show_picture(drawn)


def _contributed(picture: Picture, row: int | None) -> str:
    i = _row(picture, row)
    token = picture.rows[i].strip() or picture.rows[i]
    return f"{picture.title}, layer {picture.layer}: what adds most to {token} ({i})"


def _rolled(first: Picture) -> str:
    return f"Rollout through all layers: {first.title} (shades relative to the largest)"


def draw(album: Album, picture: Picture, view: View, head: int | None, row: int | None, out: Path) -> None:
    """One view as a figure."""
    from clearhead.look import figures

    title = f"{name_of(picture, head)}"
    match view:
        case View.heatmap:
            figure = figures.heat(picture.weights(head), picture.rows, picture.columns, title=title)
        case View.heads:
            stack = album.groups[picture.group]
            figure = figures.head_grid(stack, title=picture.title)
        case View.lines:
            weights = picture.everything() if head is None else picture.weights(head)
            figure = figures.arcs(weights, picture.rows, picture.columns, title=name_of(picture, head, "all"))
        case View.measures:
            figure = figures.measures(album.pictures, title=album.title)
        case View.contributions:
            found, told = _contributions(picture, row), _contributed(picture, row)
            figure = figures.contribution_bars(found, picture.columns, title=told)
        case View.rollout:
            first, matrix = _rollout(album, picture)
            figure = figures.rollout_map(matrix, first.rows, title=f"Rollout: {first.title}")
        case View.norms:
            figure = figures.norms(album.norms, title=album.title)
        case View.patches:
            grey, grid, weights = _patches(album, picture, row)
            chosen = None if row is None else row - (len(picture.rows) - grid[0] * grid[1])
            figure = figures.patches(
                grey, weights, grid, chosen=chosen, title=f"{picture.title}, layer {picture.layer}"
            )
    figures.save(figure, out)


def _row(picture: Picture, row: int | None) -> int:
    return len(picture.rows) - 1 if row is None else row


def _contributions(picture: Picture, row: int | None) -> list[Any]:
    from clearhead.look.measures import contributions

    if picture.written is None:
        raise ConfigError(f"what {picture.path} adds is not known: its output projection is none that we can read")
    return contributions(picture.row(_row(picture, row)), picture.written)


def _rollout(album: Album, picture: Picture) -> tuple[Picture, Tensor]:
    """The first layer of the stack that is rolled out (the shown one, if it can be), and the result."""
    found = album.rollouts()
    group = picture.group if picture.group in found else next(iter(found), None)
    if group is None:
        raise ConfigError("rollout needs two or more layers of self-attention over the same tokens, 1,024 at most")
    return album.groups[group][0], found[group]


def _patches(album: Album, picture: Picture, row: int | None) -> tuple[Tensor, tuple[int, int], Tensor]:
    """The picture, its grid, and each head's weights over the patches: of one query, or the mean over all."""
    if album.image is None or picture.places.grid is None:
        raise ConfigError("patches are a view of pictures; choose another view for text, such as heatmap")
    grid = picture.places.grid
    chosen = picture.everything().mean(1) if row is None else picture.row(row)
    return album.image, grid, chosen[:, -grid[0] * grid[1] :]
