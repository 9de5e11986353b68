"""`python -m benchmarks decode`: models, bytes of a step, the probe in plain torch, and sections at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import decoding
from benchmarks.decoding import probe, steps
from benchmarks.decoding.models import BATCHES, MODELS, build, config_of, key_bytes, parameter_bytes
from benchmarks.decoding.steps import H200_BANDWIDTH, monotonic_rows
from benchmarks.decoding.workloads import STOP_ID, end_at_random, mixed_prompts, prefill_flops
from benchmarks.timed import Timing
from clearhead.errors import ConfigError
from clearhead.models import DecoderConfig

SMOKE = decoding.options_for("cpu", smoke=True)
MILLION = 10**6


def parameters_of(name):
    with torch.device("meta"):
        return sum(p.numel() for p in MODELS[name].config().build().parameters())


def step(name, batch, milliseconds):
    sizes = {"batch": batch, "context": 16}
    return Timing(section="steps", name=name, sizes=sizes, times={"clearhead": milliseconds})


@pytest.mark.parametrize(
    ("name", "millions"),
    [("Llama 1.1B", 1100), ("GPT-2 124M", 130), ("Qwen-like 0.5B", 500), ("Gemma-2-like 2B", 2600)],
)
def test_models_have_the_parameters_of_their_names(name, millions):
    assert parameters_of(name) / MILLION == pytest.approx(millions, rel=0.06)


def test_parameter_bytes_of_llama_leave_out_the_embedding():
    config = MODELS["Llama 1.1B"].config()
    with torch.device("meta"):
        model = config.build().to(torch.bfloat16)
    everything = 2 * sum(p.numel() for p in model.parameters())
    assert parameter_bytes(model, config, 3) == everything - 2 * 32_000 * 2048


def test_parameter_bytes_of_experts_grow_with_the_batch():
    config = MODELS["Mixtral-like"].config()
    with torch.device("meta"):
        model = config.build()
    experts = 4 * sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    bytes_of_one, bytes_of_many = (parameter_bytes(model, config, batch) for batch in (1, 10**6))
    assert bytes_of_many - bytes_of_one == pytest.approx(experts * 6 / 8)


def test_parameter_bytes_of_a_translator_leave_out_the_encoder():
    config = MODELS["translator"].config()
    with torch.device("meta"):
        model = config.build()
    read = sum(p.numel() for part in (model.decoder, model.encoder) for p in part.parameters())
    assert 0 < parameter_bytes(model, config, 1) < 4 * read


def test_key_bytes_stop_at_the_window_of_gemma():
    config = MODELS["Gemma-2-like 2B"].config()
    per_key = 2 * 4 * 256 * 2  # keys and values, heads, head dim, bfloat16
    assert key_bytes(config, torch.bfloat16, 3, 1000) == 3 * 26 * 1000 * per_key
    assert key_bytes(config, torch.bfloat16, 1, 32000) == 13 * (32000 + 4096) * per_key


@pytest.mark.parametrize("name", ["Llama 1.1B", "GPT-2 124M", "Qwen-like 0.5B"])
def test_probe_step_equals_attention_over_the_whole_cache(name):
    config = config_of(name, smoke=True)
    ids, caches = [], []
    for attention in ("sdpa", "matmul"):
        torch.manual_seed(0)
        decoder = probe.Probe(config, SMOKE, 3, 21, attention)
        decoder.caches[0][:, :, :, 22:] = 1e4  # positions that no step has written may not be attended to
        decoder.step()
        assert decoder.index.item() == 22
        ids.append(decoder.ids)
        caches.append(decoder.caches[-1][:, :, :, :22])
    assert torch.equal(*ids)
    torch.testing.assert_close(*caches)
    assert decoder.ids.shape == (3,)


def test_proberotates_by_cos_and_sin():
    x, angle = torch.randn(2, 3, 8), torch.randn(4)
    row = torch.cat([angle.cos(), angle.cos(), angle.sin(), angle.sin()])[None]
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous()) * torch.polar(torch.ones(4), angle)
    torch.testing.assert_close(probe.rotate(x, row), torch.cat([pairs.real, pairs.imag], -1))


@pytest.mark.parametrize("name", ["Gemma-2-like 2B", "Mixtral-like", "translator"])
def test_probe_does_not_support_other_blocks(name):
    assert probe.unsupported_reason(MODELS[name].config()) is not None


def test_monotonic_rows_name_the_batch_that_is_slowest_relative_to_a_larger_one():
    rows = [step("a", 1, 3.0), step("a", 8, 2.0), step("a", 32, 2.5), step("b", 1, 1.0)]
    (row,) = monotonic_rows(rows)
    assert (row.name, row.facts) == ("a", {"batch": 1, "larger batch": 8})
    assert row.ratios == {"batch / larger batch": 1.5}
    assert row.missed == ["batch / larger batch"]


def test_end_at_random_draws_the_stop_id_about_once_per_mean():
    torch.manual_seed(0)
    config = config_of("Llama 1.1B", smoke=True)
    model = config.build()
    end_at_random(model, 50)
    states = F.normalize(torch.randn(20_000, config.d_model), dim=-1) * config.d_model**0.5
    probability = (states @ model.lm_head_weight().T).softmax(-1)[:, STOP_ID].mean().item()
    assert 1 / probability == pytest.approx(50, rel=0.5)


def test_mixed_prompts_have_lengths_within_the_bounds():
    sizes = [len(ids) for ids in mixed_prompts(7, 400, (5, 1500))]
    assert min(sizes) >= 5
    assert max(sizes) <= 1500
    assert len(set(sizes)) > 300


def test_prefill_flops_count_parameters_attention_and_one_row_of_logits():
    config = config_of("GPT-2 124M", smoke=True)
    assert isinstance(config, DecoderConfig)
    model = build("GPT-2 124M", SMOKE)
    blocks = sum(p.numel() for p in model.blocks.parameters())
    assert prefill_flops(model, config, 10) == 2 * (10 * blocks + 2 * 100 * 64 + 499 * 64)


@pytest.mark.parametrize("name", MODELS)
def test_steps_section_measures_every_kind_of_model(name):
    options = replace(SMOKE, models=(name,), batches=(2,))
    rows = decoding.measure(options, sections=["steps"])
    rows = [row for row in rows if row.section == "steps"]
    assert [row.name for row in rows] == [name]
    assert rows[0].notes == {}
    assert rows[0].times.keys() == {"clearhead", "limit"}


def test_torch_section_compares_with_the_probe():
    rows = decoding.measure(replace(SMOKE, batches=(2,)), sections=["torch"])
    assert [row.name for row in rows] == ["Llama 1.1B", "GPT-2 124M", "Qwen-like 0.5B"]
    assert all(row.times.keys() == {"clearhead", "torch"} and row.notes == {} for row in rows)


def test_points_start_with_a_coarse_grid():
    points = steps.points(decoding.options_for("cuda"))
    assert len(points) == len(set(points)) == 12 * 21
    coarse = [steps.is_coarse(name, {"batch": batch, "context": context}) for name, batch, context in points]
    assert coarse == sorted(coarse, reverse=True)
    assert {name for name, _, _ in points[:32]} == {"Llama 1.1B", "GPT-2 124M"}
    assert {name for name, _, _ in points[: sum(coarse)]} == MODELS.keys()
    assert ("Llama 1.1B", 1, 32000) in points[: sum(coarse)]


def test_transformers_section_compares_with_transformers():
    pytest.importorskip("transformers")
    rows = decoding.measure(replace(SMOKE, models=("GPT-2",)), sections=["transformers"])
    assert [row.times.keys() for row in rows] == [{"clearhead", "transformers"}]


@pytest.mark.parametrize(
    ("section", "n", "contenders"),
    [
        ("prefill", 2, {"prefill", "ceiling"}),
        ("sampling", 3, {"sampling", "beam search", "greedy"}),
        ("mixed", 1, {"mixed", "equal"}),
        ("ragged", 1, {"ragged", "equal"}),
    ],
)
def test_workload_sections_measure_all_contenders(section, n, contenders):
    rows = decoding.measure(replace(SMOKE, models=("GPT-2",)), sections=[section])
    assert len(rows) == n
    assert {name for row in rows for name in row.times} == contenders
    assert all(row.notes == {} for row in rows)


def test_steps_skip_points_with_too_many_prompt_tokens():
    options = replace(SMOKE, models=("GPT-2",), batches=(4,), max_prefill=63)
    (row,) = decoding.measure(options, sections=["steps"])
    assert row.times == {}
    assert row.notes == {"row": "not measured: 64 prompt tokens, more than 63"}


def test_decode_writes_rows_and_summary(benchmarks_cli, tmp_path):
    out = tmp_path / "decode.json"
    arguments = ("--smoke", "--section", "steps", "--model", "translator", "--device", "cpu", "--out", out)
    assert benchmarks_cli("decode", *arguments).code == 0
    document = json.loads(out.read_text())
    assert [row["section"] for row in document["rows"]] == ["steps", "steps", "monotonic"]
    assert {entry["section"] for entry in document["summary"]} == {"steps", "monotonic"}


def test_grid_has_the_stated_batches_and_limit():
    assert sorted(BATCHES) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]
    assert H200_BANDWIDTH == 4e12


@pytest.mark.bad_input
def test_measure_unknown_section_raises_config_error():
    with pytest.raises(ConfigError, match="section is 'step'; expected one of prefill, sampling"):
        decoding.measure(SMOKE, sections=["step"])
