"""Test properties of any PyTorch Transformer: causality, padding, cache, numerics, gradients.

Example:
    import clearhead as ch
    from clearhead.analysis.checks import Ids, KeepMask

    print(ch.check(model))  # clearhead, transformers, torch.nn, timm
    print(ch.check(net, inputs=Ids(101), causal=True, padding=KeepMask("mask")))  # any other module

`clearhead.analysis.checks.testing` contains the properties as assertions for a test suite;
`clearhead.analysis.checks.buggy_modules` contains
modules with typical errors.
"""

from __future__ import annotations

from clearhead.analysis.checks.check_report import CheckReport, Finding, Verdict
from clearhead.analysis.checks.runner import NAMES, check
from clearhead.analysis.inputs.infer_spec import spec_for
from clearhead.analysis.inputs.module_spec import (
    Caching,
    CallInputs,
    Embeddings,
    Ids,
    IgnoreMask,
    KeepMask,
    ModuleSpec,
    Values,
)

__all__ = [
    "NAMES",
    "Caching",
    "CallInputs",
    "CheckReport",
    "Embeddings",
    "Finding",
    "Ids",
    "IgnoreMask",
    "KeepMask",
    "ModuleSpec",
    "Values",
    "Verdict",
    "check",
    "spec_for",
]
