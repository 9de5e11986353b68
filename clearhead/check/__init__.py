"""Is this Transformer right? Properties of any PyTorch module, tested.

    import clearhead as ch
    from clearhead.check import Ids, TrueIsReal

    print(ch.check(model))                                        # ours, transformers, torch.nn, timm
    print(ch.check(net, inputs=Ids(101), causal=True, padding=TrueIsReal("mask")))    # anything else

`clearhead.check.testing` has the same as assertions for a test suite; `clearhead.check.gallery` has broken modules to
learn from.
"""

from __future__ import annotations

from clearhead._callable import make_callable
from clearhead.check.guess import subject_of
from clearhead.check.report import Finding, Report, Verdict
from clearhead.check.runner import NAMES, check
from clearhead.check.subject import (
    Batch,
    Caching,
    Embeddings,
    Ids,
    Subject,
    TrueIsHidden,
    TrueIsReal,
    Values,
)

__all__ = [
    "NAMES",
    "Batch",
    "Caching",
    "Embeddings",
    "Finding",
    "Ids",
    "Report",
    "Subject",
    "TrueIsHidden",
    "TrueIsReal",
    "Values",
    "Verdict",
    "check",
    "subject_of",
]

make_callable(__name__, "check")
