"""The kinds of problems: the keys that their files may have, how they are worked, and `vary(source, draw)`, the values
that make one another problem of the same difficulty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from clearhead.work.draw import Draw
from clearhead.work.kinds import attention, convolution, counts, derivation, formulas
from clearhead.work.sheet import Sheet
from clearhead.work.source import Source


class Kind(NamedTuple):
    """One kind of problem."""

    keys: tuple[str, ...]
    solve: Callable[[Source, Sheet], None]
    vary: Callable[[Source, Draw], dict[str, Any]]


KINDS = {
    "attention": Kind(attention.KEYS, attention.solve, attention.vary),
    "layer-norm": Kind(("x", "gamma", "beta", "eps"), formulas.layer_norm, formulas.vary_layer_norm),
    "position": Kind(("positions", "d_model", "pairs", "base"), formulas.position, formulas.vary_position),
    "convolution": Kind(("input", "layer"), convolution.solve, convolution.vary),
    "schedule": Kind(("lr_max", "warmup_steps", "total_steps", "steps"), formulas.schedule, formulas.vary_schedule),
    "mask": Kind(("expression", "length", "also"), counts.mask, counts.vary_mask),
    "cost": Kind(("d_model", "heads", "tokens", "bias", "output", "bytes"), counts.cost, counts.vary_cost),
    "receptive-field": Kind(("heads", "layers", "tokens"), counts.receptive_field, counts.vary_receptive_field),
    "derivation": Kind(derivation.KEYS, derivation.solve, derivation.vary),
}
