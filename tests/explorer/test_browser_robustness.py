"""Strange addresses, inputs and moments in Chromium: every panel shows a result or an error of the request."""

from __future__ import annotations

import re

import pytest

from tests.support.browser import BROWSER

pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]
PAIR = "model=sort-dedup&text=D+A+C&text2=D+A+B"


@pytest.mark.parametrize(
    ("address", "selector"),
    [
        ("interpret?model=sort-dedup&view=nothing", ".heat"),
        ("interpret?model=sort-dedup&view=constructor", ".heat"),
        ("interpret?model=sort-dedup&view=why&step=-1", ".why"),
        ("interpret?model=sort-dedup&view=neurons&block=abc", ".heat"),
        ("tour?model=sort-dedup&step=0.5", ".tour-list"),
        (f"comparison?{PAIR}&view=nothing", ".heat"),
        (f"comparison?{PAIR}&view=outputs&step=-1", ".probabilities"),
        ("model?model=sort-dedup&view=beams&width=abc", ".tree"),
        ("model?model=sort-dedup&t=abc&k=x&p=NaN&seed=x&n=1e999", ".answer-output:has-text('A B C D')"),
        ("intervention?model=sort-dedup&at=1e3&token=Z", ".effect .probabilities"),
        ("intervention?model=sort-dedup&mt=Infinity", ".effect .probabilities"),
        ("mask?n=abc", ".answer svg"),
        ("cost?tokens=abc", ".headline:has-text('forward pass')"),
    ],
)
def test_invalid_state_of_the_address_is_replaced_by_the_default(tab, address, selector):
    tab.open(address)
    tab.page.wait_for_selector(selector)
    tab.page.wait_for_selector(".pane[data-state=loading]", state="detached")
    assert tab.page.locator(".pane[data-state=error]").count() == 0
    text = tab.page.locator("#panel").inner_text()
    assert not any(word in text for word in ("NaN", "Infinity", "undefined", "is empty"))


def test_unknown_head_of_an_intervention_is_quoted(tab):
    tab.open("intervention?model=sort-dedup&edits=blocks.0.attention:x:zero")
    tab.page.wait_for_selector(".omitted:has-text('blocks.0.attention has no head x')")


@pytest.mark.parametrize(
    ("address", "label", "message"),
    [
        ("interpret?model=sort-dedup&view=patching&other=%3F%3F", "A second text", "is not in the vocabulary"),
        ("intervention?model=sort-dedup&edits=blocks.0::patch", "Source text of patches", "is empty"),
    ],
)
def test_error_of_a_second_text_is_shown_at_its_field(tab, address, label, message):
    tab.open(address)
    tab.page.wait_for_selector(f".problem:has-text('{message}')")
    assert tab.page.get_by_label(label).get_attribute("aria-invalid") == "true"
    assert tab.page.get_by_label(label).is_visible()


def test_retry_opens_the_panel_again_with_its_state(tab):
    tab.open("model?model=sort-dedup&text=D+A")
    tab.wait_for_view("attention")
    tab.page.route("**/api/run", lambda route: route.abort())
    tab.page.get_by_label("Text").fill("D B")
    tab.page.wait_for_selector(".pane-note:has-text('the server does not respond')")
    tab.page.unroute("**/api/run")
    tab.page.get_by_role("button", name="Retry").click()
    tab.page.wait_for_selector(".answer-output:has-text('B D')")
    assert tab.page.get_by_label("Text").input_value() == "D B"
    tab.problems[:] = [problem for problem in tab.problems if "ERR_FAILED" not in problem]


def test_panel_follows_back_and_forward_and_quick_changes_of_tabs(tab):
    tab.open("model?model=sort-dedup&text=D+A")
    tab.wait_for_view("attention")
    tab.page.get_by_label("Text").fill("Z Q A")
    tab.page.wait_for_selector(".answer-output:has-text('A Q Z')")
    for link in tab.page.locator("#tabs a").all():
        link.click()
    tab.page.locator("#tabs").get_by_role("link", name="Tour", exact=True).click()
    tab.ready("tour 7")
    for _ in range(len(tab.page.locator("#tabs a").all())):
        tab.page.go_back()
    tab.page.wait_for_selector(".answer-output:has-text('A Q Z')")
    assert tab.page.get_by_label("Text").input_value() == "Z Q A"
    tab.wait_for_view("attention")


def test_saved_page_contains_the_values_of_its_fields(tab):
    texts = {}
    for panel, view in (
        ("interpret?model=sort-dedup&text=D+A+C&view=patching&other=D+A+B", "patching"),
        ("model?model=sort-dedup&text=D+A+C&view=beams&width=4", "beams"),
    ):
        tab.open(panel)
        tab.wait_for_view(view)
        html = tab.download(tab.page.get_by_role("button", name="Save as one page")).decode()
        texts[view] = re.sub(r"<style>.*?</style>|<[^>]+>", "", html, flags=re.DOTALL)
    assert "A second text with the same number of tokensD A B" in texts["patching"]
    assert "Width4" in texts["beams"]
    assert "A second text" not in texts["beams"]
