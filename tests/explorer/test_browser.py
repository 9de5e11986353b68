"""Every panel in Chromium: mouse and keyboard input, without console messages and without requests to other servers.

`make browser` runs these tests; they are skipped if Chromium is not installed."""

from __future__ import annotations

import re

import pytest

from tests.support.browser import BROWSER
from tests.support.browser_tab import Tab

pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]


def is_image(data):
    return data.startswith((b"<svg", b"\x89PNG"))


def test_all_panels_open_with_accessible_names(tab):
    tab.open("model")
    for link in tab.page.locator("#tabs a").all():
        link.click()
        name = link.get_attribute("data-name")
        tab.page.wait_for_selector(f'html[data-panel="{name}"][data-ready]')
        assert tab.page.locator("#tabs a[aria-current]").all_inner_texts() == [link.inner_text()]
        assert tab.hash.partition("?")[0] == name
        # Every control has an accessible name.
        nameless = tab.page.eval_on_selector_all(
            "input, select, textarea, button, [role=img], [role=button]",
            "all => all.filter(e => e.offsetParent && !(e.labels?.length || e.ariaLabel || e.textContent.trim() "
            "|| e.getAttribute('aria-labelledby') || e.title)).map(e => e.outerHTML)",
        )
        assert nameless == []


def test_mask_panel_completes_and_draws_expressions(tab):
    tab.open("mask")
    tab.page.locator(".catalogue .card").first.wait_for()  # completion works from here on
    field = tab.page.get_by_label("Expression")
    field.fill("causal() & win")
    field.press("End")
    field.press_sequentially("d")
    tab.page.get_by_role("option").first.wait_for()
    field.press("Tab")
    assert field.input_value() == "causal() & window("
    field.press_sequentially("3, 0)")
    assert tab.ready("mask causal() & window(3, 0)")
    assert "e=causal%28%29+%26+window%283%2C+0%29" in tab.hash
    field.fill("causal() & nothing()")
    tab.ready("error")
    assert tab.page.locator("pre.caret").inner_text().splitlines()[1] == " " * 11 + "^"
    tab.page.locator(".catalogue .card").nth(2).click()
    tab.ready("mask causal() & (window")
    for button in tab.page.locator(".answer .saving button").all():
        assert is_image(tab.download(button))


def test_by_hand_panel_moves_and_edits_vectors(tab):
    tab.open("by_hand")
    for kind in ("hard", "uniform", "identity", "permutation", "convolution", "soft"):
        tab.page.get_by_role("button", name=kind).click()
        tab.page.wait_for_selector(f'html[data-ready$="{kind}"]')
    tab.page.get_by_label("x1, first number").fill("1")
    tab.page.wait_for_selector('html[data-ready^="by_hand 1,"]')
    tab.page.locator(".tip-of").first.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.wait_for_selector('html[data-ready^="by_hand 9/8,"]')
    before = tab.page.get_by_label("x1, first number").input_value()
    tip = tab.page.locator(".tip-of").first.bounding_box()
    tab.page.mouse.move(tip["x"] + 5, tip["y"] + 5)
    tab.page.mouse.down()
    tab.page.mouse.move(tip["x"] - 40, tip["y"] - 60, steps=4)
    tab.page.mouse.up()
    assert tab.page.get_by_label("x1, first number").input_value() != before
    tab.page.get_by_label("x1, first number").fill("2/3")
    tab.page.wait_for_selector('html[data-ready*="2/3,"]')
    tab.page.get_by_label("x1, first number").fill("2/")
    tab.ready("error")
    tab.page.get_by_label("x1, first number").fill("1")
    tab.page.get_by_label("β (0, 2, 3/2, inf)").fill("7/2")
    tab.page.wait_for_selector('html[data-ready*=" 7/2 "]')
    tab.page.get_by_role("button", name="Add a vector").click()
    tab.page.wait_for_selector('html[data-ready*="1/2,-1/2"]')


def test_cost_panel_shows_cost_growth_and_limits(tab):
    tab.open("cost?d_model=64&n_heads=4&n_layers=2&d_ff=128&vocab_size=256&tokens=64")
    tab.page.get_by_role("button", name="Training step").click()
    tab.page.get_by_label("Layers", exact=True).fill("3")
    tab.page.wait_for_selector("[data-ready='7'] svg.curve")
    tab.page.wait_for_selector("p[data-ready=yes]")
    assert tab.page.locator("svg.curve").count() == 3
    tab.page.get_by_label("Heads", exact=True).fill("5")
    tab.ready("error")


def test_claims_and_exercises_panels_run_and_grade(tab):
    tab.open("claims")
    tab.page.get_by_label("Search").fill("softmax")
    tab.page.locator(".entries button").first.click()
    tab.ready("verdict")  # the selected statement is tested at once
    assert tab.page.locator(".entries sub").count() > 0
    assert "_k" not in tab.page.locator(".entries").inner_text()
    tab.page.get_by_role("button", name="Run again").click()
    tab.ready("verdict")
    assert tab.page.locator(".evidence li").count() > 0
    tab.page.get_by_role("button", name="Quiz").click()
    tab.page.locator(".entry .act").first.click()
    tab.page.wait_for_selector("#score:has-text('of 1 right')")
    tab.page.get_by_role("button", name="Next").click()
    tab.ready("claim")
    tab.open("exercises?name=sort-dedup-softmax")
    tab.page.locator(".worksheet input").first.fill("77")
    tab.page.get_by_role("button", name="Grade my answers").click()
    tab.ready("graded 0/")
    assert tab.page.locator("[data-mark=wrong]").count() == 1
    tab.page.get_by_role("button", name="Show the solution").click()
    tab.page.wait_for_selector('html[data-ready$="yes"]')
    tab.page.get_by_label("Seed (0: original numbers)", exact=True).fill("3")
    tab.page.wait_for_selector('html[data-ready^="worksheet sort-dedup-softmax-seed-3"]')


def test_run_panel_generates_and_shows_all_views(tab):
    tab.open("model?model=sort-dedup&text=D+A+A+C")
    tab.wait_for_view("attention")
    output = tab.page.locator(".answer-output")
    assert output.inner_text().startswith("A C D")
    tab.page.locator(".thumb").nth(2).click()
    tab.page.wait_for_selector("#where:has-text('head 2')")
    assert is_image(tab.download(tab.page.locator("#stage .saving button").first))
    tab.page.get_by_role("button", name="Step by step").click()
    tab.wait_for_view("steps")
    boxes = tab.page.locator("#drawing .node")
    for i in range(boxes.count()):  # every box leads to its step
        boxes.nth(i).click()
        assert tab.page.locator("#step h2").inner_text()
    tab.page.get_by_role("button", name="Restart").click()
    tab.page.wait_for_selector(".answer-output:has-text('nothing generated yet')")
    tab.page.get_by_role("button", name="Step →").click()
    tab.page.wait_for_selector(".answer-output .tok[role=button]:has-text('A')")
    assert "w=" in tab.hash
    tab.page.get_by_role("button", name="▶ Play").click()
    tab.page.wait_for_selector(".answer-output:has-text('<STOP>')")
    tab.page.get_by_role("button", name="Beam search").click()
    tab.wait_for_view("beams")
    assert tab.page.locator(".tree text").count() > 3
    page = tab.download(tab.page.get_by_role("button", name="Save as one page"))
    assert page.startswith(b"<!doctype html>")
    assert b'class="tree"' in page
    tab.page.get_by_role("button", name="Step by step").click()
    tab.wait_for_view("steps")
    assert b"Made by clearhead walk" in tab.download(tab.page.get_by_role("button", name="Save as one page"))
    tab.page.get_by_role("button", name="Beam search").click()
    tab.wait_for_view("beams")
    text = tab.page.get_by_label("Text")
    text.fill("Z B B A")
    tab.page.wait_for_selector(".answer-output:has-text('A B Z')")
    # The address contains the complete state.
    address = tab.hash
    tab.open(address)
    tab.wait_for_view("beams")
    assert tab.page.get_by_label("Text").input_value() == "Z B B A"


def test_run_panel_generates_the_rest_after_another_token(tab):
    tab.open("model?model=en-es&text=How+are+you%3F")
    tab.wait_for_view("attention")
    tab.page.locator(".answer-output .tok[role=button]").nth(1).click()
    tab.page.wait_for_selector(".candidates caption:has-text('Instead of')")
    other = tab.page.locator(".candidates tr:not(.selected) button").first
    token = other.inner_text().strip()
    other.click()
    tab.page.wait_for_selector(f".answer-output .tok:nth-of-type(2):has-text('{token}')")
    assert re.search(r"w=[\d%C]+%2B(&|$)", tab.hash)


def test_run_panel_shows_images_and_attribution(tab):
    tab.open("model?model=digits-vit")
    tab.wait_for_view("attention")
    assert tab.page.locator(".pane[data-state=error]").count() == 0
    assert tab.page.locator(".patches figcaption").all_inner_texts() == [
        "Input image",
        "Attention of the selected patch",
    ]
    tab.page.get_by_role("button", name="Clear").click()
    box = tab.page.locator(".pad").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 30, steps=8)
    tab.page.mouse.up()
    tab.page.get_by_role("button", name="Attribution").click()
    tab.wait_for_view("pixels 2")
    tab.page.wait_for_selector(".answer-output:has-text('1')")
    assert "ink=" in tab.hash
    assert tab.page.locator(".predictions svg").count() == 3


def test_intervention_panel_applies_and_resets_interventions(tab):
    tab.open("intervention?model=sort-dedup&text=D+A+C")
    tab.page.wait_for_selector("html[data-map]")
    tab.page.get_by_role("button", name="blocks.1.attention, head 2").click()
    tab.page.wait_for_selector(".python:has-text('analysis.ZeroAblation(heads=[2])')")
    assert "edits=blocks.1.attention" in tab.hash
    tab.page.get_by_role("button", name="Scale", exact=True).click()
    tab.page.get_by_role("button", name="blocks.0.attention", exact=True).click()
    tab.page.wait_for_selector(".python:has-text('ReplaceActivation')")
    tab.page.get_by_text("Mask, temperature, tokens").click()
    tab.page.get_by_label("Additional mask").fill("causal() & window(1, 0)")
    tab.page.wait_for_selector(".python:has-text('window(1, 0)')")
    tab.page.get_by_label("Replace the token at position").fill("0")
    tab.page.get_by_label("by the token").fill("Q")
    tab.page.wait_for_selector(".python:has-text('ids[0, 0]')")
    tab.page.get_by_label("Attention temperature").first.fill("3")
    tab.page.wait_for_selector(".python:has-text('temperature=3')")
    tab.page.get_by_role("button", name="Undo all").click()
    tab.page.wait_for_selector(".kind:has-text('No intervention yet')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("panel", ["model", "intervention", "by_hand", "mask", "cost", "claims", "exercises"])
def test_panels_fit_a_narrow_window(chromium, page, panel, scheme):
    tab = Tab(chromium, page, color_scheme=scheme, reduced_motion="reduce")
    tab.page.set_viewport_size({"width": 400, "height": 800})
    tab.open(panel)
    width = tab.page.evaluate("document.documentElement.scrollWidth")
    tab.context.close()
    assert width <= 400
    assert tab.problems == []
