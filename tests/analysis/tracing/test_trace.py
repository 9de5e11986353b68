"""Contents and names of traces, and cleanup after them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from clearhead import analysis
from clearhead.analysis.tracing.activation_store import path_matches
from clearhead.attention.observe import OBSERVERS
from clearhead.masks import causal, padding, window
from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, tiny_encoder_decoder
from clearhead.nn import MultiHeadAttention, apply_mask, attention
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.positions import ALiBi, RelativeBias, Rotary, Sinusoidal


def decoder(**changes):
    sizes = {"vocab_size": 31, "d_model": 24, "n_heads": 6, "n_kv_heads": 2, "n_layers": 2}
    return Decoder(DecoderConfig(**{**sizes, **changes})).eval()


def test_weights_equal_torch_weights():
    layer = MultiHeadAttention(14, 2).double()
    peer = nn.MultiheadAttention(14, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
    x = torch.randn(3, 5, 14, dtype=torch.float64)
    with analysis.trace(nn.ModuleDict({"only": layer})) as t:
        layer(x, mask=causal())
    _, expected = peer(x, x, x, attn_mask=~causal().dense(5), average_attn_weights=False)
    torch.testing.assert_close(t.weights("only"), expected)


@pytest.mark.parametrize("positions", [Sinusoidal(), Rotary(), ALiBi(), RelativeBias()], ids=str)
def test_weights_times_values_equal_heads(positions):
    model = decoder(positions=positions).double()
    with analysis.trace(model, "blocks.*.attention") as t:
        model(torch.randint(31, (3, 7)))
    assert t.paths == ["blocks.0.attention", "blocks.1.attention"]
    for path in t.paths:
        weights = t.weights(path)
        assert weights.shape == (3, 6, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 6, 7, dtype=torch.float64))
        torch.testing.assert_close(weights @ t.values(path), t.heads(path))
        assert t.difference(path) <= t.tolerance(path) < 1e-13


def test_cross_attention_weights_of_padding_are_zero():
    model = EncoderDecoder(tiny_encoder_decoder()).eval()
    source, target = torch.randint(model.config.vocab_size, (2, 7)), torch.randint(5, (2, 3))
    with analysis.trace(model, "decoder.blocks.*.cross_attention") as t:
        model(source, target, source_mask=padding([7, 4]))
    weights = t.weights(t.paths[-1])
    assert weights.shape[2:] == (3, 7)
    assert weights[1, ..., 4:].abs().max() == 0
    assert weights[1, ..., :4].min() > 0


def test_outputs_inputs_and_norms_equal_hooks():
    model = decoder()
    ids = torch.randint(31, (3, 7))
    calls = {}
    handles = [
        block.register_forward_hook(lambda m, args, out, i=i: calls.update({i: (args[0], out)}))
        for i, block in enumerate(model.blocks)
    ]
    with torch.no_grad(), analysis.trace(model, "blocks.*.output", "blocks.1.input", "output") as t:
        logits = model(ids)
    for handle in handles:
        handle.remove()
    assert torch.equal(t.output("blocks.1"), calls[1][1])
    assert torch.equal(t.input("blocks.1"), calls[1][0])
    assert torch.equal(t.output(), logits)
    assert t.outputs == ["", "blocks.0", "blocks.1"]
    assert [path for path, _ in t.norms()] == ["blocks.0", "blocks.1"]
    torch.testing.assert_close(t.norms()[0][1], calls[0][1].square().sum(-1).sqrt())
    assert t.paths == []


def test_trace_keeps_only_requested_tensors_alive():
    """Only the tensors of the requested layer stay alive after a run."""
    model = decoder(n_kv_heads=6)
    storages: list[weakref.ref] = []
    for layer in (block.attention for block in model.blocks):
        layer.q_proj.register_forward_hook(lambda m, args, out: storages.append(weakref.ref(out.untyped_storage())))
    with torch.no_grad(), analysis.trace(model, "blocks.1.attention") as t:
        model(torch.randint(31, (3, 7)))
    gc.collect()
    assert [ref() is not None for ref in storages] == [False, True]
    assert t.weights("blocks.1.attention", heads=2, rows=-1).shape == (3, 1, 1, 7)


def test_trace_with_runs_limit_keeps_latest_runs():
    model = decoder()
    all_ids = torch.randint(31, (5, 2, 7))
    with torch.no_grad(), analysis.trace(model, runs=2) as few, analysis.trace(model) as every:
        for ids in all_ids:
            model(ids)
    assert (few.runs, every.runs) == (2, 5)
    for run in (-1, -2):
        torch.testing.assert_close(
            few.weights("blocks.1.attention", run=run), every.weights("blocks.1.attention", run=5 + run)
        )
    assert not torch.equal(every.weights("blocks.0.attention", run=0), every.weights("blocks.0.attention"))


def test_trace_in_training_records_weights_before_dropout():
    model = decoder(attention_dropout=0.4)
    ids = torch.randint(31, (3, 7))
    with analysis.trace(model) as without_dropout:
        model(ids)
    model.train()
    torch.manual_seed(3)
    model(ids).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    with analysis.trace(model) as t:
        model(ids).sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)
    torch.testing.assert_close(t.weights("blocks.0.attention"), without_dropout.weights("blocks.0.attention"))
    assert not t.weights("blocks.0.attention").requires_grad


def functions_of_others():
    """Return functions that a trace could be tempted to replace."""
    return [attention.attend, nn.functional.scaled_dot_product_attention, KVCache.reorder]


def test_trace_replaces_no_functions_and_removes_hooks():
    model = EncoderDecoder(tiny_encoder_decoder())
    before = functions_of_others()
    ids = torch.randint(model.config.vocab_size, (2, 7))
    with analysis.trace(model, "**.output", "**.weights") as outer, analysis.trace(model):
        model(ids, ids)
        assert functions_of_others() == before
        assert len(OBSERVERS.get()) == 2
    assert outer.runs == 1
    with pytest.raises(RuntimeError, match="on purpose"), analysis.trace(model):
        raise RuntimeError("on purpose")
    assert OBSERVERS.get() == ()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class SDPADecoder(nn.Module):
    """A third-party model: one layer that calls torch's attention function."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 24)

    def forward(self, ids):
        x = self.embedding(ids).unflatten(-1, (6, 4)).transpose(-2, -3)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("build", [decoder, SDPADecoder])
def test_traces_in_two_threads_are_separate(build):
    """Both traces are open, and both models run, at the same time."""
    models = [build(), build()]
    inputs = [torch.randint(31, (2, 5)), torch.randint(31, (3, 7))]
    both_open, both_ran = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def run(model, ids):
        with torch.no_grad(), analysis.trace(model) as t:
            both_open.wait()
            for _ in range(3):
                model(ids)
            both_ran.wait()
        return t

    with ThreadPoolExecutor(2) as pool:
        traces = list(pool.map(run, models, inputs))
    for model, ids, t in zip(models, inputs, traces, strict=True):
        with torch.no_grad(), analysis.trace(model) as alone:
            model(ids)
        assert (t.runs, t.paths) == (3, alone.paths)
        for path in t.paths:
            torch.testing.assert_close(t.weights(path), alone.weights(path))


class CallsDuringRegistration(OrderedDict):
    """Calls a function in another thread after torch stored a hook and before it stored that the hook takes kwargs."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def __setitem__(self, key, value):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.call).result()
        super().__setitem__(key, value)


@pytest.mark.parametrize(
    "observe",
    [
        lambda model, x: analysis.trace(model, "output").__enter__().__exit__(None, None, None),
        lambda model, x: analysis.logit_lens(model, x),
    ],
    ids=["trace", "logit lens"],
)
def test_other_threads_run_while_hooks_are_registered(observe):
    model = decoder()
    ids = torch.randint(31, (1, 5))
    calls = []
    for hooks in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"):
        setattr(model, hooks, CallsDuringRegistration(lambda: calls.append(model(ids))))
    observe(model, ids)
    assert calls


def test_trace_records_modules_that_run_in_another_thread():
    """Modules that run in another thread than the one that opened the trace are recorded, too."""
    model, ids = SDPADecoder(), torch.randint(31, (2, 5))
    with torch.no_grad(), analysis.trace(model) as t:
        worker = threading.Thread(target=lambda: model(ids))
        worker.start()
        worker.join()
    assert t.runs == 1
    assert t.weights("").shape == (2, 6, 5, 5)


def test_trace_with_applied_mask_records_masked_weights():
    """In either order, the recorded weights are those of the call with the mask."""
    model, ids, mask = SDPADecoder(), torch.randint(31, (2, 9)), window(2, 0)
    for contexts in ("mask first", "trace first"):
        with torch.no_grad(), ExitStack() as stack:
            if contexts == "mask first":
                stack.enter_context(apply_mask(model, mask))
            t = stack.enter_context(analysis.trace(model))
            if contexts == "trace first":
                stack.enter_context(apply_mask(model, mask))
            model(ids)
        assert torch.equal(t.weights("") > 0, (causal() & mask).dense(9).expand(2, 6, 9, 9))
        assert t.difference("") <= t.tolerance("")


def test_trace_recovers_from_error_inside_model():
    model, other = decoder(), decoder()
    ids = torch.randint(31, (3, 7))
    with torch.no_grad(), analysis.trace(model) as fresh:
        model(ids)
    with torch.no_grad(), analysis.trace(model) as t:
        handle = model.blocks[1].norm2.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :4], cache=KVCache())
        handle.remove()
        other(ids)  # the traced model is not running any more
        model(ids)
    assert t.runs == 2
    torch.testing.assert_close(t.weights("blocks.1.attention"), fresh.weights("blocks.1.attention"))
    torch.testing.assert_close(
        t.weights("blocks.0.attention", run=0), fresh.weights("blocks.0.attention")[:, :, :4, :4]
    )
    assert t.paths == fresh.paths


def test_trace_finds_module_that_calls_attend():
    from clearhead.models import RecurrentSeq2Seq, RecurrentSeq2SeqConfig

    model = RecurrentSeq2Seq(RecurrentSeq2SeqConfig(vocab_size=13, d_model=10, n_layers=1)).eval()
    source, target = torch.randint(13, (2, 7)), torch.randint(13, (2, 5))
    with torch.no_grad(), analysis.trace(model) as t:
        assert t.paths == []
        model(source, target)
    assert t.paths == [""]
    assert t.weights("").shape == (2, 1, 5, 7)
    assert t.difference("") <= t.tolerance("")


def test_trace_ignores_attention_of_other_models():
    """Another model of the same class inside the `with` block is not recorded."""
    model, other = decoder(), decoder()
    ids = torch.randint(31, (3, 7))
    with torch.no_grad(), analysis.trace(model) as t:
        model(ids)
        other(ids)
        attention.attend(*(torch.randn(1, 2, 3, 4) for _ in range(3)))
        nn.functional.scaled_dot_product_attention(*(torch.randn(1, 2, 3, 4) for _ in range(3)))
    assert t.paths == ["blocks.0.attention", "blocks.1.attention"]
    assert t.runs == 1


def test_activation_checkpointing_is_one_run():
    """Recomputation in the backward pass is not another run, and interventions apply to it."""
    model = decoder()

    def run(*edits):
        model.zero_grad()
        x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with analysis.trace(model.blocks[0], "**.weights", "output") as t:
            for edit in edits:
                t.intervene("attention", edit)
            checkpoint(model.blocks[0], x, use_reentrant=False).sum().backward()
        return t, x.grad

    t, grad = run()
    assert (t.runs, len(t._runs_by_kind["output"][""])) == (1, 1)
    assert not torch.equal(grad, run(analysis.ZeroAblation(heads=[1]))[1])


def test_report_contains_implementation_difference_and_tolerance():
    model = decoder()
    model.blocks[0].attention.impl = "reference"
    with torch.no_grad(), analysis.trace(model) as t:
        model(torch.randint(31, (3, 7)))
    heading, first, second, last = t.report().splitlines()
    assert heading.split()[:2] == ["layer", "heads"]
    assert first.split()[:6] == ["blocks.0.attention", "6", "7", "×", "7", "attend,"]
    assert "reference" in first
    assert "sdpa" in second
    assert f"{t.difference('blocks.1.attention'):.1e}" in second
    assert f"{t.tolerance('blocks.1.attention'):.1e}" in second
    assert "recomputed" in last


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("blocks.*.attention", "blocks.11.attention", True),
        ("blocks.*", "blocks.0.attention", False),
        ("**", "blocks.0.attention", True),
        ("**.attention", "encoder.blocks.0.attention", True),
        ("**.attention", "attention", True),
        ("**.attention", "encoder.blocks.0.cross_attention", False),
        ("**.*attention", "encoder.blocks.0.cross_attention", True),
        ("blocks.[01]", "blocks.2", False),
        ("", "", True),
        ("*", "", False),
    ],
)
def test_path_matches_pattern(pattern, path, fits):
    assert path_matches(pattern, path) is fits


def test_module_named_output_precedes_suffix():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.output = nn.Linear(3, 5)

        def forward(self, x):
            return self.output(x).sum(-1)

    model = Inner()
    x = torch.randn(2, 7, 3)
    with torch.no_grad(), analysis.trace(model, "output") as t:
        model(x)
        assert torch.equal(t.output("output"), model.output(x))


def test_heatmap_draws_shades():
    attention_map = analysis.heatmap(
        torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.6, 0.2]]), ["Hola", "mundo"], ["Hello", "world", "."]
    )
    assert attention_map.splitlines() == ["      Hello world .", " Hola █████", "mundo ····· ▒▒▒▒▒ ··"]
