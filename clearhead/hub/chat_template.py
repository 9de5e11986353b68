"""Render chat templates in a separate process, because a template is an untrusted program.

It runs in Jinja's sandbox without access to Python, with limits of memory and time against endless loops and texts. Run
as a script: JSON in, JSON out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

SECONDS, BYTES, LONGEST = 10, 1 << 29, 1 << 22  # of the process; of its text, in characters


def render(template: str, messages: Sequence[Mapping[str, str]], values: Mapping[str, Any]) -> str:
    """Render a conversation as one text; `values` are the template's special tokens and settings."""
    from clearhead.errors import DataError

    asked = json.dumps({"template": template, "values": {"messages": list(messages), **values}})
    command = [sys.executable, "-P", str(Path(__file__))]  # -P: modules beside this file are not those of Python
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        answer = {"error": "it takes more time or memory than a template needs"}
    if "error" in answer:
        raise DataError(f"the chat template cannot be rendered: {answer['error']}")
    return answer["text"]


def _rendered(template: str, values: dict[str, Any]) -> str:
    """Render in the environment that transformers uses."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's messages, for training only."""

        tags = {"generation"}  # noqa: RUF012 (as the library has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: Any, **strategy: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **strategy})

    extensions: list[Any] = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template).render(**values)


def _main() -> None:
    asked = json.load(sys.stdin)
    try:
        import jinja2  # noqa: F401
    except ImportError:
        answer = {"error": "it needs jinja2: pip install 'clearhead[weights]'"}
    else:
        _confine()
        try:
            text = _rendered(asked["template"], asked["values"])
            answer = {"text": text} if len(text) <= LONGEST else {"error": f"its text has {len(text):,} characters"}
        except (Exception, MemoryError) as error:  # an untrusted program may raise anything
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(answer, sys.stdout)


def _confine() -> None:
    try:
        import resource
    except ImportError:  # not on Windows, where the time alone is limited
        return
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


if __name__ == "__main__":
    _main()
