"""Generation from models, with and without the cache, compared with reference searches of each row alone."""

from __future__ import annotations

import pytest
import torch

from clearhead._core.counter_rng import uniform64
from clearhead.generation import BeamSearch, Greedy, Sample, generate, stream
from clearhead.generation.decoder import LengthBucketedDecoder
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.request import SearchRequest
from clearhead.generation.sampling import probabilities, sample_inverse_cdf
from clearhead.masks import window
from clearhead.nn.positions import ALiBi, LearnedPositions, RelativeBias, Rotary
from tests.generation.cases import DECODERS, ENCODER_DECODERS, STRATEGIES, assert_equal
from tests.generation.small import STOP, VOCAB, decoder, encoder_decoder, next_log_probs, prompts, randomize
from tests.generation.tables import plain_beam, plain_greedy

MAX_NEW_TOKENS = 13
MODELS = [("decoder", name) for name in DECODERS] + [("encoder-decoder", name) for name in ENCODER_DECODERS]


def build(kind, name):
    """Return a model, its prompts, and its start id if it is an encoder-decoder."""
    if kind == "decoder":
        return DECODERS[name](), prompts(VOCAB), None
    return ENCODER_DECODERS[name](), prompts(19), 4


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_batched_greedy_and_beam_equal_reference_search_of_each_row(kind, name):
    """The padded and cached batch is compared with one row at a time by the model's own forward."""
    model, rows, start = build(kind, name)
    greedy = generate(model, rows, max_new_tokens=MAX_NEW_TOKENS, stop_ids=STOP, decoder_start_ids=start)
    beam = generate(
        model,
        rows,
        strategy=BeamSearch(3, length_penalty=0.6),
        max_new_tokens=MAX_NEW_TOKENS,
        stop_ids=STOP,
        decoder_start_ids=start,
    )
    for row, prompt in enumerate(rows):
        logits = next_log_probs(model, prompt, start)
        start_ids = prompt.tolist() if start is None else [start]
        ids, log_probs = plain_greedy(logits, start_ids, max_new_tokens=MAX_NEW_TOKENS, stops=(STOP,))
        assert greedy.sequence(row, with_stop=True).tolist() == ids
        assert greedy.log_probs[row, 0, : len(ids)].tolist() == pytest.approx(log_probs)
        score, ids, ended = plain_beam(
            logits, start_ids, width=3, max_new_tokens=MAX_NEW_TOKENS, stops=(STOP,), alpha=0.6
        )[0]
        assert beam.sequence(row, with_stop=True).tolist() == ids
        assert float(beam.scores[row, 0]) == pytest.approx(score)
        assert bool(beam.finished[row, 0]) == ended


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_generate_with_cache_equals_generate_without(kind, name, strategy):
    model, rows, start = build(kind, name)
    with_cache, without = (
        generate(
            model,
            rows,
            strategy=strategy,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=STOP,
            decoder_start_ids=start,
            use_cache=use_cache,
        )
        for use_cache in (True, False)
    )
    assert_equal(with_cache, without)


@pytest.mark.parametrize("name", ["learned", "rotary", "every"])
def test_batched_sampling_equals_reference_sampling_of_each_row(name):
    """Row r at step t uses the uniform of the seed, t and r."""
    model, rows, _ = build("decoder", name)
    strategy = Sample(1.3, top_k=9, seed=11)
    result = generate(model, rows, strategy=strategy, max_new_tokens=MAX_NEW_TOKENS, stop_ids=STOP)
    uniform = torch.stack([uniform64(601, 11, t, torch.arange(len(rows))) for t in range(MAX_NEW_TOKENS)])
    for row, prompt in enumerate(rows):
        logits, new = next_log_probs(model, prompt), []
        while len(new) < MAX_NEW_TOKENS and STOP not in new:
            next_logits = logits(torch.tensor([[*prompt.tolist(), *new]]))
            new.append(int(sample_inverse_cdf(probabilities(next_logits, strategy), uniform[len(new), row, None])))
        assert result.sequence(row, with_stop=True).tolist() == new


@pytest.mark.parametrize(("kind", "name"), [("decoder", "rotary"), ("encoder-decoder", "rotary")])
def test_additional_prompts_do_not_change_samples(kind, name):
    model, rows, start = build(kind, name)
    strategy = Sample(1.3, seed=11)
    together = generate(model, rows, strategy=strategy, max_new_tokens=MAX_NEW_TOKENS, decoder_start_ids=start)
    for n in range(1, len(rows)):
        fewer = generate(model, rows[:n], strategy=strategy, max_new_tokens=MAX_NEW_TOKENS, decoder_start_ids=start)
        assert torch.equal(fewer.ids, together.ids[:n])


@pytest.mark.parametrize(
    ("kind", "name"), [("decoder", "learned"), ("decoder", "every"), ("encoder-decoder", "rotary")]
)
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda strategy: type(strategy).__name__)
def test_stream_yields_steps_of_generate(kind, name, strategy):
    model, rows, start = build(kind, name)
    whole = generate(
        model, rows, strategy=strategy, max_new_tokens=MAX_NEW_TOKENS, stop_ids=STOP, decoder_start_ids=start
    )
    steps = list(
        stream(model, rows, strategy=strategy, max_new_tokens=MAX_NEW_TOKENS, stop_ids=STOP, decoder_start_ids=start)
    )
    assert len(steps) == int(whole.lengths.max())
    for n, step in enumerate(steps):
        assert torch.equal(step.ids, whole.ids[:, 0, n])
        assert torch.equal(step.log_probs, whole.log_probs[:, 0, n])
        assert torch.equal(step.is_active, n < whole.lengths[:, 0])


def test_prompt_formats_are_equivalent():
    model = decoder()
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    expected = generate(model, ids, max_new_tokens=7)
    for same in ([[3, 1, 4], [1, 5, 9]], list(ids), ids.int(), [ids[0], (1, 5, 9)]):
        assert_equal(generate(model, same, max_new_tokens=7), expected)
    single = generate(model, ids[:1], max_new_tokens=7)
    for same in (ids[0], [3, 1, 4], [[3, 1, 4]]):
        assert_equal(generate(model, same, max_new_tokens=7), single)


def test_stop_ids_end_sequences():
    model, rows = decoder(), prompts(VOCAB)
    free = generate(model, rows, max_new_tokens=MAX_NEW_TOKENS)
    assert (free.lengths == MAX_NEW_TOKENS).all()
    assert not free.finished.any()
    stops = sorted({int(free.ids[0, 0, 2]), int(free.ids[1, 0, 4])})
    ended = generate(model, rows, max_new_tokens=MAX_NEW_TOKENS, stop_ids=stops)
    for row in range(len(rows)):
        ids = free.ids[row, 0].tolist()
        n = next((i + 1 for i, id_ in enumerate(ids) if id_ in stops), MAX_NEW_TOKENS)
        assert ended.sequence(row, with_stop=True).tolist() == ids[:n]
        assert bool(ended.finished[row, 0]) == (ids[n - 1] in stops)
    assert ended.finished.any()


def test_several_decoder_start_ids():
    model, rows = encoder_decoder(), prompts(19)
    result = generate(model, rows, max_new_tokens=7, decoder_start_ids=[4, 11, 2], strategy=BeamSearch(2))
    logits = next_log_probs(model, rows[2], start=4)
    expected = plain_beam(logits, [4, 11, 2], width=2, max_new_tokens=7, stops=(), alpha=1.0)[0]
    assert result.sequence(2).tolist() == expected[1]


@pytest.mark.parametrize(
    ("name", "grouped"),
    [("learned", False), ("window", False), ("every", True), ("blocks", True), ("prefix", True)],
)
def test_prompts_are_bucketed_by_length_only_if_mask_requires(name, grouped):
    model, rows, _ = build("decoder", name)
    request = SearchRequest.of(None, 5, None, engine="module")
    decoder_ = incremental_decoder(model, rows, request)
    assert isinstance(decoder_, LengthBucketedDecoder) == grouped
    same_length = incremental_decoder(model, [row[:1] for row in rows], request)
    assert not isinstance(same_length, LengthBucketedDecoder)


def count_tokens(model, run):
    """Return the number of ids of each call of the embedding."""
    counts = []
    handle = model.embedding.register_forward_hook(lambda _, args, __: counts.append(args[0].numel()))
    run()
    handle.remove()
    return counts


def test_cached_step_embeds_one_id():
    model = decoder()
    prompt = torch.randint(VOCAB, (1, 17))
    assert count_tokens(model, lambda: generate(model, prompt, max_new_tokens=11)) == [17] + [1] * 10
    without = count_tokens(model, lambda: generate(model, prompt, max_new_tokens=11, use_cache=False))
    assert without == list(range(17, 28))


def test_finished_rows_leave_the_batch():
    # At this temperature rows differ soon.
    model, rows, strategy = (
        decoder(),
        prompts(VOCAB),
        Sample(temperature=3.0, seed=5),
    )
    free = generate(model, rows, strategy=strategy, max_new_tokens=29).ids[:, 0]
    # Stop at the second ids of four of the six rows.
    stops = {int(free[row, 1]) for row in range(4)}
    result = generate(model, rows, strategy=strategy, max_new_tokens=29, stop_ids=sorted(stops))
    counts = count_tokens(
        model, lambda: generate(model, rows, strategy=strategy, max_new_tokens=29, stop_ids=sorted(stops))
    )
    assert counts[0] == 6 * 11
    assert min(counts) < 6
    assert sum(counts[1:]) >= int((result.lengths - 1).sum())  # no row was dropped too soon


def test_noncausal_mask_disables_cache():
    """If a token attends to later keys, its outputs change at every step, so the cache is not used."""
    model = decoder(mask=window(3, 1))
    assert count_tokens(model, lambda: generate(model, [1, 2, 3], max_new_tokens=4)) == [3, 4, 5, 6]


@pytest.mark.compiled
def test_compiled_model_generates_same_ids():
    model = decoder().float().eval()
    compiled = torch.compile(model, backend="eager")
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    assert torch.equal(generate(compiled, ids, max_new_tokens=5).ids, generate(model, ids, max_new_tokens=5).ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models_score_in_float32(dtype):
    model = decoder().to(dtype)
    result = generate(model, prompts(VOCAB), strategy=BeamSearch(3), max_new_tokens=5, stop_ids=STOP)
    assert result.log_probs.dtype == result.scores.dtype == torch.float32
    assert result.log_probs.isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda strategy: type(strategy).__name__)
def test_sliding_context_uses_last_ids_that_fit(strategy):
    torch.manual_seed(3)
    model = randomize(decoder().config.replace(positions=LearnedPositions(max_len=11), max_len=11).build())
    rows = prompts(VOCAB, (5, 2, 14))
    result = generate(model, rows, strategy=strategy, max_new_tokens=17, sliding_context=True)
    uniform = torch.stack([uniform64(601, 2, t, torch.arange(len(rows))) for t in range(17)])
    for row, prompt in enumerate(rows):
        ids = prompt.tolist()
        for t in range(17):
            with torch.no_grad():
                logits = model.eval()(torch.tensor([ids[-11:]]))[:, -1]
            greedy = int(logits.argmax())
            ids.append(
                greedy
                if strategy == Greedy()
                else int(sample_inverse_cdf(probabilities(logits, strategy), uniform[t, row, None]))
            )
        assert result.sequence(row).tolist() == ids[len(prompt) :]


def test_sliding_context_changes_nothing_if_everything_fits():
    for model in (decoder(), decoder(positions=Rotary())):
        rows = prompts(VOCAB)
        assert_equal(
            generate(model, rows, max_new_tokens=9, sliding_context=True), generate(model, rows, max_new_tokens=9)
        )


def test_positions_without_table_extend_beyond_trained_length():
    for positions in (Rotary(), ALiBi(), RelativeBias(bidirectional=False)):
        model = decoder(positions=positions, max_len=8)
        assert_equal(
            generate(model, prompts(VOCAB), max_new_tokens=19),
            generate(model, prompts(VOCAB), max_new_tokens=19, use_cache=False),
        )
