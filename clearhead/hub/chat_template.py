"""Render chat templates in a separate process, because a template is an untrusted program.

The process renders in Jinja's sandbox, without access to Python and with limits on memory and time. This file is its
script: it reads JSON from stdin and writes JSON to stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

MAX_SECONDS = 10
MAX_BYTES = 1 << 29
MAX_CHARACTERS = 1 << 22  # of the rendered text


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    values: Mapping[str, object],
    *,
    max_seconds: int = MAX_SECONDS,
) -> str:
    """Render a conversation as one text.

    Args:
        template: The Jinja template.
        messages: The conversation.
        values: Special tokens and settings of the template.
        max_seconds: Limit on processor time.

    Raises:
        DataError: If the template fails, or exceeds the limits.
    """
    from clearhead.errors import DataError

    values = {"messages": list(messages), **values}
    request = json.dumps({"template": template, "values": values, "max_seconds": max_seconds})
    command = [sys.executable, "-P", str(Path(__file__))]  # -P: do not import from this folder
    try:
        process = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=3 * max_seconds, check=False
        )
        response = json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        response = {"error": "it exceeds the limit of time or memory"}
    if "error" in response:
        raise DataError(f"the chat template cannot be rendered: {response['error']}")
    return str(response["text"])


def _render_sandboxed(template: str, values: dict[str, Any]) -> str:
    """Render in the environment that transformers uses."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's messages, for training only."""

        tags = {"generation"}  # noqa: RUF012 (as in jinja2)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    extensions: list[object] = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = as_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    return environment.from_string(template).render(**values)


def _main() -> None:
    """Render the request from stdin and write the response to stdout."""
    request = json.load(sys.stdin)
    try:
        import jinja2  # noqa: F401
    except ImportError:
        response = {"error": "it needs jinja2: pip install 'clearhead[hub]'"}
    else:
        _limit_resources(request["max_seconds"])
        try:
            text = _render_sandboxed(request["template"], request["values"])
            response = (
                {"text": text} if len(text) <= MAX_CHARACTERS else {"error": f"its text has {len(text):,} characters"}
            )
        except (Exception, MemoryError) as error:  # an untrusted program may raise anything
            response = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(response, sys.stdout)


def _limit_resources(max_seconds: int) -> None:
    """Limit memory, processor time and open files of this process."""
    try:
        import resource
    except ImportError:  # Windows: only the time is limited
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


if __name__ == "__main__":
    _main()
