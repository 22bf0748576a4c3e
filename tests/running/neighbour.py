"""Another client, whose stream must not change while a test attacks the server."""

import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import httpx

from quire.v1 import gateway_pb2_grpc
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS

NEIGHBOUR_TOKENS = 300

Pieces = Iterator[Sequence[object]]


class Neighbour:
    """Runs the same stream again and again, and collects its failures."""

    def __init__(self, stream: Callable[[], Pieces]) -> None:
        """`stream` begins one and yields its pieces: tokens, or text."""
        self._begin = stream
        self._expected = _whole(stream())
        self._stopping = False
        self._news = threading.Condition()
        self.heard = 0
        self.streams = 0
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def see_it_go_on(self) -> None:
        """Wait until it has heard what was not there before."""
        with self._news:
            seen = self.heard
            assert self._news.wait_for(lambda: self.heard > seen or self.faults, timeout=CALL_SECONDS)
        assert self.faults == []

    def close(self) -> None:
        """Let the last stream run to its end."""
        self._stopping = True
        self._thread.join(CALL_SECONDS)

    def _run(self) -> None:
        while not self._stopping and not self.faults:
            try:
                assert _whole(self._listened()) == self._expected
                self.streams += 1
            except (grpc.RpcError, httpx.HTTPError, AssertionError) as error:
                self._tell(fault=repr(error))

    def _listened(self) -> Pieces:
        for piece in self._begin():
            self._tell(heard=len(piece))
            yield piece

    def _tell(self, heard: int = 0, fault: str = "") -> None:
        with self._news:
            self.heard += heard
            self.faults += [fault] if fault else []
            self._news.notify_all()


def tokens_over_grpc(gateway: gateway_pb2_grpc.GatewayStub) -> Pieces:
    """Yield the tokens of a stream."""
    request = prompt_request("Pages of memory, again and", NEIGHBOUR_TOKENS)
    for response in gateway.Generate(request, timeout=CALL_SECONDS):
        yield response.delta.token_ids


def _whole(pieces: Pieces) -> list[object]:
    return [one for piece in pieces for one in piece]
