"""The properties that `check` tests, in the order of a report.

One class is one property; to add one, write it and put it into the list.
"""

from __future__ import annotations

from clearhead.checks.properties.base import Property, Seen
from clearhead.checks.properties.batch import BatchInvariance, Determinism, PermutationEquivariance
from clearhead.checks.properties.cache import CacheConsistency
from clearhead.checks.properties.causality import FutureLeak, PastReach
from clearhead.checks.properties.learning import GradientsReach, TrainIsEval
from clearhead.checks.properties.numbers import DtypeAgreement, Finiteness
from clearhead.checks.properties.padding import MaskPolarity, PaddingInvariance
from clearhead.checks.properties.scale import ScoreScale

PROPERTIES: tuple[Property, ...] = (
    Determinism(),
    FutureLeak(),
    PastReach(),
    PaddingInvariance(),
    MaskPolarity(),
    BatchInvariance(),
    CacheConsistency(),
    PermutationEquivariance(),
    DtypeAgreement(),
    Finiteness(),
    GradientsReach(),
    TrainIsEval(),
    ScoreScale(),
)

__all__ = ["PROPERTIES", "Property", "Seen"]
