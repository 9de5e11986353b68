"""`clearhead claims`, run as a person would."""

from __future__ import annotations

import html
import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from clearhead.course.claims import DOCUMENTS, registry, report


@pytest.fixture
def shared_outcomes(monkeypatch, outcomes):
    """Make the command use the outcomes of the session."""
    monkeypatch.setattr(registry.Claim, "run", lambda self, seed=0: outcomes[self.id])


def test_overview_prints_verdict_counts(run, shared_outcomes):
    status, out, error = run()
    assert status == 0, error
    assert "Deep learning final exam" in out
    assert "scale-key-limit" in out
    counts = re.search(
        r"(\d+) claims: (\d+) holds, (\d+) holds conditionally, (\d+) does not hold, (\d+) misprint", out
    )
    assert counts
    total, *parts = map(int, counts.groups())
    assert total == sum(parts) == len(registry.claims())


def test_run_json_contains_verdicts(run):
    status, out, error = run("run", "scale-key-weight", "rnn-update", "key-noise-beta", "--seed", "3", "--json")
    assert status == 0, error
    document = json.loads(out)
    assert [(c["id"], c["verdict"]) for c in document["claims"]] == [
        ("scale-key-weight", "does not hold"),
        ("rnn-update", "holds"),
        ("key-noise-beta", "holds conditionally"),
    ]
    for c in document["claims"]:
        assert {"id", "source", "location", "statement", "verdict", "evidence", "seconds"} <= set(c)
        assert c["evidence"]
    assert document["claims"][0]["counter_example"] == "query -1: weight: 1/3 → 1/5"


def test_show_prints_evidence_and_writes_svg(run, tmp_path):
    status, out, error = run("show", "scale-key-weight", "--svg", str(tmp_path / "a.svg"))
    assert status == 0, error
    for part in (
        "for all queries",
        "does not hold",
        "counter-example: query -1: weight: 1/3 → 1/5",
        "correction:",
        "method:",
        "▁",
    ):
        assert part in out
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_show_says_that_a_document_only_asks(run):
    assert "Q6b (asked, not asserted)" in run("show", "local-windows")[1]
    assert "not asserted" not in run("show", "sparse-saves")[1]


@pytest.mark.parametrize("width", [140, 80, 60, 33])
def test_overview_does_not_truncate_ids(run, shared_outcomes, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, error = run()
    assert status == 0, error
    words = set(out.split())
    assert set(registry.claims()) <= words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "rnn-updat"), "clearhead: no claim is called 'rnn-updat'; did you mean 'rnn-update'?\n"),
        (("show", "rnn-update", "--svg", "a.svg"), "clearhead: the claim 'rnn-update' has no figure"),
        (("coverage", "005"), "clearhead: no document is called '005'"),
        (("quiz", "--from", "2"), "clearhead: no document is called '2'"),
    ],
)
def test_errors_print_one_line(run, arguments, message):
    status, _, error = run(*arguments)
    assert status == 1
    assert error.startswith(message)
    assert error.count("\n") == 1


class Page(HTMLParser):
    """Collect ids and links; raise on tags that do not nest."""

    EMPTY = ("meta", "br", "input", "line", "rect", "polyline", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.verdicts: list[str] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "article":
            self.verdicts.append(attributes["class"])
        self.links += [v for k, v in attrs if k in ("href", "src")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.EMPTY:
            return
        assert self.open.pop() == tag


def test_report_is_self_contained_page(outcomes):
    text = report(list(outcomes.values()))
    page = Page()
    page.feed(text)
    assert page.open == []
    assert set(outcomes) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    classes = {"holds": "holds", "holds conditionally": "conditional", "does not hold": "fails", "misprint": "misprint"}
    for verdict, name in classes.items():
        assert page.verdicts.count(name) == sum(outcome.verdict == verdict for outcome in outcomes.values())
    for theme in {o.claim.theme for o in outcomes.values()}:
        assert f">{registry.THEMES[theme]}</h3>" in text
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        ET.fromstring(svg)


def test_report_contains_statements_and_evidence(outcomes):
    """Claims are ordered by document, and false claims are listed first in the same order."""
    text = report(list(outcomes.values()))
    plain = html.unescape(re.sub(r"<[^>]+>", "", text))
    by_document = [o for d in DOCUMENTS for o in outcomes.values() if o.claim.source == d]
    assert re.findall(r'<article class="\w+" id="([\w-]+)"', text) == [o.claim.id for o in by_document]
    wrong = [o.claim.id for o in by_document if o.verdict in ("does not hold", "misprint")]
    table = text[text.index('id="wrong"') : text.index('id="document-1"')]
    assert re.findall(r'href="#([\w-]+)"', table) == wrong
    assert text.count("<tr class=") == sum(len(o.cases) for o in outcomes.values())
    for word in ("Say instead", "Holds when", "How it was tried.", "Contents", "Questions only"):
        assert word in plain


def test_report_has_search_and_dark_mode(run, shared_outcomes, tmp_path):
    """In a browser: typing hides claims that do not match, and dark mode follows the system."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    browser_at = shutil.which("chromium")
    if browser_at is None:
        pytest.skip("no chromium on this machine")
    assert run("report", str(tmp_path / "page.html"))[0] == 0
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_at, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="dark")
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        visible = page.locator("article:visible")
        assert page.is_checked("#dark")
        assert visible.count() == len(registry.claims())
        page.keyboard.press("/")
        page.keyboard.type("stretched weight SCALE-KEY-WEIGHT")
        assert [article.get_attribute("id") for article in visible.all()] == ["scale-key-weight"]
        assert page.inner_text("#found") == "1 found"
        assert page.locator("h3:visible").count() == 1
        page.keyboard.press("Escape")
        assert visible.count() == len(registry.claims())
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.uncheck("#dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        assert errors == []
        browser.close()


def test_report_command_writes_file(run, shared_outcomes, tmp_path):
    status, out, error = run("report", str(tmp_path / "deep" / "out.html"))
    assert status == 0, error
    assert "claims written to" in out
    assert (tmp_path / "deep" / "out.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
