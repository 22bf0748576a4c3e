"""Server-sent events in OpenAI's format."""

import asyncio
import json
import json.encoder
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from services.runtime.http.server_sent_events import Events, ServerSentEvents

DONE = b"data: [DONE]\n\n"

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
text_to_json = json.encoder.encode_basestring
"""The same for a text, which is sent for each token."""


def event(value: Any) -> bytes:
    """Encode a JSON value as one event."""
    return b"data: %b\n\n" % to_json(value).encode()


class EventStream(ServerSentEvents):
    """A streamed response. An error in mid-stream is an event of its own; the last event is `[DONE]`."""

    def __init__(
        self,
        first: bytes,
        rest: Events,
        error_body: Callable[[Exception], Mapping[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        """`error_body` returns the JSON sent to the client for an error in mid-stream."""
        super().__init__(first, _with_done(rest, error_body), {"cache-control": "no-cache", **headers})


async def _with_done(events: Events, error_body: Callable[[Exception], Mapping[str, Any]]) -> Events:
    async with aclosing(events):
        try:
            async for one in events:
                yield one
        except Exception as error:  # the status line is sent already, so the error becomes an event
            yield event(error_body(error))
    yield DONE


async def merge(streams: Sequence[Events]) -> Events:
    """Yield the events of all streams in the order in which they are made. The first error ends all streams."""
    waiting: dict[asyncio.Future[bytes | None], Events] = {}
    made: asyncio.Queue[asyncio.Future[bytes | None]] = asyncio.Queue()

    def read(stream: Events) -> None:
        task = asyncio.ensure_future(anext(stream, None))
        waiting[task] = stream
        task.add_done_callback(made.put_nowait)

    task: asyncio.Future[bytes | None] | None = None
    for stream in streams:
        read(stream)
    try:
        while waiting:
            task = await made.get()
            one, stream = task.result(), waiting.pop(task)
            if one is not None:
                read(stream)
                yield one
    finally:
        for unread in waiting:
            unread.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        # The error of a task has this frame in its traceback: a cycle, which would keep all prompts.
        waiting.clear()
        task = None
