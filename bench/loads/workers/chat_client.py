"""A light client process for `bench dialects_cpu`: many streamed chats at once over HTTP, and when each began.

It prints its name as JSON. A line is a list of `{"address": ..., "bodies": [...]}`, one for each gateway. For each it
opens a connection for each body, sends all requests at once, to the gateways in turn, and prints what came from each.
It looks for the first part of an answer only while none has come, and reads the events when all have ended, so that it
takes little time beside a gateway.
"""

import asyncio
import json
import re
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

STREAM_SECONDS = 120
# The role comes first, with empty content; an answer begins with a text, a thought, or the name of a called tool.
_BEGINS = re.compile(rb'"(?:content|reasoning|name)":"[^"]')

Body = dict[str, Any]


class ChatStream(asyncio.Protocol):
    """One request on its own connection, which ends with the response."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.sent = 0.0
        self.first: float | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self.parts.append(data)
        if self.first is None and _BEGINS.search(data):
            self.first = time.perf_counter()

    def connection_lost(self, error: Exception | None) -> None:
        """End the stream."""
        if error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def events(self) -> list[dict[str, Any]]:
        """Return the chunks. Raises AssertionError for a response that did not end as it should."""
        lines = b"".join(self.parts).splitlines()
        found = [line[6:] for line in lines if line.startswith(b"data: ")]
        assert found[-1:] == [b"[DONE]"], lines[:20]
        return [json.loads(one) for one in found[:-1]]


async def run(sides: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run all requests at once; return what came from each gateway."""
    opened = [[await _opened(side["address"]) for _ in side["bodies"]] for side in sides]
    encoded = [[_request(body) for body in side["bodies"]] for side in sides]
    for connections, requests in zip(zip(*opened, strict=True), zip(*encoded, strict=True), strict=True):
        for (transport, stream), request in zip(connections, requests, strict=True):
            stream.sent = time.perf_counter()
            transport.write(request)
    streams = [[stream for _, stream in side] for side in opened]
    await asyncio.wait_for(asyncio.gather(*(one.ended for side in streams for one in side)), STREAM_SECONDS)
    return [_result(side) for side in streams]


async def _opened(address: str) -> tuple[asyncio.Transport, ChatStream]:
    host, _, port = address.rpartition(":")
    return await asyncio.get_running_loop().create_connection(ChatStream, host, int(port))


def _result(streams: list[ChatStream]) -> dict[str, Any]:
    """Return the median seconds to the first part of an answer, and what the answers have."""
    waits = [stream.first - stream.sent for stream in streams if stream.first is not None]
    assert len(waits) == len(streams), f"{len(waits)} of {len(streams)} answers began"
    return {"first_token_seconds": median(waits), **counted([event for one in streams for event in one.events()])}


def counted(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of chunks and tokens, and how many characters came of each part of the answers."""
    total: Counter[str] = Counter()
    for event in events:
        total["chunks"] += bool(event["choices"])
        for name in ("prompt_tokens", "completion_tokens"):
            total[name] += (event["usage"] or {}).get(name, 0)
        for choice in event["choices"]:
            total.update(_parts(choice["delta"]))
    return dict(total)


def _parts(delta: dict[str, Any]) -> Counter[str]:
    calls = delta.get("tool_calls", ())
    return Counter(
        text=len(delta.get("content") or ""),
        thought=len(delta.get("reasoning") or ""),
        calls=sum("id" in call for call in calls),
        arguments=sum(len(call["function"]["arguments"]) for call in calls),
    )


def _request(body: Body) -> bytes:
    content = json.dumps(body, ensure_ascii=False).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: quire\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def main() -> None:
    """Answer each line of work."""
    print(json.dumps({"name": "client"}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"sides": asyncio.run(run(json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main()
