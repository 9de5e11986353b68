"""Generation from models: each row as if it were alone, with and without the cache, against plain searches."""

from __future__ import annotations

import pytest
import torch

from clearhead.data.draws import uniform64
from clearhead.generation import Beam, Greedy, Sample, generate, stream
from clearhead.generation.adapters import stepper_for
from clearhead.generation.pick import draw, probabilities
from clearhead.generation.stepper import Grouped
from clearhead.masks import blocks, causal, dilated, every, prefix, scattered, window
from clearhead.models.recurrent import GRU, LSTM, NextToken, RecurrentConfig
from clearhead.models.recurrent_seq2seq import AfterStep, BeforeStep, RecurrentSeq2SeqConfig
from clearhead.positions import ALiBi, Learned, NoPositions, RelativeBias, Rotary, Sinusoidal
from tests.generation.small import STOP, VOCAB, decoder, encoder_decoder, lively, next_log_probs, prompts
from tests.generation.tables import plain_beam, plain_greedy

STRATEGIES = [Greedy(), Sample(1.2, top_k=11, top_p=0.95, min_p=0.01, seed=2), Beam(3, n_best=2)]
MAX_NEW = 13


def recurrent(cell=None):
    torch.manual_seed(7)
    cell = LSTM() if cell is None else cell
    config = RecurrentConfig(vocab_size=VOCAB, d_model=11, n_layers=2, cell=cell, task=NextToken())
    return lively(config.build())


def seq2seq(attention):
    torch.manual_seed(9)
    config = RecurrentSeq2SeqConfig(source_vocab_size=19, vocab_size=VOCAB, d_model=11, attention=attention)
    return lively(config.build())


CONTINUING = {
    "learned": lambda: decoder(positions=Learned(max_len=61)),
    "sinusoidal": lambda: decoder(positions=Sinusoidal()),
    "rotary": lambda: decoder(positions=Rotary()),
    "alibi": lambda: decoder(positions=ALiBi()),
    "relative": lambda: decoder(positions=RelativeBias(bidirectional=False)),
    "none": lambda: decoder(positions=NoPositions()),
    "grouped-query": lambda: decoder(n_heads=4, n_kv_heads=2, tie_embeddings=False),
    "window": lambda: decoder(mask=causal() & (window(3, 0) | dilated(5))),
    "every": lambda: decoder(mask=causal() & (window(2, 0) | every(4))),
    "blocks": lambda: decoder(mask=causal() & blocks(5)),
    "prefix": lambda: decoder(mask=causal() | prefix(4)),
    "ahead": lambda: decoder(mask=window(3, 1)),
    "lstm": recurrent,
    "gru": lambda: recurrent(GRU()),
}
READING = {
    "sinusoidal": encoder_decoder,
    "learned": lambda: encoder_decoder(positions=Learned(max_len=61), max_len=61),
    "rotary": lambda: encoder_decoder(positions=Rotary()),
    "scattered": lambda: encoder_decoder(encoder_mask=scattered(3, seed=1) | window(1, 1)),
    "after-step": lambda: seq2seq(AfterStep()),
    "before-step": lambda: seq2seq(BeforeStep()),
}
MODELS = [("continue", name) for name in CONTINUING] + [("read", name) for name in READING]


def build(kind, name):
    """A model, its prompts, and how to call it: a start where it reads."""
    if kind == "continue":
        return CONTINUING[name](), prompts(VOCAB), None
    return READING[name](), prompts(19), 4


def assert_equal(a, b):
    assert torch.equal(a.lengths, b.lengths)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.finished, b.finished)
    torch.testing.assert_close(a.log_probs, b.log_probs)
    torch.testing.assert_close(a.scores, b.scores)


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_greedy_and_beam_are_the_plain_searches_of_each_row(kind, name):
    """The whole batch at once, padded and cached, against one row at a time by the model's own forward."""
    model, rows, start = build(kind, name)
    greedy = generate(model, rows, max_new=MAX_NEW, stop=STOP, start=start)
    beam = generate(model, rows, how=Beam(3, length_penalty=0.6), max_new=MAX_NEW, stop=STOP, start=start)
    for row, prompt in enumerate(rows):
        logits = next_log_probs(model, prompt, start)
        begun = prompt.tolist() if start is None else [start]
        ids, log_probs = plain_greedy(logits, begun, max_new=MAX_NEW, stops=(STOP,))
        assert greedy.sequence(row, with_stop=True).tolist() == ids
        assert greedy.log_probs[row, 0, : len(ids)].tolist() == pytest.approx(log_probs)
        score, ids, ended = plain_beam(logits, begun, width=3, max_new=MAX_NEW, stops=(STOP,), alpha=0.6)[0]
        assert beam.sequence(row, with_stop=True).tolist() == ids
        assert float(beam.scores[row, 0]) == pytest.approx(score)
        assert bool(beam.finished[row, 0]) == ended


@pytest.mark.parametrize("how", STRATEGIES, ids=lambda how: type(how).__name__)
@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_with_and_without_the_cache(kind, name, how):
    model, rows, start = build(kind, name)
    with_cache, without = (
        generate(model, rows, how=how, max_new=MAX_NEW, stop=STOP, start=start, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert_equal(with_cache, without)


@pytest.mark.parametrize("name", ["learned", "rotary", "every"])
def test_sampling_is_the_plain_one_of_each_row(name):
    """Row r at step t draws by the uniform number of the seed, t and r."""
    model, rows, _ = build("continue", name)
    how = Sample(1.3, top_k=9, seed=11)
    result = generate(model, rows, how=how, max_new=MAX_NEW, stop=STOP)
    uniform = torch.stack([uniform64(601, 11, t, torch.arange(len(rows))) for t in range(MAX_NEW)])
    for row, prompt in enumerate(rows):
        logits, new = next_log_probs(model, prompt), []
        while len(new) < MAX_NEW and STOP not in new:
            here = logits(torch.tensor([[*prompt.tolist(), *new]]))
            new.append(int(draw(probabilities(here, how), uniform[len(new), row, None])))
        assert result.sequence(row, with_stop=True).tolist() == new


@pytest.mark.parametrize(("kind", "name"), [("continue", "rotary"), ("read", "rotary")])
def test_more_prompts_change_no_row_of_a_sample(kind, name):
    model, rows, start = build(kind, name)
    how = Sample(1.3, seed=11)
    together = generate(model, rows, how=how, max_new=MAX_NEW, start=start)
    for n in range(1, len(rows)):
        fewer = generate(model, rows[:n], how=how, max_new=MAX_NEW, start=start)
        assert torch.equal(fewer.ids, together.ids[:n])


@pytest.mark.parametrize(("kind", "name"), [("continue", "learned"), ("continue", "every"), ("read", "rotary")])
@pytest.mark.parametrize("how", STRATEGIES[:2], ids=lambda how: type(how).__name__)
def test_a_stream_is_the_same_step_by_step(kind, name, how):
    model, rows, start = build(kind, name)
    whole = generate(model, rows, how=how, max_new=MAX_NEW, stop=STOP, start=start)
    steps = list(stream(model, rows, how=how, max_new=MAX_NEW, stop=STOP, start=start))
    assert len(steps) == int(whole.lengths.max())
    for n, step in enumerate(steps):
        assert torch.equal(step.ids, whole.ids[:, 0, n])
        assert torch.equal(step.log_probs, whole.log_probs[:, 0, n])
        assert torch.equal(step.running, n < whole.lengths[:, 0])


def test_forms_of_a_prompt_mean_the_same():
    model = decoder()
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    one = generate(model, ids, max_new=7)
    for same in ([[3, 1, 4], [1, 5, 9]], list(ids), ids.int(), [ids[0], (1, 5, 9)]):
        assert_equal(generate(model, same, max_new=7), one)
    single = generate(model, ids[:1], max_new=7)
    for same in (ids[0], [3, 1, 4], [[3, 1, 4]]):
        assert_equal(generate(model, same, max_new=7), single)


def test_several_stops_and_none():
    model, rows = decoder(), prompts(VOCAB)
    free = generate(model, rows, max_new=MAX_NEW)
    assert (free.lengths == MAX_NEW).all()
    assert not free.finished.any()
    stops = sorted({int(free.ids[0, 0, 2]), int(free.ids[1, 0, 4])})
    ended = generate(model, rows, max_new=MAX_NEW, stop=stops)
    for row in range(len(rows)):
        ids = free.ids[row, 0].tolist()
        n = next((i + 1 for i, id_ in enumerate(ids) if id_ in stops), MAX_NEW)
        assert ended.sequence(row, with_stop=True).tolist() == ids[:n]
        assert bool(ended.finished[row, 0]) == (ids[n - 1] in stops)
    assert ended.finished.any()


def test_a_start_of_several_ids():
    model, rows = encoder_decoder(), prompts(19)
    result = generate(model, rows, max_new=7, start=[4, 11, 2], how=Beam(2))
    logits = next_log_probs(model, rows[2], start=4)
    expected = plain_beam(logits, [4, 11, 2], width=2, max_new=7, stops=(), alpha=1.0)[0]
    assert result.sequence(2).tolist() == expected[1]


@pytest.mark.parametrize(
    ("name", "grouped"),
    [("learned", False), ("window", False), ("every", True), ("blocks", True), ("prefix", True)],
)
def test_prompts_share_a_batch_where_the_pattern_permits(name, grouped):
    model, rows, _ = build("continue", name)
    stepper = stepper_for(model, rows, start=None, max_new=5, use_cache=True)
    assert isinstance(stepper, Grouped) == grouped
    alike = stepper_for(model, [row[:1] for row in rows], start=None, max_new=5, use_cache=True)
    assert not isinstance(alike, Grouped)


def count_tokens(model, run):
    """How many ids the model's embedding was asked for."""
    seen = []
    handle = model.embedding.register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    run()
    handle.remove()
    return seen


def test_a_cached_step_reads_one_id():
    model = decoder()
    prompt = torch.randint(VOCAB, (1, 17))
    assert count_tokens(model, lambda: generate(model, prompt, max_new=11)) == [17] + [1] * 10
    without = count_tokens(model, lambda: generate(model, prompt, max_new=11, use_cache=False))
    assert without == list(range(17, 28))


def test_rows_that_ended_leave_the_batch():
    model, rows, how = decoder(), prompts(VOCAB), Sample(temperature=3.0, seed=5)  # no two rows say the same for long
    free = generate(model, rows, how=how, max_new=29).ids[:, 0]
    # Stop on what four of the six rows say soon.
    stops = {int(free[row, 1]) for row in range(4)}
    result = generate(model, rows, how=how, max_new=29, stop=sorted(stops))
    seen = count_tokens(model, lambda: generate(model, rows, how=how, max_new=29, stop=sorted(stops)))
    assert seen[0] == 6 * 11
    assert min(seen) < 6
    assert sum(seen[1:]) >= int((result.lengths - 1).sum())  # nobody was dropped too soon


def test_a_bidirectional_pattern_is_recomputed():
    """Where a token's keys come after it, its values change with every step: the cache is not used, whatever
    was asked."""
    model = decoder(mask=window(3, 1))
    assert count_tokens(model, lambda: generate(model, [1, 2, 3], max_new=4)) == [3, 4, 5, 6]


@pytest.mark.compiled
def test_a_compiled_model():
    model = decoder().float().eval()
    compiled = torch.compile(model, backend="eager")
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    assert torch.equal(generate(compiled, ids, max_new=5).ids, generate(model, ids, max_new=5).ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_score_in_float32(dtype):
    model = decoder().to(dtype)
    result = generate(model, prompts(VOCAB), how=Beam(3), max_new=5, stop=STOP)
    assert result.log_probs.dtype == result.scores.dtype == torch.float32
    assert result.log_probs.isfinite().all()


@pytest.mark.parametrize("how", STRATEGIES[:2], ids=lambda how: type(how).__name__)
def test_sliding_reads_the_last_ids_that_there_are_positions_for(how):
    torch.manual_seed(3)
    model = lively(decoder().config.replace(positions=Learned(max_len=11), max_len=11).build())
    rows = prompts(VOCAB, (5, 2, 14))
    result = generate(model, rows, how=how, max_new=17, slide=True)
    uniform = torch.stack([uniform64(601, 2, t, torch.arange(len(rows))) for t in range(17)])
    for row, prompt in enumerate(rows):
        ids = prompt.tolist()
        for t in range(17):
            with torch.no_grad():
                logits = model.eval()(torch.tensor([ids[-11:]]))[:, -1]
            greedy = int(logits.argmax())
            ids.append(greedy if how == Greedy() else int(draw(probabilities(logits, how), uniform[t, row, None])))
        assert result.sequence(row).tolist() == ids[len(prompt) :]


def test_sliding_changes_nothing_where_everything_fits():
    for model in (decoder(), decoder(positions=Rotary())):
        rows = prompts(VOCAB)
        assert_equal(generate(model, rows, max_new=9, slide=True), generate(model, rows, max_new=9))


def test_positions_without_a_table_go_on_beyond_the_trained_length():
    for positions in (Rotary(), ALiBi(), RelativeBias(bidirectional=False)):
        model = decoder(positions=positions, max_len=8)
        assert_equal(
            generate(model, prompts(VOCAB), max_new=19),
            generate(model, prompts(VOCAB), max_new=19, use_cache=False),
        )
