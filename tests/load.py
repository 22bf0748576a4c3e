"""Load for a running gateway: many streams at once, cancellations at random moments, and clients that die.

What a request says is up to whoever calls: `request(number)` makes it. Everything raises what a call ended with, unless
that is what was wanted.
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

# Of what may be over too soon, because a gateway that was held up sends all it has in one message.
_ATTEMPTS = 10


def prompt_request(
    prompt: str, max_tokens: int = 32, *, seed: int | None = None, ignore_eos: bool = True, salt: str = ""
) -> Request:
    """Ask for a continuation of a text: the most likely one, or with a seed a sampled one."""
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
    """Run all requests, at most `concurrency` at a time, and return their answers in order."""
    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(quire.generate, requests))


def cancel_at_random(
    quire: RunningQuire, request: MakeRequest, count: int, seed: int, *, concurrency: int = 16, most_messages: int = 8
) -> Counter[int]:
    """Cancel `count` requests, each after a random number of messages from 0 (nothing is read) to `most_messages`.

    Return how many were cancelled after how many messages. One that was over before that is run again.
    """
    draw = random.Random(seed)
    moments = [draw.randint(0, most_messages) for _ in range(count)]
    with ThreadPoolExecutor(concurrency) as clients:
        list(clients.map(lambda number: _cancel_after(quire, request(number), moments[number]), range(count)))
    return Counter(moments)


def let_deadlines_pass(
    quire: RunningQuire, request: MakeRequest, count: int, seed: int, *, concurrency: int = 16, longest: float = 0.1
) -> None:
    """Run `count` requests with gRPC deadlines from 1 ms to `longest` seconds. They have to last longer than that."""
    draw = random.Random(seed)
    deadlines = [draw.uniform(0.001, longest) for _ in range(count)]
    with ThreadPoolExecutor(concurrency) as clients:
        list(clients.map(lambda number: _miss_deadline(quire, request(number), deadlines[number]), range(count)))


def kill_a_client_mid_stream(quire: RunningQuire, request: Request, deltas: int = 3) -> None:
    """Run a request in a process of its own, and SIGKILL that when it has got some deltas."""
    wanted = ["started"] + ["delta"] * deltas
    assert any(_kinds_before_a_kill(quire, request, len(wanted)) == wanted for _ in range(_ATTEMPTS))


def _kinds_before_a_kill(quire: RunningQuire, request: Request, messages: int) -> list[str]:
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
        kinds = [client.stdout.readline().decode().strip() for _ in range(messages)]
        client.kill()
    return kinds


def _cancel_after(quire: RunningQuire, request: Request, messages: int) -> None:
    assert any(_was_cancelled_after(quire, request, messages) for _ in range(_ATTEMPTS))


def _was_cancelled_after(quire: RunningQuire, request: Request, messages: int) -> bool:
    call = quire.gateway.Generate(request, timeout=CALL_SECONDS)
    read = sum(1 for _ in islice(call, messages))
    call.cancel()
    return (read, _code_of(call)) == (messages, grpc.StatusCode.CANCELLED)


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


def _be_a_client(address: str) -> None:
    """Run the request on standard input, and print the kind of each message."""
    request = Request.FromString(sys.stdin.buffer.read())
    with grpc.insecure_channel(address, options=transport.channel_options()) as channel:
        for response in gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=CALL_SECONDS):
            sys.stdout.write(f"{response.WhichOneof('event')}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _be_a_client(sys.argv[1])
