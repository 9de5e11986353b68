"""Captured steps and their kernels on a GPU, compared with the module decoder."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from clearhead.generation import BeamSearch, Greedy, Sample, generate
from clearhead.models.presets import gpt2
from clearhead.nn import GELU, SwiGLU
from clearhead.ops.fused_linear import FusedLinearSpec, fused_linear_decode, fused_linear_reference
from tests.generation import interpreted
from tests.generation.cases import CASES, STRATEGIES, arguments, assert_equal
from tests.generation.small import STOP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, because CUDA graphs are tested")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_captured_steps_equal_module_decoder(kind, name, build, strategy):
    model, (rows, start) = build().double().cuda(), arguments(kind)
    options = {"strategy": strategy, "max_new_tokens": 13, "stop_ids": STOP, "decoder_start_ids": start}
    expected = generate(model, rows, engine="module", **options)
    for _ in range(3):  # run, captured, and reused
        assert_equal(generate(model, rows, **options), expected)


def test_decode_kernels_equal_references_on_gpu():
    torch.set_default_device("cuda")
    try:
        with torch.no_grad():
            interpreted.fused_linears()
            interpreted.split_linears()
            interpreted.attention()
            interpreted.prompt_writes()
            interpreted.gated_prompts()
            interpreted.sampling()
            interpreted.filtered_sampling(step=1)
            interpreted.invalid_logits()
            interpreted.random_numbers()
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 23, 100, 128])
@pytest.mark.parametrize(
    ("N", "M", "kind"), [(2304, 768, "layer"), (768, 768, "plain"), (1152, 896, "rms"), (4864, 896, "gated")]
)
def test_linear_kernels_err_at_most_twice_as_much_as_torch(N, M, kind, rows, dtype):
    """The table of the device chooses the kernel."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    weights = [draw(N, M, scale=M**-0.5) for _ in range(2)]
    norm = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm, "gated": torch.nn.RMSNorm}.get(kind)
    norm = None if norm is None else norm(M, eps=1e-5, device="cuda", dtype=dtype)
    gated = kind == "gated"
    activation = SwiGLU() if gated else GELU() if kind == "layer" else None
    spec = FusedLinearSpec(weights[0], draw(N), norm, activation, *((weights[1], draw(N)) if gated else ()))
    x = draw(rows, M)
    residual = draw(rows, N) if kind == "plain" else None
    with torch.no_grad():
        actual = fused_linear_decode(x, spec, residual).double()
        torch_result = fused_linear_reference(x, spec, residual).double()
        wide = None if norm is None else copy.deepcopy(norm).double()
        exact_spec = dataclasses.replace(
            spec,
            norm=wide,
            **{name: None if value is None else value.double() for name, value in tensors_of(spec).items()},
        )
        exact = fused_linear_reference(x.double(), exact_spec, None if residual is None else residual.double())
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert (actual - exact).abs().max() <= 2 * (torch_result - exact).abs().max() + rounding


def tensors_of(spec):
    """Return the tensors of a layer by name."""
    return {name: getattr(spec, name) for name in ("weight", "bias", "gate", "gate_bias")}


@pytest.mark.parametrize(
    "strategy", [Greedy(), Sample(0.9, top_k=40, seed=3), BeamSearch(4)], ids=lambda strategy: type(strategy).__name__
)
@pytest.mark.parametrize("batch", [1, 9])
def test_gpt2_sized_model_equals_module_decoder(strategy, batch):
    """GPT-2's sizes in float32 use all kernels of a step, at lengths of several chunks."""
    torch.manual_seed(0)
    model = gpt2().replace(n_layers=3, vocab_size=5003).build().cuda()
    ids = torch.randint(5003, (batch, 37))
    options = {"strategy": strategy, "max_new_tokens": 120}
    actual = generate(model, ids, **options)
    expected = generate(model, ids, engine="module", **options)
    assert (
        actual.ids == expected.ids
    ).float().mean() > 0.98  # two logits may tie within float32's error, once in a while


def test_captured_sampling_reads_parameters_of_each_call():
    """Calls with the same filters share a graph, and their parameters are not part of it."""
    torch.manual_seed(0)
    model = gpt2().replace(n_layers=1, vocab_size=5003).build().cuda()
    ids = torch.randint(5003, (3, 5))
    for strategy in (
        Sample(0.7, top_k=40, top_p=0.9, min_p=0.02, seed=1),
        Sample(1.7, top_k=4000, top_p=0.5, min_p=0.5, seed=2),
        Sample(1e-9, top_k=1, top_p=0.9, min_p=0.02, seed=3),
        Sample(3.0, top_p=0.99, seed=4),
        Sample(0.5, top_p=0.3, seed=5),
        Sample(0.5, seed=6),
        Sample(2.0, seed=7),
    ):
        options = {"strategy": strategy, "max_new_tokens": 30}
        actual = generate(model, ids, **options)
        expected = generate(model, ids, engine="module", **options)
        assert (actual.ids == expected.ids).float().mean() > 0.9, strategy  # float32's error may change an id


@pytest.mark.parametrize("name", ["sinusoidal", "learned", "rotary", "none", "grouped-query"])
def test_captured_prefill_equals_module_decoder(name):
    (build,) = [build for kind, other, build in CASES if (kind, other) == ("decoder", name)]
    model = build().double().cuda()
    for T in (5, 3, 5, 5, 16, 3):  # the same graph serves shorter prompts
        ids = torch.randint(20, (2, T), generator=torch.Generator().manual_seed(T))
        expected = generate(model, ids, max_new_tokens=4, engine="module")
        assert_equal(generate(model, ids, max_new_tokens=4), expected)
