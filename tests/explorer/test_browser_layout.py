"""Layout of the panels in Chromium: what is visible without scrolling, sizes of texts, and complete grids."""

from __future__ import annotations

import pytest

from tests.support.browser import BROWSER
from tests.support.browser_panels import HOUSE, PANELS, VIEWS, open_completely
from tests.support.browser_tab import Tab

pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]
# Texts below 10 pixels, without subscripts and the axes of scaled drawings.
SMALL_TEXTS = """() => [...document.querySelectorAll('body *')]
    .filter(e => e.checkVisibility({ visibilityProperty: true }) && !e.closest('sub, sup, svg, .unseen'))
    .filter(e => [...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
    .map(e => [parseFloat(getComputedStyle(e).fontSize), e.outerHTML.slice(0, 80)])
    .filter(([size]) => size > 0 && size < 9.9)"""
# Grids that are wider than the space for them.
CUT_GRIDS = """() => [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => `${e.scrollWidth} of ${e.clientWidth}: ${e.textContent.slice(0, 60)}`)"""


@pytest.fixture
def phone(chromium, page):
    tab = Tab(chromium, page, reduced_motion="reduce", has_touch=True)
    tab.page.set_viewport_size({"width": 390, "height": 844})
    yield tab
    tab.context.close()
    assert tab.problems == []


def test_texts_on_a_phone_are_at_least_ten_pixels_high(phone):
    for panel in [*PANELS, *VIEWS]:
        open_completely(phone, panel)
        assert phone.page.evaluate(SMALL_TEXTS) == [], panel


@pytest.mark.parametrize("view", ["attention", "steps", "beams"])
def test_view_begins_on_the_first_screen_of_a_phone(phone, view):
    phone.open(f"model?{HOUSE}&view={view}")
    phone.wait_for_view(view)
    assert phone.page.locator(".answer-output").bounding_box()["y"] < 420
    assert phone.page.locator(".stage-bar .choices").bounding_box()["y"] < 720


def test_map_of_an_encoder_decoder_fits_a_phone(phone):
    phone.open(f"intervention?{HOUSE}")
    phone.page.wait_for_selector("html[data-map]")
    assert [text for text in phone.page.evaluate(CUT_GRIDS) if "skip" in text] == []


def test_labels_of_the_axes_of_a_recording_are_readable_on_a_phone(phone):
    phone.open("model?model=spoken-digits")
    phone.wait_for_view("attention")
    heights = phone.page.locator(".wave text").evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")
    assert min(heights) > 9


def test_induction_scores_of_all_heads_fit_next_to_each_other(tab):
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    tab.open("interpret?model=sort-dedup&view=induction")
    tab.wait_for_view("induction")
    assert tab.page.locator(".sides.three .heat").count() == 3
    # SmolLM2 has nine heads; this model has four.
    room, columns = tab.page.evaluate(
        """() => { const box = document.querySelector('.sides.three .scroll');
        const cells = [...box.querySelectorAll('thead th')];
        return [box.clientWidth - box.querySelector('.corner').offsetWidth, cells.at(-1).getBoundingClientRect().right
            - cells[0].getBoundingClientRect().left]; }"""
    )
    assert 9 / 4 * columns <= room


def test_words_of_a_tokenizer_without_spaces_are_separated(tab):
    tab.open("model?model=sort-dedup&text=D+A+A+C")
    tab.wait_for_view("attention")
    assert tab.page.locator(".answer-input").inner_text() == "D A A C <START>"
    assert tab.page.locator(".answer-output").inner_text() == "A C D <STOP>"


def test_link_to_interventions_names_what_is_switched_off(tab):
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    tab.page.locator(".thumb[title*='layer 2, mean']").last.click()
    tab.page.get_by_role("link", name="Switch these heads off").wait_for()
    tab.page.locator(".thumb[title*='layer 2, head 1']").last.click()
    tab.page.get_by_role("link", name="Switch this head off").wait_for()


def test_selected_token_keeps_the_keyboard_focus(tab):
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    tab.page.locator(".answer-output .tok").nth(1).focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".answer-output [aria-pressed=true]:has-text('casa')")
    assert tab.page.evaluate("document.activeElement.textContent") == "casa"
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "es"
