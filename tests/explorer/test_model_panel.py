"""Runs, changes and drawings against the model itself, called directly."""

from __future__ import annotations

import base64
import contextlib
import io
import math

import pytest
import torch

from clearhead import analysis, hub
from clearhead.generation import BeamSearch, generate

PICTURE = torch.zeros(32, 32, dtype=torch.uint8)
PICTURE[6:26, 15:18] = 240
PIXELS = base64.b64encode(PICTURE.numpy().tobytes()).decode()


@pytest.fixture(scope="module")
def sorter():
    return hub.pipeline("sort-dedup")


@pytest.fixture(scope="module")
def translator():
    return hub.pipeline("en-es")


@torch.no_grad()
def test_what_comes_next(page, sorter):
    found = page.post("step", {"model": "sort-dedup", "text": "D A C", "temperature": 0.5, "top_k": 3, "seed": 4})
    ids = [*sorter.tokenizer.encode("D A C"), sorter.tokenizer.bos_id]
    assert found["ids"] == ids
    logits = sorter.model(torch.tensor([ids]))[0, -1].double()
    raw = logits.softmax(-1)
    kept = logits.masked_fill(logits < logits.topk(3).values[-1], -math.inf)
    expected = (kept / 0.5).softmax(-1)
    for one in found["next"]:
        assert one["raw"] == pytest.approx(float(raw[one["id"]]), abs=1e-6)
        assert one["p"] == pytest.approx(float(expected[one["id"]]), abs=1e-6)
    assert found["kept"] == 3
    assert found["taken"]["id"] in [one["id"] for one in found["next"][:3]]
    # Writing step by step is greedy generation, and the end is said.
    written: list[int] = []
    while True:
        ask = {"model": "sort-dedup", "text": "D A C", "written": written, "temperature": 0}
        found = page.post("step", ask)
        written.append(found["taken"]["id"])
        if found["ends"]:
            break
    made = generate(sorter.model, torch.tensor([ids]), stop_ids=sorter.tokenizer.eos_id, max_new_tokens=20)
    assert written == made.sequence(0, with_stop=True).tolist()
    assert found["text"] == sorter.tokenizer.decode(made.sequence(0))


@torch.no_grad()
def test_a_translator_reads_and_writes(page, translator):
    made = hub.translations(translator, ["How are you?"])[0]
    written = list(made.written[:2])
    found = page.post("step", {"model": "en-es", "text": "How are you?", "written": written})
    assert found["source"] == translator.tokenizer.tokens(made.read)
    logits = translator.model(torch.tensor([made.read]), torch.tensor([[translator.tokenizer.bos_id, *written]]))
    chances = logits[0, -1].double().softmax(-1)
    assert found["next"][0]["raw"] == pytest.approx(float(chances.max()), abs=1e-5)


def test_the_attention_of_look(page, sorter):
    found = page.post("attention", {"model": "sort-dedup", "text": "D A C"})
    direct = analysis.attention_report(sorter, "D A C")
    assert found["texts"][0] == list(direct.maps[0].rows)
    assert [one["path"] for one in found["maps"]] == [one.path for one in direct.maps]
    whole = page.post("page", {"model": "sort-dedup", "text": "D A C"})["html"]
    assert whole.startswith("<!doctype html>")
    assert "D A C" in whole


def test_stations(page, sorter):
    found = page.post("walk", {"model": "sort-dedup", "text": "D A C"})
    direct = analysis.build_walkthrough(sorter, "D A C").to_dict()
    assert [one["role"] for one in found["steps"]] == [one["role"] for one in direct["steps"]]
    assert [one["token"]["token"] for one in found["predictions"]] == ["A", "C", "D", "<STOP>"]
    drawn = page.post("walk", {"model": "digits-vit", "pixels": PIXELS})
    assert drawn["kind"] == "VisionTransformer"


def test_beams(page, translator):
    found = page.post("beams", {"model": "en-es", "text": "The house is red.", "width": 3, "max_new_tokens": 10})
    ids = page.post("step", {"model": "en-es", "text": "The house is red."})
    read = hub.translations(translator, ["The house is red."])[0].read
    assert len(ids["source"]) == len(read)
    made = generate(
        translator.model,
        torch.tensor([read]),
        decoder_start_ids=translator.tokenizer.bos_id,
        stop_ids=translator.tokenizer.eos_id,
        strategy=BeamSearch(3, n_best=3),
        max_new_tokens=10,
    )
    for rank, one in enumerate(found["found"]):
        path = [found["nodes"][i]["id"] for i in one["path"]]
        assert path == made.sequence(0, rank, with_stop=True).tolist()
        assert one["score"] == pytest.approx(float(made.scores[0, rank]), abs=1e-5)
        chances = [found["nodes"][i]["log_p"] for i in one["path"]]
        assert sum(chances) / len(chances) == pytest.approx(one["score"], abs=1e-4)
    for i, node in enumerate(found["nodes"]):
        assert node["above"] is None or node["above"] < i


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({}, False),
        ({"edits": [{"path": "blocks.1.attention", "heads": [0, 2]}]}, True),
        ({"edits": [{"path": "blocks.0.attention", "heads": [1], "how": "scale", "by": 1.0}]}, False),
        ({"edits": [{"path": "blocks.2.feed_forward", "how": "scale", "by": -0.5}]}, True),
        ({"edits": [{"path": "blocks.1", "how": "patch", "positions": [2]}], "other": "A A A A"}, True),
        ({"edits": [{"path": "blocks.1.attention", "heads": [3], "how": "patch"}], "other": "D A C B"}, False),
        ({"mask": "causal() & window(1, 0)"}, True),
        ({"temperature": 4.0}, True),
        ({"forced": 1, "token": "E"}, True),
    ],
)
def test_a_change_and_the_python_that_does_the_same(page, change, moves):
    ask = {"model": "sort-dedup", "text": "D A C B", **change}
    found = page.post("change", ask)
    assert "error" not in found, found
    assert (found["moved"]["logits"]["kl_largest"] > 1e-9) is moves
    out = io.StringIO()
    names: dict = {}
    with contextlib.redirect_stdout(out):
        exec(found["python"], names)
    chances = names["after"].output("")[0, -1].double().softmax(-1)
    for one in found["after"]["next"]:
        assert one["p"] == pytest.approx(float(chances[one["id"]]), abs=1e-6)
    plain = names["before"].output("")[0, -1].double().softmax(-1)
    assert found["before"]["next"][0]["p"] == pytest.approx(float(plain.max()), abs=1e-6)
    weights = names["after"].weights(found["after"]["path"])[0].mean(0)
    shades = torch.tensor(found["after"]["weights"]) / 255
    torch.testing.assert_close(shades**2, weights.float(), atol=0.006, rtol=0)


def test_a_change_leaves_the_model_as_it_was(page):
    ask = {"model": "sort-dedup", "text": "D A C B"}
    before = page.post("step", ask)
    page.post("change", ask | {"temperature": 9.0, "mask": "full()", "edits": [{"path": "blocks.0"}]})
    assert page.post("change", ask | {"mask": "window(0,"})["error"]
    assert page.post("step", ask) == before


@pytest.mark.parametrize(
    ("action", "ask", "says"),
    [
        ("step", {"model": "shakespeare", "text": "x"}, "unknown model 'shakespeare'"),
        ("step", {"model": "../../etc", "text": "x"}, "unknown model"),
        ("step", {"model": "sort-dedup", "text": " "}, "nothing to read"),
        ("step", {"model": "sort-dedup", "text": "A", "written": [99999]}, "beyond the vocabulary"),
        ("step", {"model": "sort-dedup", "text": "A " * 500}, "shorten it"),
        ("step", {"model": "sort-dedup", "text": "A", "temperature": -1}, "at least 0"),
        ("beams", {"model": "sort-dedup", "text": "A", "width": 99}, "at most 8"),
        ("walk", {"model": "digits-vit", "pixels": "AAAA"}, "expected 32 × 32"),
        ("digit", {"pixels": "ü"}, "expected 32 × 32"),
        ("change", {"model": "sort-dedup", "text": "A B", "edits": [{"path": "blocks.9"}]}, "there is no module"),
        ("change", {"model": "sort-dedup", "text": "A B", "edits": [{"path": "blocks.0", "heads": [1]}]}, "no heads"),
        ("change", {"model": "sort-dedup", "text": "A B", "forced": 0, "token": "A B"}, "exactly one"),
        (
            "change",
            {"model": "sort-dedup", "text": "A B", "edits": [{"path": "blocks.0", "how": "patch"}], "other": "A B C D"},
            "make them as long",
        ),
    ],
)
def test_what_is_refused(page, action, ask, says):
    assert says in page.post(action, ask)["error"]


def test_a_drawing(page):
    found = page.post("digit", {"pixels": PIXELS})["models"]
    assert [one["name"] for one in found] == ["digits-vit", "digits-conv"]
    for one in found:
        trained = hub.pipeline(one["name"])
        direct = trained.model(analysis.trained.prepare(PICTURE[None], trained.recipe.data.normalize))[0]
        assert one["chances"] == pytest.approx(direct.softmax(-1).tolist(), abs=1e-5)
        assert max(map(max, one["counts"])) == 255
    assert len(found[0]["attended"]) == 8
    assert found[1]["attended"] is None


HUGE = 10**40


@pytest.mark.parametrize(
    ("action", "request_"),
    [
        ("step", {"model": "sort-dedup", "text": "A B", "seed": HUGE}),
        ("step", {"model": "sort-dedup", "text": "A B", "seed": (1 << 64) - 1}),
        ("step", {"model": "sort-dedup", "text": "A B", "top_k": HUGE, "seed": 1}),
        ("step", {"model": "sort-dedup", "text": "A B", "written": [HUGE]}),
        ("step", {"model": "sort-dedup", "text": "A B", "temperature": HUGE}),
        ("beams", {"model": "sort-dedup", "text": "A B", "max_new_tokens": HUGE}),
        ("beams", {"model": "sort-dedup", "text": "A B", "length_penalty": HUGE}),
        ("change", {"model": "sort-dedup", "text": "A B", "forced": HUGE, "token": "C"}),
        ("change", {"model": "sort-dedup", "text": "A B", "head": HUGE}),
        ("change", {"model": "sort-dedup", "text": "A B", "edits": [{"path": "blocks.0", "positions": [HUGE]}]}),
        ("change", {"model": "sort-dedup", "text": "A B", "edits": [{"path": "blocks.0.attention", "heads": [HUGE]}]}),
        ("change", {"model": "sort-dedup", "text": "A B", "mask": f"window({HUGE}, 0)"}),
        ("mask", {"expression": f"causal() & every({HUGE})", "n": 16}),
        ("mask", {"expression": "causal()", "n": 16, "offset": HUGE}),
        ("hand", {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], "order": [0, 1, HUGE]}),
        ("hand", {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], "key": HUGE}),
        ("hand", {"vectors": [["1", "0"], ["0", "1"], ["1", str(HUGE)]]}),
        ("cost", {"tokens": HUGE}),
        ("fits", {"memory": HUGE}),
        ("claim", {"name": "score-mean", "seed": HUGE}),
        ("sheet", {"name": "sort-dedup-softmax", "seed": HUGE}),
    ],
)
def test_huge_integers_are_accepted_or_rejected_with_one_sentence(page, request_, action):
    result = page.post(action, request_)
    if "error" in result:
        assert "the request failed" not in result["error"]
        assert len(result["error"]) < 300
