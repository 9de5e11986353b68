"""Third-party models, masks of nothing, and interventions that a model does not have, as the page shows them."""

from __future__ import annotations

import json
import os

import pytest

from tests.explorer.conftest import serving
from tests.support.browser import BROWSER
from tests.support.browser_tab import Tab
from tests.support.tokenizers import save_chat_model

pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
)
# Send a request and abort it after some milliseconds, as a user does who types on.
ABORT = """async ([action, body, wait]) => {
  const controller = new AbortController();
  setTimeout(() => controller.abort(), wait);
  const headers = { "content-type": "application/json" }, { signal } = controller;
  const sent = fetch(`api/${action}`, { method: "POST", headers, body: JSON.stringify(body), signal });
  await sent.then((response) => response.text()).catch(() => null);
}"""


@pytest.fixture(scope="module")
def chat_page(tmp_path_factory):
    """A page with one third-party decoder that has a chat template; yields the client and the server's log."""
    folder = save_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    log = folder.parent / "log"
    with log.open("w") as errors, serving(str(folder), "--workers", "2", errors=errors) as client:
        client.post("models", {})
        yield client, log


def test_third_party_decoder_has_a_short_name_neutral_examples_and_its_chat_template(chromium, chat_page):
    client, log = chat_page
    assert client.greeting.startswith("1 model, 2 workers.")
    tab = Tab(chromium, client)
    tab.open("model")
    tab.wait_for_view("attention")
    assert tab.page.get_by_label("Model", exact=True).locator("option").all_inner_texts() == ["tiny-chat"]
    examples = tab.page.locator(".examples button").all_inner_texts()
    assert examples[0] == "What is the capital of France?"
    assert not any("ROMEO" in example for example in examples)
    template = tab.page.get_by_label("Apply the chat template")
    assert template.is_checked()
    assert "<reply>" in tab.page.locator(".answer-input").inner_text().replace(" ", "")
    template.uncheck()
    tab.page.wait_for_function("() => !document.querySelector('.answer-input').innerText.includes('reply')")
    assert str(log.parent) not in tab.page.content()
    ids = client.post("run", {"model": "tiny-chat", "text": "the fox", "chat": True})["ids"]
    for wait in range(0, 60, 6):
        body = {"model": "tiny-chat", "ids": ids, "n_prompt": len(ids)}
        tab.page.evaluate(ABORT, ["walkthrough", body, wait])
    client.post("run", {"model": "tiny-chat", "text": "the fox"})
    tab.context.close()
    assert tab.problems == []
    assert log.read_text() == ""  # no warnings of torch, no tracebacks


def test_second_texts_of_a_chat_model_are_messages_too(chromium, chat_page):
    """Patching and patches apply the chat template to the second text, so that both texts have equal lengths."""
    tab = Tab(chromium, chat_page[0])
    tab.open("interpret?model=tiny-chat&text=the+fox&view=patching&other=the+dog")
    tab.wait_for_view("patching")
    assert tab.page.locator(".problem:not(:empty)").count() == 0
    assert "patching" in tab.page.locator(".choices [aria-pressed=true]").first.inner_text().lower()
    headings = tab.page.locator(".heat thead th").all_inner_texts()
    assert sum("→" in heading for heading in headings) >= 1
    tab.open("intervention?model=tiny-chat&text=the+fox&edits=blocks.0.attention:0:patch&source=the+dog")
    tab.page.wait_for_selector(".python:has-text('PatchActivation')")
    assert tab.page.locator(".problem:not(:empty)").count() == 0
    tab.context.close()
    assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_mask_of_nothing_is_described_without_a_share_and_without_a_color(chromium, page, scheme):
    tab = Tab(chromium, page, color_scheme=scheme)
    tab.open("mask?e=~full()&n=64")
    tab.ready("mask ~full()")
    tab.page.locator(".catalogue .card").first.wait_for()
    text = tab.page.locator("#panel").inner_text()
    assert "of them are allowed" not in text
    assert "0 of 4,096" in text
    assert "colored pairs may attend" in text
    assert "dark" not in text.lower()
    tab.context.close()
    assert tab.problems == []


def test_plan_of_a_mask_counts_a_single_block_as_one(tab):
    tab.open("mask?e=causal()+%26+window(8,+0)&n=64")
    tab.ready("mask causal()")
    assert "1 block of 64 consecutive queries" in tab.page.locator(".plan-text").inner_text()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ("blocks.9.attention:0:zero", "“blocks.9.attention” is not a part of sort-dedup"),
        ("blocks.0.attention:7:zero", "blocks.0.attention has no head 7"),
        ("blocks.0.attention:0:melt", "“melt” is not a kind of intervention"),
    ],
)
def test_interventions_of_the_address_that_the_model_lacks_are_named_and_omitted(tab, edits, message):
    tab.open(f"intervention?model=sort-dedup&text=D+A+C&edits={edits};blocks.1.attention:2:zero")
    tab.page.wait_for_selector(".python:has-text('analysis.ZeroAblation(heads=[2])')")
    assert tab.page.locator(".omitted").inner_text() == f"{message}; this intervention is omitted."
    assert edits.partition(":")[2] not in tab.hash
    tab.page.get_by_role("button", name="Undo all").click()
    tab.page.wait_for_selector(".kind:has-text('No intervention yet')")
    assert tab.page.locator(".omitted").inner_text() == ""


def test_page_reports_workers_that_cannot_be_started(chromium, tmp_path):
    """A package that cannot be imported ends in one sentence on the page and in the terminal."""
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(
        "import sys\nif 'clearhead.explorer.worker' in sys.orig_argv:\n    raise SystemExit('broken installation')\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    log = tmp_path / "log"
    with log.open("w") as errors:
        environment = os.environ | {"PYTHONPATH": path}
        with serving("sort-dedup", "--workers", "1", errors=errors, env=environment) as client:
            tab = Tab(chromium, client)
            for _ in range(2):  # also after a reload
                tab.page.goto("about:blank")
                tab.page.goto(f"{client.address}#model")
                tab.page.wait_for_selector(".pane[data-state=error]:has-text('no worker could be started')")
            tab.context.close()
    assert log.read_text().count("Fatal Python error") == 3
    assert log.read_text().count("no worker could be started in 3 attempts") == 1
