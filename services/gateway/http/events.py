"""Server-sent events as bytes, and a response of them as OpenAI's clients expect it."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from services.runtime.http.server_sent_events import Events, ServerSentEvents

DONE = b"data: [DONE]\n\n"

# As it is, unlike what `json.dumps` makes of text that is not ASCII; and without blanks.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: Any) -> bytes:
    """Return one event with a JSON value."""
    return b"data: %b\n\n" % to_json(value).encode()


class EventStream(ServerSentEvents):
    """A response in OpenAI's way: the last event says that it is done, and one before it what went wrong, if it did."""

    def __init__(
        self, first: bytes, rest: Events, fault: Callable[[Exception], Mapping[str, Any]], headers: Mapping[str, str]
    ) -> None:
        """`fault` returns what the client is sent about an error in mid-stream."""
        super().__init__(first, _with_its_end(rest, fault), {"cache-control": "no-cache", **headers})


async def _with_its_end(events: Events, fault: Callable[[Exception], Mapping[str, Any]]) -> Events:
    async with aclosing(events):
        try:
            async for one in events:
                yield one
        except Exception as error:  # the status is sent: all that is left is to say it here
            yield event(fault(error))
    yield DONE


async def merged(streams: Sequence[Events]) -> Events:
    """Yield the events of all streams as they come. The first error ends all of them."""
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                one, stream = task.result(), waiting.pop(task)
                if one is not None:
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
                    yield one
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
