"""Clients that send requests repeatedly to all gateways, watch their health and retry."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.runtime import transport
from tests.acceptance.test_rolling_restart import OPTIONS
from tests.api_keys import bearer
from tests.running_quire import Answer

CLIENTS = 4
STREAM_SECONDS, WAIT_SECONDS = 240, 300
# The name in the certificates, for any published address.
_NAME = (("grpc.ssl_target_name_override", "localhost"),)


@dataclass
class Outcome:
    """The answer of one request."""

    number: int
    answer: Answer = field(default_factory=Answer)
    longest_pause: float = 0.0

    @property
    def failed_over(self) -> bool:
        return self.answer.finished.timing.failovers > 0


@contextmanager
def channel_to(addresses: Sequence[str], ca: bytes) -> Iterator[grpc.Channel]:
    """Open a TLS channel that uses all ready gateways in turn, and retries."""
    target = "ipv4:" + ",".join(addresses)
    options: list[Any] = [*transport.channel_options(), *OPTIONS, *_NAME]
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(ca), options=options) as channel:
        yield channel


class Load:
    """Clients with an API key, each sending one request after the other."""

    def __init__(self, channel: grpc.Channel, key: str, requests: Sequence[gateway_pb2.GenerateRequest]) -> None:
        self._stub = gateway_pb2_grpc.GatewayStub(channel)
        self._metadata = bearer(key)
        self._requests = requests
        self._answered = threading.Condition()
        self._done: list[Outcome] = []

    def once(self) -> list[Outcome]:
        """Run all requests once, concurrently; return outcomes in their order."""
        with ThreadPoolExecutor(len(self._requests)) as threads:
            return list(threads.map(self._send, range(len(self._requests))))

    def during(self, disturb: Callable[[], None]) -> list[Outcome]:
        """Send requests during `disturb`, at least one of each client before and after. Raises the first failure."""
        self._done = []
        over = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as threads:
            clients = [threads.submit(self._send_until, over, number) for number in range(CLIENTS)]
            try:
                self._wait_for(CLIENTS, clients)
                disturb()
                self._wait_for(len(self._done) + 2 * CLIENTS, clients)
            finally:
                over.set()
            for client in clients:
                client.result()
        return self._done

    def _wait_for(self, count: int, clients: "list[Future[None]]") -> None:
        with self._answered:
            reached = self._answered.wait_for(
                lambda: len(self._done) >= count or any(client.done() for client in clients), WAIT_SECONDS
            )
        for client in clients:
            if client.done():
                client.result()
        assert reached, f"only {len(self._done)} of {count} requests were answered"

    def _send_until(self, over: threading.Event, number: int) -> None:
        try:
            while not over.is_set():
                outcome = self._send(number % len(self._requests))
                number += CLIENTS
                with self._answered:
                    self._done.append(outcome)
                    self._answered.notify_all()
        finally:
            with self._answered:
                self._answered.notify_all()

    def _send(self, number: int) -> Outcome:
        outcome = Outcome(number)
        before = time.monotonic()
        for response in self._stub.Generate(self._requests[number], timeout=STREAM_SECONDS, metadata=self._metadata):
            now = time.monotonic()
            outcome.longest_pause = max(outcome.longest_pause, now - before)
            before = now
            outcome.answer.add(response)
        return outcome
