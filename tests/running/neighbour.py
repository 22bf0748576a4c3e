"""Another client, whose stream does not change while a test attacks the server."""

import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import httpx

from quire.v1 import gateway_pb2_grpc
from tests.load import slow_request
from tests.running_quire import CALL_SECONDS

# At an engine of tests.running.slow_engine each takes 20 ms, and little of the processor.
NEIGHBOUR_TOKENS = 50

Pieces = Iterator[Sequence[object]]


class Neighbour:
    """Runs the same stream again and again, and collects its failures."""

    def __init__(self, stream: Callable[[], Pieces]) -> None:
        """`stream` begins a stream and yields its pieces: tokens, or text."""
        self._begin = stream
        self._expected = _whole(stream())
        self._stopping = False
        self._changed = threading.Condition()
        self._received = 0
        self.streams = 0
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_tokens(self) -> None:
        with self._changed:
            before = self._received
            assert self._changed.wait_for(lambda: self._received > before or self.faults, timeout=CALL_SECONDS)
        assert self.faults == []

    def close(self) -> None:
        """Wait for the end of the last stream."""
        self._stopping = True
        self._thread.join(CALL_SECONDS)

    def _run(self) -> None:
        while not self._stopping and not self.faults:
            try:
                assert _whole(self._pieces()) == self._expected
                self.streams += 1
            except (grpc.RpcError, httpx.HTTPError, AssertionError) as error:
                self._report(fault=repr(error))

    def _pieces(self) -> Pieces:
        for piece in self._begin():
            self._report(received=len(piece))
            yield piece

    def _report(self, received: int = 0, fault: str = "") -> None:
        with self._changed:
            self._received += received
            self.faults += [fault] if fault else []
            self._changed.notify_all()


def tokens_over_grpc(gateway: gateway_pb2_grpc.GatewayStub) -> Pieces:
    request = slow_request("Pages of memory, again and", NEIGHBOUR_TOKENS)
    for response in gateway.Generate(request, timeout=CALL_SECONDS):
        yield response.delta.token_ids


def _whole(pieces: Pieces) -> list[object]:
    return [one for piece in pieces for one in piece]
