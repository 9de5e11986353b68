"""New document layouts at every step, compared with an unchanged mask and with peers (sections "layouts" and "flex").

Every step draws documents of random lengths (exponential, 1,024 tokens on average) and random prefixes, as a data
loader does; only the attention call is timed, with the construction of its mask. FlexAttention reads the layout from
fixed tensors, so that nothing is compiled again, and creates its block mask with a compiled `create_block_mask`. Since
compilation for one size takes half a minute, it is measured at selected points, or at all points of a selected length.

    B batch   T tokens
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.changing.options import QKV, Options, attend_under, forward_backward, tensors
from benchmarks.timed import MAX_ROUNDS, Contender, Job, Timing, describe_error, time_contenders
from clearhead.attention.observe import Impl
from clearhead.masks import Mask, causal, documents, padding, window

LENGTHS = (16384, 65536, 4096, 131072)
BATCHES = (1, 4)
MEAN_DOCUMENT = 1024
MAX_PREFIX = 0.5  # of a document
WINDOW = 512
FLEX_LENGTH = 16384
FLEX_MASK = "causal & documents"


@dataclass(frozen=True)
class Layout:
    """One batch of packed documents.

    Attributes:
        ids: Document of each position, (B, T).
        prefix_ids: Document of each position of a prefix, −1 elsewhere, (B, T).
        lengths: Number of real tokens of each row, (B,), for padding.
        starts: Start of each document in the flattened batch, and its end, int32.
        longest: Length of the longest document.
    """

    ids: Tensor
    prefix_ids: Tensor
    lengths: Tensor
    starts: Tensor
    longest: int


def draw_layout(step: int, batch: int, length: int, device: str) -> Layout:
    """Draw the layout of a step, in new tensors: nothing can be reused from an earlier call."""
    layout = _draw_on_cpu(step, batch, length)
    ids, prefix_ids, lengths, starts = (
        tensor.to(device, copy=True) for tensor in (layout.ids, layout.prefix_ids, layout.lengths, layout.starts)
    )
    return Layout(ids, prefix_ids, lengths, starts, layout.longest)


@lru_cache(maxsize=2 * MAX_ROUNDS)
def _draw_on_cpu(step: int, batch: int, length: int) -> Layout:
    """Draw the layout of a step. All implementations of a row get the same layouts."""
    generator = torch.Generator().manual_seed(step)
    sizes = [_document_sizes(length, generator) for _ in range(batch)]
    ids, prefix_ids = zip(*[_ids(row_sizes, generator) for row_sizes in sizes], strict=True)
    lengths = torch.randint(max(1, length // 4), length + 1, (batch,), generator=generator)
    flat = torch.cat(sizes)
    starts = F.pad(flat.cumsum(0), (1, 0)).int()
    return Layout(torch.stack(ids), torch.stack(prefix_ids), lengths, starts, int(flat.max()))


def _document_sizes(length: int, generator: torch.Generator) -> Tensor:
    """Draw sizes of documents that add up to the length."""
    mean = min(MEAN_DOCUMENT, max(1, length // 4))
    draws = torch.empty(4 * length // mean + 40).exponential_(1 / mean, generator=generator)
    ends = (1 + draws.long()).cumsum(0)
    ends = torch.cat([ends[ends < length], torch.tensor([length])])
    return ends.diff(prepend=torch.tensor([0]))


def _ids(sizes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the document of each position, and the same for positions in a random prefix and −1 elsewhere, (T,)."""
    prefixes = (sizes * MAX_PREFIX * torch.rand(len(sizes), generator=generator)).long()
    ids = torch.arange(len(sizes)).repeat_interleave(sizes)
    offset = torch.arange(len(ids)) - (sizes.cumsum(0) - sizes)[ids]
    return ids, torch.where(offset < prefixes[ids], ids, -1)


@dataclass(frozen=True)
class Pattern:
    """A mask of a layout, the same mask as a function of positions for FlexAttention, and varlen options if it has any.

    Attributes:
        mask: Builds the mask from a layout.
        visible: Whether query q of row b sees key k, given the tensors of a layout.
        varlen: Options of varlen attention, or None if it has no such mask.
    """

    mask: Callable[[Layout], Mask]
    visible: Callable[[Layout, Tensor, Tensor, Tensor], Tensor]
    varlen: dict[str, Any] | None = None


def _same(layout: Layout, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return layout.ids[b, q] == layout.ids[b, k]


def _in_prefix(layout: Layout, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (layout.prefix_ids[b, q] == layout.prefix_ids[b, k]) & (layout.prefix_ids[b, q] >= 0)


Draw = Callable[[int], Layout]
PATTERNS: dict[str, Pattern] = {
    "causal & documents": Pattern(
        lambda x: causal() & documents(x.ids),
        lambda x, b, q, k: _same(x, b, q, k) & (q >= k),
        {"window_size": (-1, 0)},
    ),
    "documents": Pattern(lambda x: documents(x.ids), _same, {}),
    "causal & documents & window": Pattern(
        lambda x: causal() & documents(x.ids) & window(WINDOW, 0),
        lambda x, b, q, k: _same(x, b, q, k) & (q >= k) & (q - k <= WINDOW),
        {"window_size": (WINDOW, 0)},
    ),
    "per-document prefix": Pattern(
        lambda x: causal() & documents(x.ids) | documents(x.prefix_ids),
        lambda x, b, q, k: _same(x, b, q, k) & (q >= k) | _in_prefix(x, b, q, k),
    ),
    "padding": Pattern(lambda x: padding(x.lengths), lambda x, b, q, k: k < x.lengths[b]),
}


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each batch size, length and mask."""
    for batch in options.batches_or(BATCHES):
        for length in options.lengths_or(LENGTHS):
            for name in PATTERNS:
                if options.name_filter in name:
                    row = Timing(section="layouts", name=name, sizes={"batch": batch, "length": length})
                    ahead = (partial(_run_once, options, name, 1, LENGTHS[0], False),)
                    yield Job(row, partial(_measure, options, name, batch, length), ahead)


def flex_jobs(options: Options) -> Iterator[Job]:
    """Return one job for each point at which FlexAttention is measured."""
    for job in jobs(options):
        name, sizes = job.row.name, job.row.sizes
        if _has_flex(options, name, **sizes):
            row = Timing(section="flex", name=name, sizes=sizes)
            compilation = partial(_run_once, options, name, sizes["batch"], sizes["length"], True)
            measure = partial(_measure_flex, options, name, sizes["batch"], sizes["length"])
            yield Job(row, measure, (compilation,), without_peer=_note_flex)


def _has_flex(options: Options, name: str, batch: int, length: int) -> bool:
    """Return whether FlexAttention is measured at a point: without --length, one mask or one length."""
    n_differences = (name != FLEX_MASK) + (length != FLEX_LENGTH) + (batch != 1)
    return _has_peers(options) and (n_differences <= 1 or bool(options.lengths))


def _has_peers(options: Options) -> bool:
    return options.peers and options.is_gpu


def _measure(options: Options, name: str, batch: int, length: int, row: Timing) -> None:
    """Measure one row."""
    pattern = PATTERNS[name]
    row.targets = {"changing / repeated": 1.3, "changing / dense": None}
    qkv, grad = tensors(options, batch, length)
    draw = partial(draw_layout, batch=batch, length=length, device=options.device)
    contenders = _attention(pattern, draw, qkv, grad)
    if pattern.varlen is not None and _has_peers(options):
        row.targets["changing / varlen"] = 1.15 if name == "causal & documents" else None
        try:
            contenders.append(_varlen(pattern.varlen, draw, qkv, grad))
        except Exception as error:  # a version of torch without it
            row.notes["varlen"] = describe_error(error)
    time_contenders(row, contenders, seconds=options.seconds, device=options.device)


def _measure_flex(options: Options, name: str, batch: int, length: int, row: Timing) -> None:
    """Compare one point with FlexAttention."""
    pattern = PATTERNS[name]
    row.targets = {"changing / flex": 0.8, "auto / flex": None}
    qkv, grad = tensors(options, batch, length)
    draw = partial(draw_layout, batch=batch, length=length, device=options.device)
    contenders = [*_attention(pattern, draw, qkv, grad), _flex(pattern, draw, qkv, grad)]
    selected = [contender for contender in contenders if contender.name in ("changing", "auto", "flex")]
    time_contenders(row, selected, seconds=options.seconds, device=options.device)


def _note_flex(row: Timing) -> None:
    """Note that FlexAttention was not compiled in time."""
    row.notes["flex"] = "not measured: its compilation failed or took too long"


def _attention(pattern: Pattern, draw: Draw, qkv: QKV, grad: Tensor) -> list[Contender]:
    """Return clearhead with an unchanged and with changing masks, and dense causal attention."""
    unchanged = pattern.mask(draw(0))

    def changing(layout: Layout, impl: Impl) -> None:
        forward_backward(attend_under(pattern.mask(layout), impl), qkv, grad)

    dense = partial(F.scaled_dot_product_attention, is_causal=True)
    return [
        Contender("repeated", lambda step: forward_backward(attend_under(unchanged, "sparse"), qkv, grad)),
        Contender("changing", partial(changing, impl="sparse"), draw),
        Contender("auto", partial(changing, impl="auto"), draw),
        Contender("dense", lambda step: forward_backward(dense, qkv, grad)),
    ]


def _flex(pattern: Pattern, draw: Draw, qkv: QKV, grad: Tensor) -> Contender:
    """Return FlexAttention, which creates a block mask at each step."""
    flex = Flex(pattern, draw(0))
    return Contender("flex", lambda layout: forward_backward(flex(layout), qkv, grad), draw)


@lru_cache
def _compiled_flex() -> tuple[Any, Any]:
    """Return `create_block_mask` and `flex_attention`, compiled once for each size."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.config.recompile_limit = 64  # more masks and sizes than a training run has
    create, attend = (torch.compile(f, dynamic=False) for f in (flex.create_block_mask, flex.flex_attention))
    return create, attend


class Flex:
    """FlexAttention with a block mask that is created at each step from fixed tensors.

    Args:
        pattern: The mask.
        layout: Its tensors are overwritten by the layout of each step.
    """

    def __init__(self, pattern: Pattern, layout: Layout) -> None:
        self._layout = layout
        self._create, self._attend = _compiled_flex()

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return pattern.visible(layout, b, q_idx, kv_idx)

        self._visible = visible

    def __call__(self, layout: Layout) -> Callable[..., Tensor]:
        """Return the attention function of a step."""
        self._layout.ids.copy_(layout.ids)
        self._layout.prefix_ids.copy_(layout.prefix_ids)
        self._layout.lengths.copy_(layout.lengths)
        B, T = layout.ids.shape
        block_mask = self._create(self._visible, B, None, T, T, device=layout.ids.device)
        return partial(self._attend, block_mask=block_mask)


def _varlen(varlen_options: dict[str, Any], draw: Draw, qkv: QKV, grad: Tensor) -> Contender:
    """Return torch's varlen attention over the flattened batch, in its own memory layout, (B·T, H, D)."""
    attend_varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    flat = tuple(x.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_() for x in qkv)
    flat_grad = grad.transpose(1, 2).flatten(0, 1).contiguous()

    def run(layout: Layout) -> None:
        lengths = (layout.starts, layout.starts, layout.longest, layout.longest)
        torch.autograd.grad(attend_varlen(*flat, *lengths, **varlen_options), flat, flat_grad)

    return Contender("varlen", run, draw)


def _run_once(options: Options, name: str, batch: int, length: int, flex: bool) -> None:
    """Compile the kernels of a row, in a worker."""
    pattern = PATTERNS[name]
    qkv, grad = tensors(options, batch, length)
    layout = draw_layout(0, batch, length, options.device)
    attention = Flex(pattern, layout)(layout) if flex else attend_under(pattern.mask(layout), "sparse")
    forward_backward(attention, qkv, grad)
