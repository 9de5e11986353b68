"""Conversations by a maker's own template: the text of transformers' `apply_chat_template`, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from clearhead import hub
from clearhead.errors import DataError
from clearhead.hub import chat_template as templates
from clearhead.hub.chat_template import render
from tests.data.tokenizers.test_library import byte_pairs
from tests.support.third_party_models import PEERS

TALK = [
    {"role": "system", "content": '  Be brief. <ü> & "so"'},
    {"role": "user", "content": "Hello!\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "the quick brown fox?"},
]
# As SmolLM2, Llama 2, Zephyr and tool-calling models have them, in their ways to trim, loop, fail and write JSON.
TEMPLATES = {
    "im_start": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>"
    "system\nYou help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "inst": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% if "
    "loop.index0 == 0 and system_message != false %}{% set content = "
    "'<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + "
    "eos_token }}{% endif %}{% endfor %}",
    "blocks": """
{%- set ns = namespace(found=false, n=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.found = true %}
        {%- continue %}
    {%- endif %}
    {%- set ns.n = ns.n + 1 %}
    {% generation %}
{{ '<|' ~ message.role|upper ~ '|>' }}
{{ message.content | trim | tojson(indent=2) }}{{ eos_token }}
    {% endgeneration %}
    {%- if ns.n > 2 %}{% break %}{% endif %}
{%- endfor %}
{{- ns.n }} {{ ns.found }} {{ tools is none }} {{ unk_token is defined }}
{%- if add_generation_prompt %}
<|ASSISTANT|>
{%- endif %}
""",
    "macros": "{% macro say(m) %}<{{ m.role }}>{{ m['content'].split('?')[0].lstrip() }}</{{ m.role }}>{% endmacro %}"
    "{{ bos_token }}{% for m in messages if m.role in ['user', 'assistant'] %}{{ say(m) }}{{ '-' * 3 }}{% endfor %}"
    "{{ messages | map(attribute='role') | join(',') }}{{ messages[-1] | tojson }}{{ strftime_now('%Y') | length }}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer that transformers can load."""
    inner, specials = byte_pairs()
    peer = PEERS["llama"]
    sizes = peer.sizes | {"vocab_size": inner.get_vocab_size(), "max_position_embeddings": 500}
    peer = replace(peer, sizes=sizes)
    folder = tmp_path_factory.mktemp("chat") / "model"
    peer.save(peer.build(), folder)
    inner.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_are_those_of_transformers(folder, name):
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    trained = hub.pipeline(folder)
    values = {**trained.tokenizer.specials, "add_generation_prompt": True, "tools": None, "documents": None}
    assert render(trained.source.template(), TALK, values) == text
    assert len(text) > 60
    ids = hub.encode_chat(trained, TALK)
    assert ids == theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]


def test_a_model_answers_by_its_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    about = folder / "tokenizer_config.json"
    settings = json.loads(about.read_text())
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATES["im_start"]}]
    about.write_text(json.dumps({**settings, "chat_template": several}))
    trained = hub.pipeline(folder)
    said = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\ndog<|im_end|>\n<|im_start|>assistant\n"
    wanted = trained.generate(said, max_new_tokens=6)
    talk = [{"role": "user", "content": "dog"}]
    assert trained.chat(talk, max_new_tokens=6) == wanted
    assert trained.chat([TALK, talk], max_new_tokens=6)[1] == wanted
    assert "".join(trained.stream(talk, max_new_tokens=6)) == wanted
    about.write_text(json.dumps(settings))
    with pytest.raises(DataError, match="has no chat template"):
        hub.pipeline(folder).chat(talk)


HOSTILE = {
    "underscores": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "imports": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('id').read() }}",
    "changes": "{% set _ = messages.append({'role': 'user', 'content': 'x'}) %}",
    "files": "{% include '/etc/passwd' %}",
    "size": "{{ 'x' * 10000000000 }}",
    "growth": "{% set n = namespace(t='xx') %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "long": "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}",
    "forever": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "no template": "{% if %}",
    "refusal": "{{ raise_exception('users first') }}",
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_contained(name, monkeypatch, tmp_path):
    # The same file with less patience, so that the test is quick.
    file = tmp_path / "template.py"
    with open(templates.__file__, encoding="utf-8") as given:
        file.write_text(given.read().replace("SECONDS, BYTES, LONGEST = 10", "SECONDS, BYTES, LONGEST = 1"))
    monkeypatch.setattr(templates, "__file__", str(file))
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(DataError, match="the chat template cannot be rendered: ") as error:
        render(HOSTILE[name], talk, {})
    assert len(str(error.value)) < 500
    assert len(talk) == 1
    if name == "refusal":
        assert "users first" in str(error.value)


@pytest.mark.bad_input
def test_a_message_without_a_role_is_refused(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATES["im_start"])
    with pytest.raises(DataError, match="expected a role and a content"):
        hub.pipeline(folder).chat([{"content": "x"}])
