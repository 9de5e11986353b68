"""In a browser: notebook styles do not change worksheets, and the site's styles do not cut equations."""

from __future__ import annotations

import importlib

import pytest

from clearhead.course import exercises
from tests.docs.pages import DOCS
from tests.support.browser import BROWSER

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed"),
]

# JupyterLab's rules for tables in outputs, with colors instead of its variables.
NOTEBOOK = """
.jp-RenderedHTMLCommon table { border-collapse: collapse; border-spacing: 0; border: none; color: #000; font-size: 12px;
  table-layout: fixed; margin-left: auto; margin-right: auto; margin-bottom: 1em; }
.jp-RenderedHTMLCommon thead { border-bottom: 1px solid #bdbdbd; vertical-align: bottom; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th, .jp-RenderedHTMLCommon tr { vertical-align: middle;
  padding: 0.5em 0.5em; line-height: normal; white-space: normal; max-width: none; border: none; text-align: right; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: #ffffff; }
.jp-RenderedHTMLCommon tbody tr:nth-child(even) { background: #f5f5f5; }
.jp-RenderedHTMLCommon tbody tr:hover { background: #e1f5fe; }
"""
STYLES = """() => [...document.querySelectorAll('.chw table')].map(table => {
  const of = (element, name) => getComputedStyle(element)[name];
  const first = table.querySelector('tbody td'), rows = [...table.querySelectorAll('tbody tr')];
  return {
    rows: rows.map(row => of(row, 'backgroundColor')), head: of(table.tHead, 'borderBottomWidth'),
    left: of(first, 'borderLeftWidth'), hooks: of(first, 'backgroundImage'), layout: of(table, 'tableLayout'),
  };
})"""


def test_notebook_styles_do_not_change_worksheet_tables():
    from playwright.sync_api import sync_playwright

    sheet = exercises.solve("attention-by-hand")._repr_html_()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_content(f"<style>{NOTEBOOK}</style><div class=jp-RenderedHTMLCommon>{sheet}</div>")
        styles = tab.evaluate(STYLES)
        browser.close()
    assert len(styles) > 5
    for table in styles:
        assert set(table["rows"]) == {"rgba(0, 0, 0, 0)"}
        assert table["head"] == "0px"
        assert float(table["left"].removesuffix("px")) > 0
        assert table["hooks"].startswith("linear-gradient")
        assert table["layout"] == "auto"


def test_limits_of_sums_are_inside_the_box_of_an_equation(monkeypatch):
    pytest.importorskip("sphinx")
    from playwright.sync_api import sync_playwright

    monkeypatch.syspath_prepend(DOCS)
    equation = importlib.import_module("mathml").mathml(r"\prod_{t=1}^{T} P(y_t) = \sum_{i=1}^{N} w_i", block=True)
    style = (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 390, "height": 400})
        tab.set_content(f"<style>{style}</style><div class=math>{equation}</div>")
        content, box = tab.locator(".math").evaluate("element => [element.scrollHeight, element.clientHeight]")
        browser.close()
    assert content <= box
