"""A client process that records the time of each token, for `bench streams` and `bench overload`.

`python -m bench.loads.load_client ADDRESS` prints its name as JSON. For each line `{"requests", "until", "closed",
"file"}` it runs the requests, writes their outcomes to the file, one JSON object a line, and prints its CPU seconds.
A request is `{"id", "at", "prompt", "tokens"}`: it is sent `at` seconds after the start (open loop), or with `closed`
as soon as fewer than this number are in flight. After `until` seconds requests in flight are cancelled.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.loads.stream_client import request_of
from quire.v1 import gateway_pb2_grpc, status_pb2
from services.runtime import transport

CALL_SECONDS = 600
READY_SECONDS = 30
LEFT = "left"  # the status of a request in flight at the end of the time

Item = dict[str, Any]


@dataclass
class RequestOutcome:
    """The outcome of a request. Times are nanoseconds of the machine's monotonic clock."""

    id: str
    sent: int
    deltas: list[tuple[int, int]] = field(default_factory=list)  # time and number of tokens
    started: int = 0
    ended: int = 0
    status: str = "OK"
    retry_seconds: float | None = None


async def outcome_of(stub: Any, item: Item) -> RequestOutcome:
    """Run a request to its end."""
    request = request_of(item)
    request.request_id = item["id"]
    outcome = RequestOutcome(item["id"], time.monotonic_ns())
    try:
        async for response in stub.Generate(request, timeout=CALL_SECONDS):
            if response.HasField("started"):
                outcome.started = time.monotonic_ns()
            elif count := len(response.delta.token_ids):
                outcome.deltas.append((time.monotonic_ns(), count))
    except grpc.aio.AioRpcError as error:
        outcome.status, outcome.retry_seconds = error.code().name, _retry_seconds(error)
    except asyncio.CancelledError:
        outcome.status = LEFT
    outcome.ended = time.monotonic_ns()
    return outcome


def _retry_seconds(error: grpc.aio.AioRpcError) -> float | None:
    for name, value in error.trailing_metadata():
        if name == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            retry = status_pb2.RetryInfo.FromString(status.details[0].value)
            return retry.retry_delay.ToTimedelta().total_seconds()
    return None


async def _open(stub: Any, requests: list[Item], until: float) -> list[RequestOutcome]:
    begun, calls = time.monotonic(), []
    for item in requests:
        await asyncio.sleep(begun + item["at"] - time.monotonic())
        calls.append(asyncio.create_task(outcome_of(stub, item)))
    await asyncio.wait(calls, timeout=begun + until - time.monotonic())
    for call in calls:
        call.cancel()
    return list(await asyncio.gather(*calls))


async def _closed(stub: Any, requests: list[Item], until: float, concurrency: int) -> list[RequestOutcome]:
    rest, outcomes, over = iter(requests), list[RequestOutcome](), False

    async def client() -> None:
        while not over and (item := next(rest, None)):
            outcomes.append(await outcome_of(stub, item))

    clients = [asyncio.create_task(client()) for _ in range(concurrency)]
    await asyncio.wait(clients, timeout=until)
    over = True
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients)
    return outcomes


async def run(address: str, work: Item) -> dict[str, float]:
    """Run the requests; return this process's CPU seconds."""
    async with transport.channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), READY_SECONDS)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        used = time.process_time()
        if work["closed"]:
            outcomes = await _closed(stub, work["requests"], work["until"], work["closed"])
        else:
            outcomes = await _open(stub, work["requests"], work["until"])
        cpu_seconds = time.process_time() - used
    Path(work["file"]).write_text("".join(f"{json.dumps(asdict(outcome))}\n" for outcome in outcomes))
    return {"cpu_seconds": cpu_seconds}


def main() -> None:
    """Answer each line of work."""
    print(json.dumps({"name": "client"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(sys.argv[1], json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
