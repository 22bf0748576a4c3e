"""Runs the open lines of a batch, a bounded number at a time, and appends their answers in order of completion."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.cli.batch.answers import AnswerFile, answered, message_of, refused_line
from services.cli.batch.endpoints import Endpoint, Response, Unreachable
from services.cli.batch.lines import Line

_SUCCESS = 200
_RETRIED = (429, 503)
# Between the attempts of a request, in seconds: together enough for the restart of a server.
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0)
_USAGE = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))


@dataclass
class Totals:
    """What a run has done; times are in seconds. Tokens are those that the answers report."""

    answers: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    started: float = 0.0
    ended: float = 0.0
    cpu_started: float = 0.0
    cpu_ended: float = 0.0

    def start(self) -> None:
        """Take the time of the first request."""
        self.started, self.cpu_started = time.monotonic(), time.process_time()

    def add(self, answer: dict[str, Any]) -> None:
        """Count an answer."""
        self.answers += 1
        self.ended, self.cpu_ended = time.monotonic(), time.process_time()
        self.failures += answer["error"] is not None
        body = (answer["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            return
        prompt, generated = (next((usage[name] for name in names if name in usage), 0) for names in _USAGE)
        self.prompt_tokens += prompt or 0
        self.generated_tokens += generated or 0
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.cached_tokens += details.get("cached_tokens") or 0

    @property
    def seconds(self) -> float:
        """The time from the first request to the last answer."""
        return self.ended - self.started if self.answers else 0.0

    @property
    def cpu_seconds(self) -> float:
        """The processor time of this process meanwhile."""
        return self.cpu_ended - self.cpu_started if self.answers else 0.0


class Window:
    """Bounds the sequences in flight; a request of more than the bound runs alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._freed = asyncio.Event()

    async def enter(self, sequences: int) -> int:
        """Wait for room, and return what `leave` gives back."""
        size = min(sequences, self._most)
        while self._used + size > self._most:
            self._freed.clear()
            await self._freed.wait()
        self._used += size
        return size

    def leave(self, size: int) -> None:
        """Give room back."""
        self._used -= size
        self._freed.set()


async def run(
    lines: Iterable[Line],
    endpoint: Endpoint,
    answers: AnswerFile,
    window: Window,
    totals: Totals,
    on_answer: Callable[[Totals], None],
) -> None:
    """Answer all lines, and count what is done in `totals`. Raises Unreachable if the server stays away.

    Answers so far are in the file then, as they are if it is cancelled; requests in flight have none.
    """
    totals.start()

    async def answer(line: Line, size: int) -> None:
        try:
            found = refused_line(line) if line.fault else await _answer(line, endpoint)
        finally:
            window.leave(size)
        answers.append(found)
        totals.add(found)
        on_answer(totals)

    async with _tasks() as tasks:
        for line in lines:
            size = await window.enter(line.sequences)
            tasks.create_task(answer(line, size))


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks that raises the first error itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _answer(line: Line, endpoint: Endpoint) -> dict[str, Any]:
    response = await _response(line, endpoint)
    return answered(line, response.status, response.request_id, response.body)


async def _response(line: Line, endpoint: Endpoint) -> Response:
    """Return the response, with retries where the server is full or away."""
    body = json.dumps(line.body, ensure_ascii=False).encode()
    pauses = iter(_PAUSES)
    while True:
        pause = next(pauses, None)
        try:
            response = await endpoint.post(line.url, body)
            if response.status not in _RETRIED:
                return response
            if pause is None:
                raise Unreachable(f"the server answers with status {response.status}: {message_of(response.body)}")
            pause = min(response.retry_seconds or pause, _PAUSES[-1])
        except Unreachable:
            if pause is None:
                raise
        await asyncio.sleep(pause * (1 + random.random()))  # noqa: S311  # so that not all come back at once
