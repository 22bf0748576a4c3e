"""Load for a running gateway: many streams at once, cancellations at random moments, and killed clients.

`request(number)` builds a request. Unexpected ends of calls are raised.
"""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.runtime import transport
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire

Request = gateway_pb2.GenerateRequest
MakeRequest = Callable[[int], Request]

# Requests of this seed run slowly at engines of tests.running.slow_engine.
SLOW_SEED = 667


def slow_request(prompt: str, max_tokens: int = 32) -> Request:
    """Build a request that takes 20 ms a token, at an engine of tests.running.slow_engine."""
    request = prompt_request(prompt, max_tokens)
    request.sampling.seed = SLOW_SEED
    return request


def prompt_request(
    prompt: str, max_tokens: int = 32, *, seed: int | None = None, ignore_eos: bool = True, salt: str = ""
) -> Request:
    """Build a request for a continuation of a text: greedy, or sampled with a seed."""
    request = Request()
    request.prompt.text = prompt
    request.sampling.temperature = 0 if seed is None else 1
    if seed is not None:
        request.sampling.seed = seed
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = ignore_eos
    request.cache.salt = salt
    return request


def run_streams(quire: RunningQuire, requests: Iterable[Request], concurrency: int) -> list[Answer]:
    """Run at most `concurrency` requests at a time, and return all answers in order."""
    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(quire.generate, requests))


def cancel_at_random(
    quire: RunningQuire, request: MakeRequest, count: int, seed: int, *, concurrency: int = 16, most_messages: int = 8
) -> Counter[int]:
    """Cancel `count` slow requests, each after a random number of messages from 0 to `most_messages`.

    Return the number of requests by the number of messages that were read.
    """
    draw = random.Random(seed)
    moments = [draw.randint(0, most_messages) for _ in range(count)]
    with ThreadPoolExecutor(concurrency) as clients:
        list(clients.map(lambda number: _cancel_after(quire, request(number), moments[number]), range(count)))
    return Counter(moments)


def let_deadlines_pass(
    quire: RunningQuire, request: MakeRequest, count: int, seed: int, *, concurrency: int = 16, longest: float = 0.1
) -> None:
    """Run `count` requests, which must last longer, with gRPC deadlines from 1 ms to `longest` seconds."""
    draw = random.Random(seed)
    deadlines = [draw.uniform(0.001, longest) for _ in range(count)]
    with ThreadPoolExecutor(concurrency) as clients:
        list(clients.map(lambda number: _miss_deadline(quire, request(number), deadlines[number]), range(count)))


def kill_a_client_mid_stream(quire: RunningQuire, request: Request, deltas: int = 3) -> None:
    """Run a slow request in a client process, and kill that process when it has received some deltas."""
    expected = ["started"] + ["delta"] * deltas
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.load", quire.addresses["gateway"]],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    with client, client.stdin, client.stdout:
        client.stdin.write(request.SerializeToString())
        client.stdin.close()
        assert [client.stdout.readline().decode().strip() for _ in expected] == expected
        client.kill()


def _cancel_after(quire: RunningQuire, request: Request, messages: int) -> None:
    call = quire.gateway.Generate(request, timeout=CALL_SECONDS)
    assert sum(1 for _ in islice(call, messages)) == messages
    call.cancel()
    assert _code_of(call) == grpc.StatusCode.CANCELLED


def _miss_deadline(quire: RunningQuire, request: Request, seconds: float) -> None:
    code = _code_of(quire.gateway.Generate(request, timeout=seconds))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED, f"{code} instead of a deadline passed after {seconds:.3f} s"


def _code_of(call: Iterable[gateway_pb2.GenerateResponse]) -> grpc.StatusCode | None:
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code()
    return None


def _run_client(address: str) -> None:
    """Run the request on standard input, and print the kind of each message."""
    request = Request.FromString(sys.stdin.buffer.read())
    with grpc.insecure_channel(address, options=transport.channel_options()) as channel:
        for response in gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=CALL_SECONDS):
            sys.stdout.write(f"{response.WhichOneof('event')}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _run_client(sys.argv[1])
