"""Every panel in Chromium: clicked through and typed into, with nothing wrong in the console and nothing fetched from
elsewhere. `make browser` runs it; where there is no Chromium it is skipped."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine"),
]


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page of the browser that notes whatever goes wrong."""

    def __init__(self, chromium, client, **options):
        self.client, self.wrong = client, []
        self.context = chromium.new_context(viewport={"width": 1360, "height": 900}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(45_000)
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._asked)

    def _asked(self, request):
        if not request.url.startswith((self.client.address, "data:", f"blob:http://{self.client.parts.netloc}/")):
            self.wrong.append(f"asked elsewhere: {request.url}")

    def open(self, hash_):
        self.page.goto("about:blank")
        self.page.goto(f"{self.client.address}#{hash_}")
        return self.ready()

    def ready(self, starts=""):
        """What the panel says it shows, once it does."""
        self.page.wait_for_selector(f'html[data-ready^="{starts}"]' if starts else "html[data-ready]")
        return self.page.locator("html").get_attribute("data-ready")

    def shown(self, starts):
        self.page.wait_for_selector(f'html[data-shown^="{starts}"]')

    def saved(self, button):
        with self.page.expect_download() as found:
            button.click()
        return Path(found.value.path()).read_bytes()

    @property
    def hash(self):
        return self.page.url.partition("#")[2]


@pytest.fixture
def tab(chromium, page):
    opened = Tab(chromium, page)
    yield opened
    opened.context.close()
    assert opened.wrong == []


def is_picture(data):
    return data.startswith((b"<svg", b"\x89PNG"))


def test_every_tab_opens(tab):
    tab.open("run")
    for link in tab.page.locator("#tabs a").all():
        link.click()
        name = link.get_attribute("data-name")
        tab.page.wait_for_selector(f'html[data-panel="{name}"][data-ready]')
        assert tab.page.locator("#tabs a[aria-current]").all_inner_texts() == [link.inner_text()]
        assert tab.hash.partition("?")[0] == name
        # Whatever can be used has a name for those who do not see it.
        nameless = tab.page.eval_on_selector_all(
            "input, select, textarea, button, [role=img], [role=button]",
            "all => all.filter(e => e.offsetParent && !(e.labels?.length || e.ariaLabel || e.textContent.trim() "
            "|| e.getAttribute('aria-labelledby') || e.title)).map(e => e.outerHTML)",
        )
        assert nameless == []


def test_masks(tab):
    tab.open("masks")
    tab.page.locator(".gallery .card").first.wait_for()  # with it come the words
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
    tab.ready("refused")
    assert tab.page.locator("pre.caret").inner_text().splitlines()[1] == " " * 11 + "^"
    tab.page.locator(".gallery .card").nth(2).click()
    tab.ready("mask causal() & (window")
    for button in tab.page.locator(".answer .saving button").all():
        assert is_picture(tab.saved(button))


def test_attention_by_hand(tab):
    tab.open("hand")
    for kind in ("hard", "uniform", "identity", "permutation", "convolution", "soft"):
        tab.page.get_by_role("button", name=kind).click()
        tab.page.wait_for_selector(f'html[data-ready$="{kind}"]')
    tab.page.get_by_label("x1, first number").fill("1")
    tab.page.wait_for_selector('html[data-ready^="hand 1,"]')
    tab.page.locator(".tip-of").first.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.wait_for_selector('html[data-ready^="hand 9/8,"]')
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
    tab.ready("refused")
    tab.page.get_by_label("x1, first number").fill("1")
    tab.page.get_by_label("β (0, 2, 3/2, inf)").fill("7/2")
    tab.page.wait_for_selector('html[data-ready*=" 7/2 "]')
    tab.page.get_by_role("button", name="Add a vector").click()
    tab.page.wait_for_selector('html[data-ready*="1/2,-1/2"]')


def test_cost(tab):
    tab.open("cost?d_model=64&n_heads=4&n_layers=2&d_ff=128&vocab_size=256&tokens=64")
    tab.page.get_by_role("button", name="Training step").click()
    tab.page.get_by_label("Layers").last.fill("3")
    tab.page.wait_for_selector("[data-ready='7'] svg.curve")
    tab.page.wait_for_selector("p[data-ready=yes]")
    assert tab.page.locator("svg.curve").count() == 3
    tab.page.get_by_label("Heads").last.fill("5")
    tab.ready("refused")


def test_claims_and_sheets(tab):
    tab.open("claims")
    tab.page.get_by_label("Words").fill("softmax")
    tab.page.locator(".entries button").first.click()
    tab.page.get_by_role("button", name="Try it now").click()
    tab.ready("verdict")
    assert tab.page.locator(".evidence li").count() > 0
    tab.page.get_by_role("button", name="Quiz").click()
    tab.page.locator(".entry .act").first.click()
    tab.page.wait_for_selector("#score:has-text('of 1 right')")
    tab.page.get_by_role("button", name="Next").click()
    tab.ready("claim")
    tab.open("sheets?name=sort-dedup-softmax")
    tab.page.locator(".worksheet input").first.fill("77")
    tab.page.get_by_role("button", name="Mark my answers").click()
    tab.ready("marked 0/")
    assert tab.page.locator("[data-mark=wrong]").count() == 1
    tab.page.get_by_role("button", name="Show the solution").click()
    tab.page.wait_for_selector('html[data-ready$="yes"]')
    tab.page.get_by_label("Seed").last.fill("3")
    tab.page.wait_for_selector('html[data-ready^="sheet sort-dedup-softmax-seed-3"]')


def test_run(tab):
    tab.open("run?model=sort-dedup&text=D+A+A+C")
    tab.shown("stations")
    boxes = tab.page.locator("#drawing .node")
    for i in range(boxes.count()):  # every station leads somewhere
        boxes.nth(i).click()
        assert tab.page.locator("#station h2").inner_text()
    tab.page.get_by_role("button", name="Attention", exact=True).click()
    tab.shown("attention")
    tab.page.locator(".thumb").nth(2).click()
    assert "head 2" in tab.page.locator("#where").inner_text()
    assert is_picture(tab.saved(tab.page.locator(".inner .saving button").first))
    tab.page.get_by_label("Temperature").last.fill("0")
    tab.page.get_by_role("button", name="Step →").click()
    tab.page.wait_for_selector(".chips .own")
    assert "w=" in tab.hash
    tab.page.get_by_role("button", name="← Back").click()
    tab.page.wait_for_selector(".chips:not(:has(.own))")
    tab.page.get_by_role("button", name="▶ Play").click()
    tab.page.wait_for_selector(".chips .own:has-text('<STOP>')")
    tab.page.get_by_role("button", name="Beams").click()
    tab.shown("beams")
    assert tab.page.locator(".tree text").count() > 3
    page = tab.saved(tab.page.get_by_role("button", name="Save this run as one page"))
    assert page.startswith(b"<!doctype html>")
    text = tab.page.get_by_label("Text")
    text.fill("Z ?")
    tab.ready("refused")
    text.fill("Z B B A")
    tab.ready("run sort-dedup")
    # The address brings all of it back.
    address = tab.hash
    tab.open(address)
    tab.shown("beams")
    assert tab.page.get_by_label("Text").input_value() == "Z B B A"


def test_run_of_a_translator_and_a_picture(tab):
    tab.open("run?model=en-es&text=How+are+you%3F&view=attention")
    tab.shown("attention")
    assert "¿Cómo" in tab.page.locator("#title").inner_text()
    assert tab.page.locator(".chips b").all_inner_texts() == ["reads", "writes"]
    tab.page.get_by_label("Model").select_option("digits-vit")
    tab.page.wait_for_selector("#view canvas")
    tab.page.get_by_role("button", name="Stations").click()
    tab.shown("stations")


def test_change(tab):
    tab.open("change?model=sort-dedup&text=D+A+C")
    still = tab.ready("change")
    tab.page.get_by_role("button", name="blocks.1.attention, head 2").click()
    tab.page.wait_for_selector(".layer .off")
    tab.page.wait_for_selector(f'html[data-ready^="change"]:not([data-ready="{still}"])')
    assert "look.Zero(heads=[2])" in tab.page.locator(".python").inner_text()
    assert "edits=blocks.1.attention" in tab.hash
    tab.page.get_by_role("button", name="Scale", exact=True).click()
    tab.page.get_by_role("button", name="blocks.0.attention, the whole layer").click()
    tab.page.wait_for_selector(".python:has-text('Replace')")
    tab.page.get_by_label("Mask instead").fill("causal() & window(1, 0)")
    tab.page.wait_for_selector(".python:has-text('window(1, 0)')")
    tab.page.get_by_label("Force position").fill("0")
    tab.page.get_by_label("to be this token").fill("Q")
    tab.page.wait_for_selector(".side .own")
    tab.page.get_by_label("Attention's temperature").last.fill("3")
    tab.page.wait_for_selector(".python:has-text('temperature=3')")
    tab.page.get_by_role("button", name="Undo all").click()
    tab.page.wait_for_selector(".kind:has-text('Nothing moved')")


def test_draw_a_digit(tab):
    tab.open("digit")
    tab.page.get_by_role("button", name="Clear").click()
    tab.page.wait_for_selector("html[data-ready]")
    box = tab.page.locator(".pad").bounding_box()
    tab.page.mouse.move(box["x"] + 150, box["y"] + 50)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 150, box["y"] + 240, steps=8)
    tab.page.mouse.up()
    tab.page.wait_for_selector('html[data-ready="digit 1 1"]')
    assert re.match(r"digit\?ink=", tab.hash)
    assert tab.page.locator(".readers svg").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("panel", ["run", "change", "hand", "masks", "digit", "cost", "claims", "sheets"])
def test_a_narrow_window_needs_no_sideways_scrolling(chromium, page, panel, scheme):
    tab = Tab(chromium, page, color_scheme=scheme, reduced_motion="reduce")
    tab.page.set_viewport_size({"width": 400, "height": 800})
    tab.open(panel)
    wide = tab.page.evaluate("document.documentElement.scrollWidth")
    tab.context.close()
    assert wide <= 400
    assert tab.wrong == []
