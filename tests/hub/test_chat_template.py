"""Chat templates: the same text as transformers' `apply_chat_template`, in a sandbox."""

from __future__ import annotations

import json

import pytest

from clearhead import hub
from clearhead.errors import DataError
from clearhead.hub.chat_template import render
from tests.support.tokenizers import save_chat_model

CONVERSATION = [
    {"role": "system", "content": '  Be brief. <ü> & "so"'},
    {"role": "user", "content": "Hello!\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "the quick brown fox?"},
]
# Like those of SmolLM2, Llama 2, Zephyr and tool-calling models: trimming, loops, exceptions and JSON.
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
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.mark.parametrize("name", TEMPLATES)
def test_encode_chat_matches_transformers(folder, name):
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    text = reference.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    trained = hub.pipeline(folder)
    values = {**trained.tokenizer.specials, "add_generation_prompt": True, "tools": None, "documents": None}
    assert render(trained.source.template(), CONVERSATION, values) == text
    assert len(text) > 60
    ids = hub.encode_chat(trained, CONVERSATION)
    assert ids == reference.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]


def test_chat_uses_the_default_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    named_templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATES["im_start"]}]
    settings_file.write_text(json.dumps({**settings, "chat_template": named_templates}))
    trained = hub.pipeline(folder)
    prompt = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\ndog<|im_end|>\n<|im_start|>assistant\n"
    expected = trained.generate(prompt, max_new_tokens=6)
    messages = [{"role": "user", "content": "dog"}]
    assert trained.chat(messages, max_new_tokens=6) == expected
    assert trained.chat([CONVERSATION, messages], max_new_tokens=6)[1] == expected
    assert "".join(trained.stream(messages, max_new_tokens=6)) == expected
    settings_file.write_text(json.dumps(settings))
    with pytest.raises(DataError, match="has no chat template"):
        hub.pipeline(folder).chat(messages)


HOSTILE = {
    "underscores": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "imports": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('id').read() }}",
    "changes": "{% set _ = messages.append({'role': 'user', 'content': 'x'}) %}",
    "files": "{% include '/etc/passwd' %}",
    "size": "{{ 'x' * 10000000000 }}",
    "growth": "{% set n = namespace(t='xx') %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "long": "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}",
    "forever": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "syntax error": "{% if %}",
    "refusal": "{{ raise_exception('users first') }}",
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_raises_data_error(name):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(DataError, match="the chat template cannot be rendered: ") as error:
        render(HOSTILE[name], messages, {}, max_seconds=1)
    assert len(str(error.value)) < 500
    assert len(messages) == 1
    if name == "refusal":
        assert "users first" in str(error.value)


@pytest.mark.bad_input
def test_chat_message_without_role_raises(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATES["im_start"])
    with pytest.raises(DataError, match="expected a role and a content"):
        hub.pipeline(folder).chat([{"content": "x"}])
