"""Neighborhood attention on images and videos, with a mask that is planned in each step or prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from torch import Tensor

from benchmarks.changing.options import Options, attend_under, forward_backward, tensors
from benchmarks.expressions import flex
from benchmarks.expressions.memory import add_memory
from benchmarks.timed import Contender, Job, Timing, abandon_after, describe_error, time_contenders
from clearhead._core.caches import clear_caches
from clearhead.masks import catalogue

GRIDS = ((64, 64), (16, 32, 32), (128, 128), (256, 256))
SIDES = (7, 13)
SMOKE_GRIDS = ((12, 12), (4, 6, 6))
SMOKE_SIDES = (3,)
CREATION_LIMIT = 20.0  # seconds for the first block mask in this process, which reads the compiler's cache
TARGETS = {
    "same mask / flex": 1.0,
    "new mask / flex, new mask": 0.8,
    "planned / flex, new mask": 0.8,
    "planned / same mask": None,
}


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each grid and window."""
    for grid in SMOKE_GRIDS if options.smoke else GRIDS:
        for side in SMOKE_SIDES if options.smoke else SIDES:
            length = 1
            for size in grid:
                length *= size
            name = f"neighborhood {' × '.join(map(str, grid))}"
            if options.name_filter not in name or (options.lengths and length not in options.lengths):
                continue
            row = Timing(section="grids", name=name, sizes={"window": side, "length": length})
            has_flex = options.peers and options.is_gpu
            measure, without_flex = (partial(_measure, options, grid, side, length, x) for x in (has_flex, False))
            ahead = (partial(_run_once, options, grid, side, length),) if has_flex else ()
            yield Job(row, measure, ahead, without_peer=without_flex)


def _measure(options: Options, grid: tuple[int, ...], side: int, length: int, has_flex: bool, row: Timing) -> None:
    """Measure one row."""
    row.targets = dict(TARGETS)
    qkv, grad = tensors(options, 1, length)
    mask = catalogue.neighborhood(grid, side)
    row.facts["density"] = mask.density(length)

    def same(step: int) -> None:
        forward_backward(attend_under(mask, "sparse"), qkv, grad)

    def new(step: int) -> None:
        forward_backward(attend_under(catalogue.neighborhood(grid, side), "sparse"), qkv, grad)

    def planned(step: int) -> None:
        clear_caches()
        new(step)

    contenders = [Contender("same mask", same), Contender("new mask", new)]
    steps: dict[str, Callable[[], object]] = {"same mask": partial(same, 0)}
    if has_flex:
        try:
            peers = _flex(options, grid, side, length, row)
            contenders += [Contender(name, lambda step, f=f: forward_backward(f(), qkv, grad)) for name, f in peers]  # type: ignore[misc]
            steps["flex"] = lambda: forward_backward(peers[0][1](), qkv, grad)
        except Exception as error:  # the compiler may raise anything
            row.notes["flex"] = describe_error(error)
    elif options.peers and options.is_gpu:
        row.notes["flex"] = "not measured: its compilation failed or took too long"
    time_contenders(row, contenders, seconds=options.seconds, device=options.device)
    # Afterwards, because it removes the plan of the others.
    time_contenders(row, [Contender("planned", planned)], seconds=options.seconds, device=options.device)
    add_memory(row.facts, {name: step for name, step in steps.items() if name in row.times}, options.device)


def _flex(
    options: Options, grid: tuple[int, ...], side: int, length: int, row: Timing
) -> list[tuple[str, Callable[[], Callable[..., Tensor]]]]:
    """Return FlexAttention with a prepared block mask and, if it compiles, with one that is created in each step."""
    predicate = flex.neighborhood(grid, side)
    prepared = flex.attention_under(flex.prepare_mask(predicate, length, options.device))

    def create() -> Callable[..., Tensor]:
        return flex.attention_under(flex.create_mask(predicate, length, options.device))

    peers: list[tuple[str, Callable[[], Callable[..., Tensor]]]] = [("flex", lambda: prepared)]
    try:
        with abandon_after(CREATION_LIMIT):
            create()
    except Exception as error:  # the compiler may raise anything
        row.notes["flex, new mask"] = describe_error(error)
        return peers
    return [*peers, ("flex, new mask", create)]


def _run_once(options: Options, grid: tuple[int, ...], side: int, length: int) -> None:
    """Compile the kernels of a row, in a worker."""
    qkv, grad = tensors(options, 1, length)
    forward_backward(attend_under(catalogue.neighborhood(grid, side), "sparse"), qkv, grad)
    predicate = flex.neighborhood(grid, side)
    prepared = flex.prepare_mask(predicate, length, options.device)
    forward_backward(flex.attention_under(prepared), qkv, grad)
    with suppress(Exception):  # it fails again when it is measured, and is noted there
        flex.create_mask(predicate, length, options.device)
