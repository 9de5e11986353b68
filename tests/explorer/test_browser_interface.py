"""Properties of all panels in Chromium: consistent tokens, valid values, states of results, contrast, and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import BROWSER
from tests.support.browser_panels import HOUSE, PANELS, VIEWS, open_completely
from tests.support.browser_tab import Tab

pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]
CONTRAST = (Path(__file__).parents[1] / "support" / "contrast.js").read_text(encoding="utf-8").partition("\n")[2]


def test_run_views_show_the_tokens_of_the_answer(tab):
    """Sampled tokens are the same in the answer line, the attention and the drawing."""
    tab.open(f"model?{HOUSE}&t=2&seed=1")
    tab.wait_for_view("attention")
    tab.page.get_by_role("button", name="Restart").click()
    tab.page.wait_for_selector(".answer-output:has-text('nothing generated yet')")
    for _ in range(3):
        count = tab.page.locator(".answer-output .tok[role=button]").count()
        tab.page.get_by_role("button", name="Step →").click()
        tab.page.wait_for_function(
            "n => document.querySelectorAll('.answer-output .tok[role=button]').length === n + 1", arg=count
        )
    tokens = [text.strip() for text in tab.page.locator(".answer-output .tok[role=button]").all_inner_texts()]
    tab.page.wait_for_selector(".pane[data-state=shown]")
    queries = [text.strip() for text in tab.page.locator(".query .token").all_inner_texts()]
    assert queries[:3] == tokens
    tab.page.get_by_role("button", name="Step by step").click()
    tab.wait_for_view("steps")
    tab.page.locator("#drawing .node", has_text="Target tokens").click()
    chips = tab.page.locator("#step .chips span")
    assert chips.evaluate_all("all => all.map(e => e.firstChild.textContent.trim())")[1:4] == tokens


def test_translation_is_greedy_by_default(tab):
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    assert tab.page.locator(".answer-output").inner_text().startswith("La casa es roja.")
    assert tab.page.locator(".sampling summary").inner_text() == "Sampling: greedy"


def test_ticks_of_candidates_are_shown_only_for_sampling(tab):
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    assert tab.page.locator(".candidates .track span").count() == 12
    assert tab.page.locator(".candidates .track i").count() == 0
    tab.open(f"model?{HOUSE}&t=1")
    tab.wait_for_view("attention")
    assert tab.page.locator(".candidates .track i").count() == 12


def test_error_of_the_page_is_not_reported_as_one_of_the_server(chromium, page):
    tab = Tab(chromium, page)
    tab.open("model?model=sort-dedup&text=D+A")
    tab.wait_for_view("attention")
    tab.page.evaluate(
        """async () => {
            const { Latest } = await import("./tools.js");
            const fail = (error) => { document.title = error.message; };
            new Latest(new AbortController().signal).run(async () => 1, () => { null.x; }, fail);
        }"""
    )
    tab.page.wait_for_timeout(300)
    assert "server" not in tab.page.title()
    assert any("Cannot read properties of null" in problem for problem in tab.problems)
    tab.context.close()


def test_lost_server_is_reported_as_such(tab):
    tab.open("model?model=sort-dedup&text=D+A")
    tab.wait_for_view("attention")
    tab.page.route("**/api/**", lambda route: route.abort())
    tab.page.get_by_label("Text").fill("D B")
    tab.page.wait_for_selector(".pane-note:has-text('the server does not respond; check that it is running')")
    tab.problems[:] = [problem for problem in tab.problems if "ERR_FAILED" not in problem]


def test_taken_token_is_marked_if_it_is_improbable(tab):
    tab.open("model?model=sort-dedup&text=D+A&w=25")  # Z
    tab.wait_for_view("attention")
    tab.page.locator(".answer-output .tok[role=button]").first.click()
    tab.page.wait_for_selector(".candidates tr.selected")
    token = tab.page.locator(".answer-output .tok[role=button]").first.inner_text()
    assert tab.page.locator(".candidates tr.selected button").inner_text() == token


def test_interventions_are_per_head(tab):
    tab.open("intervention?model=sort-dedup&text=D+A+C")
    tab.page.wait_for_selector("html[data-map]")
    tab.page.get_by_role("button", name="blocks.0.attention, head 0").click()
    tab.page.wait_for_selector("[aria-label='blocks.0.attention, head 0: zero ablation']")
    tab.page.get_by_role("button", name="Scale", exact=True).click()
    tab.page.get_by_role("button", name="blocks.0.attention, head 3").click()
    tab.page.wait_for_selector("[aria-label='blocks.0.attention, head 3: scaled by 0.5']")
    assert tab.page.locator("[aria-label='blocks.0.attention, head 0: zero ablation']").count() == 1


def test_skipped_block_changes_less_than_a_zeroed_one(tab):
    tab.open("intervention?model=sort-dedup&text=D+A+C&edits=blocks.1::skip")
    tab.page.wait_for_selector(".python:has-text('lambda _: inputs')")
    tab.page.wait_for_selector("html[data-map]")
    assert tab.page.locator("[aria-label='blocks.1: skipped']").count() == 1
    names = tab.page.locator(".tools .choices button").all_inner_texts()
    assert names == ["Zero ablation", "Mean ablation", "Scale", "Patch"]


def test_speech_model_recognizes_the_example_recording(tab):
    tab.open("model?model=spoken-digits")
    tab.wait_for_view("attention")
    assert tab.page.locator(".pane[data-state=error]").count() == 0
    assert tab.page.locator(".patches figcaption").first.inner_text() == "Mel spectrogram"
    assert tab.page.locator(".heard").count() == 6
    assert tab.page.locator(".wave text").first.text_content() == "0 s"
    times = tab.page.locator(".heard small").all_inner_texts()
    tab.page.locator("#detail .of").wait_for()
    assert times[0] in tab.page.locator("#detail .of").inner_text()
    assert tab.page.locator("audio").evaluate("audio => audio.src.startsWith('blob:')")
    assert tab.page.get_by_label("Text").is_hidden()
    sound = Path(__file__).parents[2] / "clearhead/explorer/examples/digits.wav"
    tab.page.locator("input[type=file]").set_input_files(sound)
    tab.page.locator(".heard").nth(5).wait_for()


def test_old_results_are_dimmed_beside_an_error(tab):
    tab.open("model?model=sort-dedup&text=D+A")
    tab.wait_for_view("attention")
    tab.page.get_by_label("Text").fill("   ")
    tab.page.wait_for_selector(".subject .problem:has-text('enter a text')")
    assert tab.page.get_by_label("Text").get_attribute("aria-invalid") == "true"
    tab.page.wait_for_selector(".pane[data-state=error]")
    opacity = tab.page.locator(".pane-content").evaluate("element => Number(getComputedStyle(element).opacity)")
    assert opacity < 0.6
    tab.page.get_by_label("Text").fill("D B")
    tab.page.wait_for_selector(".pane[data-state=shown]")
    assert tab.page.locator(".subject .problem").first.inner_text() == ""


@pytest.mark.parametrize(
    ("panel", "label", "value", "message"),
    [
        ("mask", "Tokens", "-4", "from 1 to 131,072; 1,024 is used"),
        ("model?model=sort-dedup", "Top-p", "2", "from 0.01 to 1; 1 is used"),
        ("cost", "Layers", "2.5", "whole number from 1 to 128; 12 is used"),
        ("intervention?model=sort-dedup", "Replace the token at position", "abc", "the token is not replaced"),
    ],
)
def test_invalid_values_are_marked_and_not_used(tab, panel, label, value, message):
    tab.open(panel)
    tab.page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    number = tab.page.get_by_label(label, exact=True).first
    if number.get_attribute("type") == "number":
        number.fill(value)
    else:
        number.press_sequentially(value)
    tab.page.wait_for_selector(f".problem:has-text('{message}')")
    assert number.get_attribute("aria-invalid") == "true"


def test_invalid_value_of_the_address_is_shown_in_an_open_field(tab):
    tab.open("model?model=sort-dedup&text=D+A&seed=-4")
    tab.page.wait_for_selector(".sampling .problem:has-text('seed is -4')")
    assert tab.page.locator(".sampling").first.evaluate("details => details.open")


def test_unknown_model_of_the_address_is_reported(tab):
    tab.open("model?model=nothing")
    tab.wait_for_view("attention")
    assert "“nothing” is not a model of this panel" in tab.page.locator(".subject .problem").first.inner_text()
    tab.page.locator(".subject select").select_option("sort-dedup")
    tab.page.wait_for_selector(".answer-output:has-text('<STOP>')")
    assert tab.page.locator(".subject .problem").first.inner_text() == ""


def test_panel_reports_that_the_models_are_loading(tab):
    tab.page.route("**/api/models", lambda route: None)  # never answered
    tab.page.goto("about:blank")
    tab.page.goto(f"{tab.client.address}#model")
    tab.page.wait_for_selector(".pane[data-state=loading]:has-text('Loading')")


def test_one_unreadable_cell_does_not_block_grading(tab):
    tab.open("exercises?name=sort-dedup-softmax")
    tab.page.locator(".worksheet input").nth(0).fill("1/x")
    tab.page.locator(".worksheet input").nth(1).fill("77")
    tab.page.get_by_role("button", name="Grade my answers").click()
    tab.ready("graded")
    assert tab.page.locator("[data-mark=unreadable]").count() == 1
    assert tab.page.locator("[data-mark=wrong]").count() == 1
    note = tab.page.locator("[role=status].note").inner_text()
    assert "one cell is not a number" in note
    assert ".toml" not in note


def test_cells_of_an_exercise_are_reached_by_keys_and_steps_are_scored(tab):
    tab.open("exercises?name=sort-dedup-softmax")
    cells = tab.page.locator(".worksheet section:not(.given)").first.locator("input")
    n_columns = tab.page.locator(".worksheet section:not(.given) tbody tr").first.locator("input").count()
    cells.first.fill("0")
    for key, index in (("Enter", n_columns), ("ArrowUp", 0), ("ArrowRight", 1), ("ArrowLeft", 0)):
        tab.page.keyboard.press(key)
        assert cells.nth(index).evaluate("cell => cell === document.activeElement"), key
    tab.page.get_by_role("button", name="Grade my answers").click()
    tab.ready("graded 1/")
    scores = [text for text in tab.page.locator(".step-score").all_inner_texts() if text]
    assert scores[0].strip() == "1 of 28 right"
    note = tab.page.locator("[role=status].note").inner_text()
    assert note.startswith("1 of 28 cells right; not answered: steps 7 to ")
    cells.first.fill("2")  # an answer that changed is not graded yet
    assert tab.page.locator("[data-mark=right]").count() == 0


def test_hovering_a_token_highlights_it_in_all_views(tab):
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    tab.page.locator(".answer-input .tok").nth(3).hover()
    tab.page.wait_for_selector(".answer-input .tok.token-hover:has-text('red')")
    tab.page.wait_for_selector("#view .token.pointed:has-text('red')")
    assert tab.page.locator("#view .token.pointed").count() == 1
    tab.page.locator("#view .query .token").nth(1).hover()
    tab.page.wait_for_selector(".answer-output .tok.token-hover:has-text('casa')")


def test_answer_and_attention_are_above_the_fold(tab):
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    for selector, limit in ((".answer-output", 200), ("#heads", 300), ("#view", 450)):
        assert tab.page.locator(selector).bounding_box()["y"] < limit, selector
    groups = tab.page.locator(".tab-title").all_inner_texts()
    assert [group.capitalize() for group in groups] == ["Model", "Learn", "Plan"]


def test_effect_of_an_intervention_is_beside_the_map(tab):
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    tab.open(f"intervention?{HOUSE}&edits=decoder.blocks.3.cross_attention:1:zero")
    tab.page.wait_for_selector("html[data-map]")
    tab.page.wait_for_selector(".effect .probabilities i")
    grid, effect = (tab.page.locator(name).bounding_box() for name in (".map .heat", ".effect .probabilities"))
    assert effect["x"] > grid["x"] + grid["width"]
    assert effect["y"] + effect["height"] < 900


def test_selected_token_is_marked_without_the_space_before_it(tab):
    tab.open(f"model?{HOUSE}")
    tab.wait_for_view("attention")
    tokens = tab.page.locator(".answer-output .tok").evaluate_all("all => all.map(e => e.textContent)")
    assert tokens[:4] == ["La", "casa", "es", "roja"]
    assert tab.page.locator(".answer-output").inner_text().startswith("La casa es roja.")


def test_patching_offers_an_example_and_selects_the_token_that_changes(tab):
    tab.open("interpret?model=en-es&view=patching")
    tab.ready("patching empty")
    tab.page.get_by_role("button", name="Example:").click()
    tab.wait_for_view("patching")
    assert tab.page.get_by_label("Text", exact=True).input_value() == "The house is red."
    assert tab.page.get_by_label("A second text").input_value() == "The car is red."
    assert tab.page.locator(".answer-output [aria-pressed=true]").inner_text() == "casa"
    assert "car → house" in tab.page.locator(".heat thead").first.inner_text()
    tab.page.get_by_label("A second text").fill("The car\nis red.")
    assert tab.page.get_by_label("A second text").input_value() == "The car\nis red."


def test_drawing_reserves_the_width_of_all_features(tab):
    text = "I+would+like+a+cup+of+coffee+and+a+glass+of+water+for+my+old+friend+and+for+me+today%2C+please."
    tab.open(f"model?model=en-es&text={text}&view=steps")
    tab.wait_for_view("steps")
    parts = tab.page.locator(".flow .part").evaluate_all(
        "all => all.map(e => [e.querySelector('.framed').clientWidth - 2, e.querySelector('.framed').clientHeight - 2, "
        "...e.querySelector('small').textContent.split(' × ').map(Number), "
        "e.querySelector('.partial') !== null])"
    )
    assert any(is_partial for *_, is_partial in parts)
    for width, height, rows, columns, _ in parts:
        assert width / columns == pytest.approx(height / rows, rel=0.05)


def test_interpret_panel_links_a_part_to_its_ablation(tab):
    tab.open("interpret?model=en-es&text=The+house+is+red.&view=why&step=1")
    tab.wait_for_view("why")
    assert tab.page.locator(".why .confirmed").count() > 0
    chip = tab.page.locator(".source-chip").first
    token = chip.get_attribute("data-token")
    chip.hover()
    tab.page.wait_for_selector(f".answer-line .token-hover[data-token={token}]")
    for name, view in (("Logit lens", "lens"), ("Neurons", "neurons")):
        tab.page.get_by_role("button", name=name).click()
        tab.wait_for_view(view)
    tab.page.get_by_role("button", name="Why this token?").click()
    tab.wait_for_view("why")
    tab.page.locator(".why a").first.click()
    tab.page.wait_for_selector(".heat td.edited")


def test_tour_has_seven_steps_that_lead_to_their_views(tab):
    tab.open("tour?model=sort-dedup&text=D+A+C")
    tab.ready("tour 7")
    steps = tab.page.locator(".tour-list li")
    assert steps.count() == 7
    assert all(steps.nth(i).locator("a").count() >= 1 for i in range(7))
    links = tab.page.locator(".tour-list a").all()
    assert {link.get_attribute("href")[1:].partition("?")[0] for link in links} == {
        "model",
        "interpret",
        "intervention",
    }
    assert len({link.get_attribute("aria-label") for link in links}) == len(links) == 8
    steps.nth(2).locator("a").click()
    tab.wait_for_view("attention")


def test_drawing_opens_on_attention_and_follows_a_token(tab):
    tab.open(f"model?{HOUSE}&view=steps")
    tab.wait_for_view("steps")
    assert "softmax" in tab.page.locator("#step .strip [aria-current=true]").inner_text()
    assert tab.page.locator(".flow .part").count() == 7
    meaning = tab.page.locator("#step .values figcaption, #step figcaption").last.inner_text()
    assert meaning.startswith("A row is a query, labeled by the token read, not by the token predicted next")
    tab.page.locator(".flow .part").first.click()
    tab.page.wait_for_selector(".flow .part[aria-pressed=true] b:has-text('Q')")
    before = tab.page.locator("#step h2").inner_text()
    tab.page.get_by_role("button", name="Follow one token").click()
    tab.page.wait_for_selector(".framed i")
    tab.page.wait_for_function("before => document.querySelector('#step h2').textContent !== before", arg=before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_sufficient_contrast(chromium, page, scheme):
    tab = Tab(chromium, page, color_scheme=scheme, reduced_motion="reduce")
    problems = {}
    for panel in [*PANELS, *VIEWS]:
        open_completely(tab, panel)
        if texts := tab.page.evaluate(CONTRAST):
            problems[panel] = texts[:8]
    tab.context.close()
    assert problems == {}, "\n".join(map(str, problems.items()))


def test_phone_has_no_horizontal_overflow_and_large_touch_targets(chromium, page):
    tab = Tab(chromium, page, reduced_motion="reduce", has_touch=True)
    tab.page.set_viewport_size({"width": 390, "height": 844})
    for panel in [*PANELS, *VIEWS]:
        open_completely(tab, panel)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390, panel
        small = tab.page.evaluate(
            """() => [...document.querySelectorAll('button, select, summary, #tabs a, input:not([type=file])')]
            .filter(e => e.checkVisibility({ visibilityProperty: true }) && !e.matches('.unseen, .unseen *'))
            .map(e => [e.getBoundingClientRect(), e])
            .filter(([box]) => box.width > 0 && (box.width < 23.5 || box.height < 23.5))
            .map(([box, e]) => `${box.width.toFixed(0)}×${box.height.toFixed(0)} ${e.outerHTML.slice(0, 90)}`)"""
        )
        assert small == [], (panel, small[:8])
    tab.context.close()
