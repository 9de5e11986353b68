"""Compare each kernel with its reference; `test_engine.py` runs this in a separate process with TRITON_INTERPRET=1."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import nn

from clearhead._core import counter_rng
from clearhead.attention.decode import (
    DecodeSlots,
    HeadNorms,
    RotaryCosSin,
    decode_attention,
    decode_attention_reference,
)
from clearhead.generation import BeamSearch, Greedy, Sample, generate
from clearhead.generation.sampling import (
    SamplingParameters,
    log_probs_at,
    probabilities,
    sample_with_logprobs,
    topk_logprobs,
)
from clearhead.masks import causal, window
from clearhead.nn import GELU, Experts, ExpertsFeedForward, FeedForward, GeGLU, Parallel, ReLU, SwiGLU
from clearhead.nn.positions import Rotary, YarnScaling
from clearhead.ops.activations import ClampedSwiGLU
from clearhead.ops.fused_linear import (
    FusedLinearSpec,
    fused_linear_decode,
    fused_linear_prefill,
    fused_linear_reference,
)
from clearhead.ops.fused_linear_config import LinearConfig


def random_norm(kind, width):
    norm = kind(width)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.normal_()
    return norm


def fused_linears():
    for rows, M, norm, activation in (
        (1, 71, nn.LayerNorm, GELU(tanh=True)),
        (3, 71, nn.RMSNorm, SwiGLU()),
        (1, 71, None, None),
        (11, 71, nn.LayerNorm, ReLU()),
        (11, 71, nn.RMSNorm, SwiGLU()),
        (37, 71, None, GELU()),
        (5, 71, nn.RMSNorm, None),
    ):
        N = 38
        gated = isinstance(activation, SwiGLU)
        spec = FusedLinearSpec(
            torch.randn(N, M) * (71 / M) ** 0.5,
            None if activation is None else torch.randn(N),
            None if norm is None else random_norm(norm, M),
            activation,
            torch.randn(N, M) if gated else None,
            torch.randn(N) if gated else None,
        )
        x = torch.randn(rows, M)
        residual = torch.randn(rows, N) if rows != 3 else None
        expected = fused_linear_reference(x, spec, residual)
        torch.testing.assert_close(fused_linear_decode(x, spec, residual), expected, rtol=1e-4, atol=1e-4)


def split_linears():
    """Several programs share a row, with and without masks, and with a norm before or in the kernel."""
    from clearhead.ops.fused_linear_triton import launch

    for rows, N, M, kind, parts, fuses_norm in (
        (3, 38, 300, "plain", 3, True),
        (5, 64, 256, "gated", 2, True),
        (17, 38, 300, "gated", 3, True),
        (11, 48, 256, "normed", 2, False),
        (4, 32, 512, "normed", 4, True),
        (2, 16, 1100, "normed", 1, True),  # the norm takes two passes over x
        (3, 48, 300, "gated", 1, True),
    ):
        gated = kind == "gated"
        norm = None if kind == "plain" else random_norm(nn.RMSNorm if gated else nn.LayerNorm, M)
        activation = SwiGLU() if gated else GELU()
        weights = [torch.randn(N, M) * M**-0.5 for _ in range(2)]
        spec = FusedLinearSpec(
            weights[0],
            torch.randn(N),
            norm,
            activation,
            weights[1] if gated else None,
            torch.randn(N) if gated else None,
        )
        x = torch.randn(rows, M)
        residual = torch.randn(rows, N) if kind == "plain" else None
        expected = fused_linear_reference(x, spec, residual)
        configs = [LinearConfig("tiles", 16, 64, 4, 4, parts, fuses_norm)]
        if rows <= 16:
            configs.append(LinearConfig("resident", 16, warps=4))
        for config in configs:
            torch.testing.assert_close(launch(x, spec, residual, config), expected, rtol=1e-4, atol=1e-4)


def attention():
    for R, H, K, D, S, biased, shared, turning, softcap, writes in (
        (1, 3, 3, 20, 2100, 0, False, 0, None, True),
        (2, 6, 2, 16, 130, 1, True, 8, None, True),
        (3, 4, 4, 16, 70, 2, True, 4, 3.0, True),
        (3, 8, 1, 16, 700, 0, False, 8, 3.0, True),
        (3, 4, 2, 16, 70, 0, False, 0, None, False),
    ):
        n_slots = R + 2
        slots = torch.randperm(n_slots)[:R]
        lengths = torch.tensor([S // 3, 0 if writes else 1, S + 5])[:R]  # the last one is a full ring buffer
        if shared:  # rows that share tokens have one length
            lengths = lengths[:1].expand(R).contiguous()
        n_used = (lengths + writes).clamp(max=S)
        lengths = lengths if writes else n_used
        heads = torch.randn(R, H + 2 * K * writes, D)
        keys, values = torch.randn(n_slots, K, S, D), torch.randn(n_slots, K, S, D)
        parents = None
        if shared:
            parents = torch.randint(n_slots, (R, S), dtype=torch.int32)
            parents.scatter_(1, (lengths % S)[:, None], slots[:, None].int())
        else:
            for slot, n in zip(slots.tolist(), n_used.tolist(), strict=True):
                keys[slot, :, n:] = values[slot, :, n:] = math.nan  # must not be read
        bias = None
        if biased:
            bias = torch.randn(*((R, H) if biased == 1 else (1, 1)), S)
            bias[..., ::3] = -math.inf
        is_table = softcap is not None
        angle = torch.randn(S + 6 if is_table else R if biased else 1, turning)
        rotary = RotaryCosSin(angle.cos(), angle.sin(), is_table) if turning else None
        norms = HeadNorms(torch.randn(D), torch.randn(D), 1e-6) if writes and H != K else None
        used = DecodeSlots(slots, lengths, bias, parents)
        reference = keys.clone(), values.clone()
        options = {"scale": 0.3, "softcap": softcap, "rotary": rotary, "norms": norms, "writes": writes}
        actual = decode_attention(heads, keys, values, used, **options)
        expected = decode_attention_reference(heads, *reference, used, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(keys, reference[0], equal_nan=True)
        torch.testing.assert_close(values, reference[1], equal_nan=True)


def prompt_writes():
    """The kernel rotates heads and stores keys and values, except for tokens that a ring buffer does not keep."""
    from clearhead.generation.engine.write_prompts_triton import launch

    for N, H, K, D, rotary in (
        (7, 3, 3, 20, None),
        (5, 6, 2, 16, Rotary()),
        (7, 4, 4, 20, Rotary(partial_rotary_factor=0.4)),
        (3, 37, 1, 256, Rotary(scaling=YarnScaling(factor=3.0, original_max_len=9))),  # several tiles of heads
    ):
        n_slots, S = 3, 11
        positions, slots = torch.randint(29, (N,)), torch.randint(n_slots, (N,))
        columns = torch.randperm(S)[:N]
        columns[1] = -1
        qkv = torch.randn(N, H + 2 * K, D)
        keys, values = torch.randn(n_slots, K, S, D), torch.randn(S, n_slots, K, D).permute(1, 2, 0, 3)
        expected_keys, expected_values = keys.clone(), values.clone()
        q, k, v = qkv.split((H, K, K), dim=1)
        table = None
        if rotary is not None:
            n = rotary.rotary_dim(D) // 2
            unit = torch.zeros(29, D)
            unit[:, :n] = 1.0
            rotated = rotary.rotate(unit, torch.arange(29))
            table = RotaryCosSin(rotated[:, :n].contiguous(), rotated[:, n : 2 * n].contiguous(), is_table=True)
            q, k = (rotary.rotate(x.transpose(0, 1), positions).transpose(0, 1) for x in (q, k))
        for token in range(N):
            if columns[token] >= 0:
                expected_keys[slots[token], :, columns[token]] = k[token]
                expected_values[slots[token], :, columns[token]] = v[token]
        for actual, expected in zip(
            launch(qkv, keys, values, positions, slots, columns, table), (q, k, v), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(keys, expected_keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, expected_values)


def gated_prompts():
    """The kernel of gated activations, over several blocks; the residual is overwritten."""
    for activation in (SwiGLU(), GeGLU(), GeGLU(tanh=True)):
        for bias in (torch.randn(101), None):
            up = FusedLinearSpec(torch.randn(101, 71), bias, random_norm(nn.RMSNorm, 71), activation)
            up = replace(up, gate=torch.randn(101, 71), gate_bias=bias)
            down = FusedLinearSpec(torch.randn(71, 101), None if bias is None else torch.randn(71))
            x, residual = torch.randn(53, 71), torch.randn(53, 71)
            expected = fused_linear_reference(fused_linear_reference(x, up), down, residual)
            actual = fused_linear_prefill(fused_linear_prefill(x, up), down, residual)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
            assert actual.data_ptr() == residual.data_ptr()


def experts():
    """The kernels of a mixture of experts equal its module, which calls one expert after the other."""
    from clearhead.generation.engine.fused_experts import FusedExperts, can_fuse_experts

    for rows, settings, M, F, activation, bias in (
        (1, Experts(5, top_k=2), 71, 38, SwiGLU(), False),
        (3, Experts(7, top_k=3, n_shared=1), 64, 96, GELU(), True),
        (53, Experts(2, top_k=1, score="sigmoid", router_bias=True), 32, 48, ClampedSwiGLU(limit=0.7), True),
        (37, Experts(6, top_k=2, n_groups=3, top_groups=2, selection_bias=True), 23, 37, ReLU(), False),
        (128, Experts(11, top_k=8, normalize=False, scale=1.7), 16, 32, GeGLU(tanh=True), True),
    ):
        shared = FeedForward(M, F, activation, bias=bias) if settings.n_shared else None
        build = functools.partial(FeedForward, M, F, activation, bias=bias)
        module = ExpertsFeedForward(M, settings, build, shared=shared)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
        assert can_fuse_experts(module)
        x = torch.randn(rows, M)
        torch.testing.assert_close(FusedExperts(module)(x), module(x), rtol=1e-4, atol=1e-5)


def sampling():
    logits = torch.randn(3, 2, 9001).round(decimals=1)[:, -1]  # with ties, and not contiguous
    logits[1, ::2] = -math.inf
    for k in (1, 7):
        ids, log_probs = topk_logprobs(logits, k)
        expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(ids, expected)
        torch.testing.assert_close(log_probs, log_probs_at(logits, expected))
    logits[2, 5] = math.nan
    assert topk_logprobs(logits, 1)[1][2].isnan()


BELOW_ONE = 1 - 2**-53
SAMPLES = (
    Sample(),
    Sample(0.05),
    Sample(1e-300),
    Sample(1e300),
    Sample(1e300, top_k=3, top_p=0.6),
    Sample(1e-300, top_k=3, top_p=0.6, min_p=0.1),
    Sample(top_k=1),
    Sample(2.5, top_k=7),
    Sample(top_k=400),
    Sample(top_k=10**12),
    Sample(top_p=1e-9),
    Sample(0.7, top_p=0.5),
    Sample(top_p=0.9),
    Sample(5.0, top_p=1 - 1e-9),
    Sample(top_p=BELOW_ONE),
    Sample(min_p=1.0),
    Sample(0.8, min_p=0.3),
    Sample(3.0, min_p=1e-6),
    Sample(0.8, top_k=50, top_p=0.95),
    Sample(1.2, top_k=900, top_p=0.8, min_p=0.05),
    Sample(top_p=0.9, min_p=0.2),
    Sample(top_k=20, min_p=0.2),
)


def rows_of_logits(V):
    """Return named logits (3, V) with ties, masks and extreme values."""
    x = torch.randn(3, V) * torch.tensor([0.3, 1.0, 10.0])[:, None]
    masked = x.masked_fill(torch.rand(3, V) < 0.5, -math.inf)
    masked[:, V // 2] = 0.0
    one_id = torch.full((3, V), -math.inf)
    one_id[:, -1] = -3.0
    tiny = -x.abs() * 1e-20  # the rounding of max x − x makes ties
    tiny[:, V // 3] = 1.0
    return {
        "random": x,
        "tied": x.round(),
        "masked": masked,
        "one id": one_id,
        "finite mask": masked.clamp(min=torch.finfo(torch.float32).min),
        "equal": torch.zeros(3, V),
        "tiny": tiny,
        "far from 0": x - 100,
        "bfloat16": x.bfloat16(),
        "float16": x.half(),
        "not contiguous": torch.stack((x, x), dim=1)[:, -1],
    }


def assert_sampled(name, logits, strategy, uniform):
    """Compare the kernels with `probabilities`: the random number is in the interval of the sampled id.

    Intervals are half-open, up to 1e-12. If top_p is within 1e-12 of a step of the distribution, either side is right.
    """
    exact = SamplingParameters.of(strategy)
    numbers = torch.tensor([math.nan if x is None else x for x in exact], dtype=torch.float64)
    ids, log_probs = sample_with_logprobs(logits, exact.stored_in(numbers), uniform)
    is_right = torch.zeros_like(ids, dtype=torch.bool)
    for slack in (0.0,) if exact.top_p is None else (-1e-12, 0.0, 1e-12):
        top_p = None if exact.top_p is None else min(exact.top_p * (1 + slack), 1.0)
        probs = probabilities(logits, exact._replace(top_p=top_p))
        probability = probs.gather(1, ids[:, None]).squeeze(1)
        end = probs.cumsum(1).gather(1, ids[:, None]).squeeze(1)
        is_inside = (end - probability <= uniform + 1e-12) & (uniform < end + 1e-12)
        is_right |= is_inside & (probability > 0)
    case = f"{name}, {tuple(logits.shape)}, {strategy}, {uniform.tolist()}: {ids.tolist()}"
    assert is_right.all(), case
    torch.testing.assert_close(log_probs, log_probs_at(logits, ids[:, None]).squeeze(1), msg=case)


def filtered_sampling(step=3):
    """Compare every `step`-th strategy per kind of logits; all of them if the vocabulary is small."""
    for V, names in ((5003, ("random", "bfloat16")), (1033, ("tied", "masked", "far from 0")), (37, None), (1, None)):
        kinds = {name: logits for name, logits in rows_of_logits(V).items() if names is None or name in names}
        for n, (name, logits) in enumerate(kinds.items()):
            for strategy in SAMPLES if names is None else SAMPLES[n % step :: step]:
                uniform = torch.rand(3, dtype=torch.float64)
                uniform[0], uniform[1] = 0.0, BELOW_ONE
                assert_sampled(name, logits, strategy, uniform.roll(torch.randint(3, ()).item()))


def invalid_logits():
    """Rows without a distribution have a log-probability that is not finite; other rows do not depend on them."""
    uniform = torch.rand(5, dtype=torch.float64)
    for strategy in SAMPLES[::3]:
        logits = torch.randn(5, 1033)
        logits[0, 7] = math.nan
        logits[1, 1030] = math.inf
        logits[2] = -math.inf
        logits[3] = math.nan
        parameters = SamplingParameters.of(strategy)
        numbers = torch.tensor([math.nan if x is None else x for x in parameters], dtype=torch.float64)
        ids, log_probs = sample_with_logprobs(logits, parameters.stored_in(numbers), uniform)
        assert log_probs[:4].isnan().all()
        assert ((ids >= 0) & (ids < 1033)).all()
        assert_sampled("valid", logits[4:], strategy, uniform[4:])


def random_numbers():
    from clearhead.ops.counter_rng_triton import launch

    seed = torch.tensor([-(5**25)])
    step, prompt = torch.arange(7) * 3, torch.randint(1 << 60, (7,))
    assert torch.equal(launch(601, seed, step, prompt), counter_rng.uniform64(601, seed, step, prompt))


def models():
    """Compare searches through all kernels, as a GPU runs them, with the model's own forward."""
    from clearhead.generation.engine.slot_decoder import static_shapes
    from tests.generation.small import decoder, prompts

    grouped = decoder(n_heads=4, n_kv_heads=2).float()
    ring = {"mask": causal() & window(3, 0), "positions": Rotary(), "residual": Parallel(), "activation": SwiGLU()}
    for model, strategy, lengths in (
        (grouped, BeamSearch(2), (3, 5)),
        (grouped, Greedy(), (3, 5, 4)),
        (decoder(**ring).float(), Greedy(), (9, 2)),
        (grouped, Sample(0.9, top_k=9, top_p=0.8, seed=3), (3, 5, 4)),
        (decoder(experts=Experts(5, top_k=2), activation=SwiGLU()).float(), Greedy(), (3, 5, 4)),
    ):
        rows = prompts(23, lengths)
        options = {"strategy": strategy, "max_new_tokens": 4, "stop_ids": 7}
        with torch.no_grad(), static_shapes():
            expected = generate(model, rows, engine="module", **options)
            actual = generate(model, rows, slots=2, **options)
        assert torch.equal(actual.ids, expected.ids)
        torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        fused_linears()
        split_linears()
        attention()
        prompt_writes()
        gated_prompts()
        experts()
        sampling()
        filtered_sampling()
        invalid_logits()
        random_numbers()
        models()
