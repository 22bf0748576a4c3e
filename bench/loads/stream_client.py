"""A light client process for `bench system` that runs many streams at once and reports their times.

`python -m bench.loads.stream_client ADDRESS` prints its name as JSON. For each line of work it prints the seconds from
the first call to the end of the last answer, and its CPU seconds.
"""

import asyncio
import json
import sys
import time
from typing import Any

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.runtime import transport

CALL_SECONDS = 240
READY_SECONDS = 30

Item = dict[str, Any]


async def run(address: str, work: list[Item]) -> dict[str, float]:
    """Run all requests at once, over an open connection."""
    requests = [request_of(item) for item in work]
    async with transport.channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), READY_SECONDS)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        begun, used = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(*(_tokens_of(stub, request) for request in requests))
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - used
    assert counts == [item["tokens"] for item in work], f"answers of {counts} tokens"
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def request_of(item: Item) -> gateway_pb2.GenerateRequest:
    """Build a greedy request with a prompt of token ids and a given output length."""
    request = gateway_pb2.GenerateRequest()
    request.prompt.token_ids.ids.extend(item["prompt"])
    request.sampling.temperature = 0
    request.stopping.max_tokens = item["tokens"]
    request.stopping.ignore_eos = True
    return request


async def _tokens_of(stub: Any, request: gateway_pb2.GenerateRequest) -> int:
    """Return the number of received tokens."""
    count = 0
    async for response in stub.Generate(request, timeout=CALL_SECONDS):
        count += len(response.delta.token_ids)
    return count


def main() -> None:
    """Answer each line of work."""
    print(json.dumps({"name": "client"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(sys.argv[1], json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
