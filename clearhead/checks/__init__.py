"""Is this Transformer right? Properties of any PyTorch module, tested.

    import clearhead as ch
    from clearhead.checks import Ids, TrueIsReal

    print(ch.check(model))                                        # ours, transformers, torch.nn, timm
    print(ch.check(net, inputs=Ids(101), causal=True, padding=TrueIsReal("mask")))    # anything else

`clearhead.checks.testing` has the same as assertions for a test suite; `clearhead.checks.gallery` has broken modules to
learn from.
"""

from __future__ import annotations

from clearhead.checks.guess import subject_of
from clearhead.checks.report import Finding, Report, Verdict
from clearhead.checks.runner import NAMES, check
from clearhead.checks.subject import Batch, Caching, Embeddings, Ids, Subject, TrueIsHidden, TrueIsReal, Values

__all__ = [
    "NAMES", "Batch", "Caching", "Embeddings", "Finding", "Ids", "Report", "Subject", "TrueIsHidden", "TrueIsReal",
    "Values", "Verdict", "check", "subject_of",
]  # fmt: skip
