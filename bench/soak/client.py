"""A client process of a soak, which can be killed: `python -m bench.soak.client ADDRESSES URLS MIX SEED WORKERS`.

It runs mixed requests from a line `run` to a line `rest`. Then it waits for those in flight, closes its connections,
and prints how many requests of each kind ended with each status.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
import grpc

from bench.soak.requests import BROKEN, MIXES, RequestMix, grpc_status, http_status
from quire.v1 import gateway_pb2_grpc
from services.runtime import transport

_BROKEN_SECONDS = 1.0
_HTTP_SHARE = 0.4


class SoakClient:
    """Workers that each send one request after the other, to gateways at random."""

    def __init__(self, addresses: list[str], urls: list[str], mix: RequestMix, seed: int, workers: int) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.unexpected: list[str] = []
        self._addresses, self._urls, self._mix, self._workers = addresses, urls, mix, workers
        self._draw = random.Random(seed)

    async def run(self, over: asyncio.Event) -> None:
        """Send requests until `over` is set, and wait for their ends."""
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(transport.channel(one)) for one in self._addresses]
            stubs = [gateway_pb2_grpc.GatewayStub(one) for one in channels]
            http = await stack.enter_async_context(aiohttp.ClientSession())
            await asyncio.gather(*(self._work(stubs, http, over) for _ in range(self._workers)))

    async def _work(self, stubs: list[Any], http: aiohttp.ClientSession, over: asyncio.Event) -> None:
        while not over.is_set():
            if self._draw.random() < _HTTP_SHARE:
                kind, status = await self._http(http)
            else:
                kind, status = await self._grpc(stubs)
            self.counts[kind, status] += 1
            pause = _BROKEN_SECONDS if status in BROKEN else 2 * self._mix.pause_seconds * self._draw.random()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), pause)

    async def _grpc(self, stubs: list[Any]) -> tuple[str, str]:
        kind = self._draw.choice(self._mix.grpc)
        try:
            status = await grpc_status(self._draw.choice(stubs), kind, self._draw)
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            self._check(kind.name, status, kind.statuses, error.details() or "")
        return kind.name, status

    async def _http(self, http: aiohttp.ClientSession) -> tuple[str, str]:
        kind = self._draw.choice(self._mix.http)
        status, text = await http_status(http, self._draw.choice(self._urls), kind, self._draw)
        self._check(kind.name, status, kind.statuses, text)
        return kind.name, status

    def _check(self, name: str, status: str, expected: frozenset[str], text: str) -> None:
        if status not in expected:
            self.unexpected.append(f"{name}: {status}: {text[:300]}")


async def main(addresses: str, urls: str, mix: str, seed: str, workers: str) -> None:
    """Run and rest as the lines on standard input say."""
    client = SoakClient(addresses.split(","), urls.split(","), MIXES[mix], int(seed), int(workers))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        over = asyncio.Event()
        running = asyncio.create_task(client.run(over))
        await lines.readline()  # rest, or the end of the input
        over.set()
        await running
        counts = [[*key, count] for key, count in sorted(client.counts.items())]
        print(json.dumps({"counts": counts, "unexpected": client.unexpected}), flush=True)
        client.counts.clear()
        client.unexpected.clear()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
