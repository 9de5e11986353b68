"""Two runs side by side, the film of a training run, and the way from a question about a head to a saved page."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.explorer.conftest import serving
from tests.support.browser import BROWSER
from tests.support.browser_tab import Tab
from tests.support.training_run import train_letters

pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]

RECORD_STATES = """() => {
  window.states = [];
  new MutationObserver(() => states.push(document.documentElement.dataset.ready))
    .observe(document.documentElement, { attributeFilter: ["data-ready"] });
}"""


@pytest.fixture
def run_tab(chromium, run_page):
    """A tab of an explorer that was started with the folder of a training run."""
    browser_tab = Tab(chromium, run_page)
    yield browser_tab
    browser_tab.context.close()
    assert browser_tab.problems == []


def test_coffee_can_be_followed_switched_off_and_exported_in_six_clicks(tab):
    """Which head moves "coffee" to "café"? What does the model write without it? Save the answer as a page."""
    clicks = []

    def click(locator):
        clicks.append(locator)
        locator.click()

    tab.open("model?model=en-es")
    click(tab.page.locator("#tabs a", has_text="Tour"))
    tab.ready("tour 7")
    click(tab.page.get_by_role("button", name="I would like a cup of coffee"))
    tab.page.wait_for_selector(".answer-output:has-text('café')")
    click(tab.page.locator(".answer-output .tok", has_text="café"))
    tab.page.wait_for_selector(".tour-list p:has-text('weight on “coffee”')")
    assert tab.page.locator(".tour-list p", has_text="% of what it adds comes from “coffee”").count() == 1
    sentence = tab.page.locator(".tour-list p", has_text="weight on “coffee”").inner_text()
    assert re.search(r"To write “café”, cross-attention head \d\.\d puts", sentence)
    click(tab.page.locator(".tour-list li").last.get_by_role("link"))
    tab.page.wait_for_selector("html[data-map]")
    assert tab.page.locator(".heat td.edited").count() == 1
    head = tab.page.locator(".heat td.edited button").get_attribute("aria-label")
    assert re.match(r"decoder\.blocks\.\d\.\w+(, head \d)?: zero ablation", head)
    tab.page.wait_for_selector(".now-writes:has-text('writes')")
    strongest = tab.page.locator("[aria-label='decoder.blocks.2.cross_attention, head 3']")
    click(strongest)
    tab.page.wait_for_selector(".python:has-text('decoder.blocks.2.cross_attention')")
    clicks.append("save")
    saved = tab.download(tab.page.get_by_role("button", name="Save as one page")).decode()
    assert len(clicks) == 6
    assert saved.startswith("<!doctype html>")
    assert "café" in saved
    assert "<script" not in saved
    assert 'src="http' not in saved
    saved_page = tab.context.new_page()  # the saved page draws without the server
    saved_page.set_content(saved)
    assert saved_page.locator(".heat").first.bounding_box()["width"] > 200
    assert saved_page.locator(".now-writes").inner_text().startswith(("still writes", "now writes"))


def test_question_about_a_token_leads_to_the_head_and_its_ablation_in_four_clicks(tab):
    tab.open("model?model=en-es")
    tab.wait_for_view("attention")
    tab.page.locator(".answer-output .tok", has_text="café").click()
    tab.page.get_by_role("link", name="Why “café”?").click()
    step = tab.page.locator(".tour-list li", has_text="weight on “coffee”")
    step.get_by_role("link", name="Switch it off").click()
    tab.page.wait_for_selector(".heat td.edited")
    tab.page.wait_for_selector(".now-writes:has-text('writes')")
    assert b"<script" not in tab.download(tab.page.get_by_role("button", name="Save as one page"))


def test_run_panel_leads_to_the_intervention_of_its_head(tab):
    tab.open("model?model=en-es&text=I+would+like+a+cup+of+coffee%2C+please.")
    tab.wait_for_view("attention")
    tab.page.locator(".answer-output .tok", has_text="café").click()
    tab.page.wait_for_selector("#detail .of:has-text('café')")
    tab.page.locator(".thumb[title*='layer 3, head 1']").last.click()
    tab.page.wait_for_selector("#where:has-text('layer 3, head 1')")
    tab.page.get_by_role("link", name="Switch this head off").click()
    tab.page.wait_for_selector("[aria-label='decoder.blocks.3.cross_attention, head 1: zero ablation']")
    tab.page.wait_for_selector(".side .probabilities caption:has-text('Output token 5')")


@pytest.mark.parametrize("view", ["outputs", "attention", "lens", "streams", "ablations"])
def test_comparison_shows_a_difference_in_every_view(tab, view):
    tab.open(f"comparison?model=sort-dedup&text=D+A+C&text2=D+A+B&view={view}")
    tab.wait_for_view(view)
    assert tab.page.locator(".compared .answer-output").nth(0).inner_text().startswith("A C D")
    assert tab.page.locator(".compared .answer-output").nth(1).inner_text().startswith("A B D")
    assert tab.page.get_by_text(re.compile("difference", re.IGNORECASE)).count() > 0
    assert tab.page.locator(".comparison .heat").count() > 0


def test_comparison_selects_the_first_token_that_differs(tab):
    tab.open("comparison?model=sort-dedup&text=D+A+C&text2=D+A+B&view=outputs")
    tab.wait_for_view("outputs")
    pressed = tab.page.locator(".answer-output .tok[aria-pressed=true]").all_inner_texts()
    assert pressed == ["C", "B"]


def test_comparison_address_holds_the_state(tab):
    tab.open("comparison?model=sort-dedup")
    tab.wait_for_view("attention")  # two texts that differ by a letter
    tab.page.get_by_label("Second text").fill("D A A C Z A")
    tab.page.wait_for_selector(".compared .answer-output:has-text('Z')")
    tab.page.get_by_role("button", name="blocks.0.attention, head 1").click()
    tab.page.wait_for_selector(".where:has-text('block 0, self-attention, head 1')")
    address = tab.hash
    tab.open(address)
    tab.page.wait_for_selector(".where:has-text('block 0, self-attention, head 1')")
    assert tab.page.get_by_label("Second text").input_value() == "D A A C Z A"
    tab.page.get_by_label("Second text").fill("D A A C B A")
    tab.page.get_by_label("Text", exact=True).fill("D A A C B A")
    tab.page.wait_for_selector(".pane[data-state=empty]:has-text('Both runs are the same')")


def test_training_film_shows_every_checkpoint(run_tab):
    run_tab.open("training?text=D+A+C")
    assert run_tab.ready("training") == "training 12"
    assert run_tab.page.locator(".loss circle").count() == 4
    run_tab.page.evaluate(RECORD_STATES)
    run_tab.page.get_by_role("button", name="Play", exact=False).last.click()
    run_tab.page.wait_for_function("() => states.includes('training 12')")
    assert run_tab.page.evaluate("states") == ["training 3", "training 6", "training 9", "training 12"]
    run_tab.page.get_by_label("Checkpoint").fill("1")
    run_tab.ready("training 6")
    assert "at=6" in run_tab.hash
    run_tab.page.locator(".film-head").nth(1).click()
    run_tab.page.wait_for_selector(".film-head[aria-pressed=true] >> nth=0")
    assert "map=blocks.0.attention%3A1" in run_tab.hash
    assert run_tab.page.locator(".training .heat.words").count() == 1


def test_training_film_of_an_unfinished_run_follows_its_newest_checkpoint(chromium, tmp_path):
    finished, unfinished = train_letters(tmp_path / "finished"), tmp_path / "letters"
    shutil.copytree(finished, unfinished, ignore=shutil.ignore_patterns("model", "summary.json", "step-*"))
    shutil.copytree(finished / "step-00000003", unfinished / "step-00000003")
    with serving(str(unfinished), "--workers", "1") as client:
        tab = Tab(chromium, client)
        output = tab.page.locator(".film-output")
        tab.open("training?model=letters&text=D+A+C")
        tab.ready("training 3")
        first = output.inner_text()
        (finished / "step-00000012").rename(unfinished / "step-00000012")
        tab.ready("training 12")
        newest = client.post("run", {"model": "letters@12", "text": "D A C", "complete": True})["text"]
        assert output.inner_text().split("writes ")[1] == newest
        assert first.split("writes ")[1] != newest  # else the next line means nothing
        tab.page.get_by_label("Checkpoint").fill("0")
        tab.ready("training 3")
        assert "compared with the newest checkpoint" in output.inner_text()
        tab.context.close()
    assert tab.problems == []


def test_checkpoints_are_models_of_every_panel(run_tab):
    run_tab.open("comparison?model=letters&model2=letters@3&text=D+A+C&view=streams")
    run_tab.wait_for_view("streams")
    assert run_tab.page.locator(".run-name").all_inner_texts() == ["First: letters", "Second: letters@3"]
    run_tab.open("model?model=letters@6&text=D+A+C")
    run_tab.wait_for_view("attention")


def test_training_panel_without_a_run_says_how_to_start_one(tab):
    tab.open("training")
    tab.ready("training empty")
    assert "clearhead train" in tab.page.locator(".pane-note").inner_text()
