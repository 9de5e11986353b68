"""Test properties of any PyTorch Transformer: causality, padding, cache, numerics, gradients.

Example:
    import clearhead as ch
    from clearhead.checks import Ids, KeepMask

    print(ch.check(model))  # clearhead, transformers, torch.nn, timm
    print(ch.check(net, inputs=Ids(101), causal=True, padding=KeepMask("mask")))  # any other module

`clearhead.checks.testing` contains the properties as assertions for a test suite; `clearhead.checks.gallery` contains
modules with typical errors.
"""

from __future__ import annotations

from clearhead.checks.guess import spec_for
from clearhead.checks.report import Finding, Report, Verdict
from clearhead.checks.runner import NAMES, check
from clearhead.checks.subject import Caching, CallInputs, Embeddings, Ids, IgnoreMask, KeepMask, ModuleSpec, Values

__all__ = [
    "NAMES",
    "Caching",
    "CallInputs",
    "Embeddings",
    "Finding",
    "Ids",
    "IgnoreMask",
    "KeepMask",
    "ModuleSpec",
    "Report",
    "Values",
    "Verdict",
    "check",
    "spec_for",
]  # fmt: skip
