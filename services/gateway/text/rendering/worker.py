"""The process that renders the templates of one model. Its standard input is the connection to the gateway.

The operating system holds it to its limits: a template can spend time and memory in ways that no sandbox counts, such
as `'a' * 10**10`, a pattern, or lists that contain each other.
"""

import resource
import signal
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from services.gateway.text.rendering.frames import receive, send
from services.models.files.template_language import InvalidTemplate, compile_template

COMPILE_SECONDS = 20.0
RENDER_SECONDS = 2.0
MAX_MEMORY = 256 * 1024 * 1024
MAX_CHARACTERS = 16 * 1024 * 1024
_MAX_REASON = 1000


class Answer(NamedTuple):
    """The result of a rendering: a text, or the reason why there is none. `limit`: a limit is the reason."""

    text: str | None
    reason: str = ""
    limit: bool = False


def main() -> None:
    """Receive the templates, then answer each request until the connection ends."""
    connection = socket.socket(fileno=0)
    _bound_memory()
    try:
        worker = _Worker(receive(connection))
        while True:
            send(connection, worker.answer(receive(connection)))
    except EOFError:
        return


class _Worker:
    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._template = cache(self._compiled)

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Render a template of the request with its variables."""
        try:
            template = self._template(request["template"])
            with _CpuTime(RENDER_SECONDS):
                return _rendered(template, request["variables"])
        except InvalidTemplate as error:
            return Answer(None, f"it is not valid Jinja: {error}")
        except MemoryError:
            return Answer(None, f"it needs more than {MAX_MEMORY >> 20} MiB of memory", limit=True)
        except Exception as error:  # a template is a program and can raise anything
            return Answer(None, str(error)[:_MAX_REASON])

    def _compiled(self, name: str) -> jinja2.Template:
        with _CpuTime(COMPILE_SECONDS):
            return compile_template(self._sources[name])


class _CpuTime:
    """Ends this process by SIGPROF once the block has used this much processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> Answer:
    pieces, characters = list[str](), 0
    for piece in template.generate(variables):
        characters += len(piece)
        if characters > MAX_CHARACTERS:
            return Answer(None, f"it writes more than {MAX_CHARACTERS:,} characters", limit=True)
        pieces.append(piece)
    return Answer("".join(pieces))


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
