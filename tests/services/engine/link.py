"""A gateway's end of an engine's link."""

import queue
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from tests.load import SLOW_SEED
from tests.running_quire import CALL_SECONDS

PROMPT = [20, 30, 40, 50, 60]


class Link:
    """A gateway's end of a Serve stream; `responses` are all messages read so far."""

    def __init__(self, engine: engine_pb2_grpc.EngineStub) -> None:
        self._outgoing: queue.SimpleQueue[engine_pb2.ServeRequest | None] = queue.SimpleQueue()
        self._call = engine.Serve(iter(self._outgoing.get, None), timeout=CALL_SECONDS)
        self.responses: list[engine_pb2.ServeResponse] = []

    def submit(self, request_id: str, max_tokens: int = 20, **fields: Any) -> None:
        self._outgoing.put(engine_pb2.ServeRequest(submission=submission(request_id, max_tokens, **fields)))

    def start(self, request_id: str, max_tokens: int = 20, **fields: Any) -> None:
        """Submit a slow request, and read until its first token."""
        self.submit(request_id, max_tokens, slow=True, **fields)
        self.read_until(lambda response: any(one.request_id == request_id for one in response.step.tokens))

    def cancel(self, request_id: str, attempt: int = 1) -> None:
        self._outgoing.put(engine_pb2.ServeRequest(cancel=engine_pb2.Cancel(request_id=request_id, attempt=attempt)))

    def send(self, message: engine_pb2.ServeRequest) -> None:
        self._outgoing.put(message)

    def read_until(self, holds: Callable[[engine_pb2.ServeResponse], object]) -> engine_pb2.ServeResponse:
        """Return the next message that fulfils a condition."""
        for response in self._call:
            self.responses.append(response)
            if holds(response):
                return response
        raise AssertionError("the engine ended the stream")

    def finish(self, request_id: str) -> engine_pb2.RequestFinished:
        """Return the end of a request. It may be in a message that was read already, because messages merge."""
        ends = [end for response in self.responses for end in ended(response, request_id)]
        return ends[0] if ends else ended(self.read_until(lambda one: ended(one, request_id)), request_id)[0]

    def complete(self, request_id: str) -> list[int]:
        """Read until the end of a request, and return the tokens of its first sample."""
        self.finish(request_id)
        return self.tokens(request_id)

    def refusal(self, request_id: str) -> engine_pb2.RequestRefused:
        response = self.read_until(lambda response: response.step.refused)
        (refused,) = response.step.refused
        assert refused.request_id == request_id
        return refused

    def tokens(self, request_id: str, sample: int = 0) -> list[int]:
        """Return the tokens of a sample read so far."""
        received = [tokens for response in self.responses for tokens in response.step.tokens]
        own = [one for one in received if (one.request_id, one.sample) == (request_id, sample)]
        return [token for one in own for token in one.token_ids]

    @property
    def all_sent(self) -> bool:
        """Return True if gRPC has read all messages from the queue."""
        return self._outgoing.empty()

    def half_close(self) -> None:
        """Close the sending side, and read the engine's remaining messages."""
        self._outgoing.put(None)
        self.responses.extend(self._call)

    def break_off(self) -> None:
        self._call.cancel()
        self._outgoing.put(None)

    def status(self) -> grpc.StatusCode:
        """Read to the end of the stream, which must be an error, and return its status."""
        with pytest.raises(grpc.RpcError) as caught:
            self.responses.extend(self._call)
        return caught.value.code()


def submission(request_id: str, max_tokens: int = 20, *, slow: bool = False, **fields: Any) -> engine_pb2.Submission:
    """Build a greedy submission; a slow one takes 20 ms a token."""
    defaults = {
        "attempt": 1,
        "prompt_token_ids": PROMPT,
        "sampling": decoding_pb2.Sampling(temperature=0, top_p=1, seed=SLOW_SEED if slow else 0),
        "stopping": decoding_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    }
    return engine_pb2.Submission(request_id=request_id, **(defaults | fields))


def ended(response: engine_pb2.ServeResponse, request_id: str) -> list[engine_pb2.RequestFinished]:
    return [finished for finished in response.step.finished if finished.request_id == request_id]
