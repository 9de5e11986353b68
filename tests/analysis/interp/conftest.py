"""The cases of attribution, logit lens, patching and ablation."""

from __future__ import annotations

import pytest
import torch

from tests.analysis.interp.subjects import CASES


@pytest.fixture(params=CASES, scope="module")
def case(request):
    torch.manual_seed(3)
    model, model_args, change = CASES[request.param]()
    return request.param, model, model_args, change(model_args)
