"""The process that renders the templates of one model. Its standard input is the connection to the gateway.

It compiles the templates, and a fork of it renders. A fork that a limit has ended is replaced within milliseconds: a
new interpreter would take as long as hundreds of conversations.

The operating system holds it to its limits: a template can spend time and memory in ways that no sandbox counts, such
as `'a' * 10**10`, a pattern, or lists that contain each other.
"""

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
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
# Exit status of a fork whose memory is not empty; it has answered.
_USED = 75


class Answer(NamedTuple):
    """The result of a rendering: a text, or the reason why there is none.

    `limit`: a limit is the reason; `timed_out`: it is that of time. `seconds` of processor time were used.
    """

    text: str | None
    reason: str = ""
    limit: bool = False
    timed_out: bool = False
    seconds: float = 0.0


TIMED_OUT = Answer(None, f"it takes more than {RENDER_SECONDS:.0f} seconds of processor time", True, True)


def main() -> None:
    """Receive the templates, then answer each request until the connection ends."""
    connection = socket.socket(fileno=0)
    _bound_memory()
    try:
        templates = {name: _compiled(source) for name, source in receive(connection).items()}
    except EOFError:
        return
    gc.freeze()  # forks share it
    own = os.getpid()
    while child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == -signal.SIGPROF:
            send(connection, TIMED_OUT)
        elif status != _USED:
            _end_like(status)
    _serve(connection, templates, own)


def _serve(connection: socket.socket, templates: Mapping[str, "jinja2.Template | Answer"], parent: int) -> None:
    """Answer requests until the connection or the parent has ended, or a limit was met."""
    answer = Answer(None)
    while not answer.limit:
        try:
            request = receive(connection)
        except EOFError:
            os._exit(0)
        if os.getppid() != parent:
            os._exit(0)
        answer = _answer(templates[request["template"]], request["variables"], request["seconds"])
        send(connection, answer)
    os._exit(_USED)  # an interpreter without memory cannot always end


def _end_like(status: int) -> None:
    """End this process with the exit status of another one."""
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _answer(template: "jinja2.Template | Answer", variables: Mapping[str, Any], seconds: float) -> Answer:
    if isinstance(template, Answer):
        return template
    started = time.process_time()
    try:
        with _CpuTime(seconds):
            answer = _rendered(template, variables)
    except MemoryError:
        answer = Answer(None, f"it needs more than {MAX_MEMORY >> 20} MiB of memory", limit=True)
    except Exception as error:  # a template is a program and can raise anything
        answer = Answer(None, str(error)[:_MAX_REASON])
    return answer._replace(seconds=time.process_time() - started)


def _compiled(source: str) -> "jinja2.Template | Answer":
    """Return the template, or the answer to each request for it."""
    try:
        with _CpuTime(COMPILE_SECONDS):
            return compile_template(source)
    except InvalidTemplate as error:
        return Answer(None, f"it is not valid Jinja: {error}")


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
