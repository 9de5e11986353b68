"""Two questions about a decoder's own mask, which decide how its prompts may be batched and cached.

Both answers are on the safe side: where nothing can be proved, generation takes the slower way with the same result."""

from __future__ import annotations

import operator

import torch

from clearhead.masks import Atom, Causal, Full, Mask, Stride, Window, fold, leaves


def speaks_of_distance_only(mask: Mask) -> bool:
    """Whether moving a sequence to the right, as padding on its left does, leaves its pattern as it was.

    True for `causal() & window(256, 0)`; not for `every(64)` or `blocks(16)`, which count from position 0."""
    return all(isinstance(atom.leaf, (Full, Causal, Window, Stride)) for atom in leaves(mask))


def looks_ahead(mask: Mask, prompt: int, total: int) -> bool:
    """Whether some token may attend to a later one that is generated, and so changes after it has been computed.

    `prompt` of the `total` tokens are there from the start; among those, looking ahead (`causal() |
    prefix(n)`) is harmless."""
    if _is_causal(mask):
        return False
    p = torch.arange(total)[:, None]
    j = torch.arange(prompt, total)[None, :]
    return bool((mask.allows(p, j, keys=total) & (j > p)).any())


def _is_causal(mask: Mask) -> bool:
    """Proof from structure that no query sees a later key."""

    def proved(atom: Atom) -> bool:
        leaf, swapped = atom
        if isinstance(leaf, Window):
            return (leaf.before if swapped else leaf.after) == 0
        return isinstance(leaf, Causal) and not swapped

    return fold(mask, leaf=proved, both=operator.or_, either=operator.and_, inverse=lambda _: False)
