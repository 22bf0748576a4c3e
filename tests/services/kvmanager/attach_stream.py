"""An engine's end of an Attach stream."""

import itertools
import queue
from typing import Any

import grpc
import pytest

from blocks import Commit, Extend, Step, TableChange
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from services.runtime.errors import FIELD_METADATA
from services.wire.step import step_message
from services.wire.step_result import result_of
from tests.running_quire import CALL_SECONDS

Stub = kvmanager_pb2_grpc.KVManagerStub


class Stream:
    """An engine's end of an Attach stream: sends messages and reads answers one by one."""

    def __init__(self, stub: Stub) -> None:
        self._outgoing: queue.SimpleQueue[pb.PoolRequest | None] = queue.SimpleQueue()
        self._call = stub.Attach(iter(self._outgoing.get, None), timeout=CALL_SECONDS)
        self._numbers = itertools.count(1)
        self.registered = pb.Registered()

    def send(self, **message: Any) -> None:
        self._outgoing.put(pb.PoolRequest(**message))

    def attach(self, **fields: Any) -> "Stream":
        self.send(register=register(**fields))
        self.send(report=pb.ReportPage(last=True))
        # While a large report is adopted, messages show the progress.
        self.registered = next(one.registered for one in self._call if one.HasField("registered"))
        return self

    def apply(self, **items: Any) -> pb.StepResult:
        """Send a Step with the next number and return its result."""
        self.send(step=pb.Step(step=next(self._numbers), **items))
        return next(self._call).result

    def step(self, **items: Any) -> pb.StepResult:
        """Send a Step and check that no item is refused."""
        result = self.apply(**items)
        assert list(result.refusals) == []
        return result

    def allocate(self, sequence: int, tokens: int, **fields: Any) -> list[int]:
        item = allocate(sequence, [sequence] * tokens, **fields)
        return tables_of(self.step(allocates=[item]))[0].block_ids

    def refusal(self) -> tuple[grpc.StatusCode, str, str]:
        """Wait for the end of the stream; return status, message and rejected field."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self._call)
        metadata = dict(caught.value.trailing_metadata())
        return caught.value.code(), caught.value.details(), metadata.get(FIELD_METADATA, "")

    def half_close(self) -> list[pb.PoolResponse]:
        """Half-close the stream and return the remaining answers."""
        self._outgoing.put(None)
        return list(self._call)

    def break_off(self) -> None:
        """Break the stream like a lost connection."""
        self._call.cancel()
        self._outgoing.put(None)


def allocate(sequence: int, tokens: list[int], **fields: Any) -> pb.Allocate:
    """Build an allocate of all tokens; `fields` replace its group, request id or chunk."""
    usual = {"group": sequence, "request_id": f"request-{sequence}", "compute_tokens": len(tokens)}
    return pb.Allocate(sequence=sequence, token_ids=tokens, **(usual | fields))


def free(sequence: int, reason: pb.FreeReason.ValueType = pb.FREE_REASON_FINISHED, served: int = 0) -> pb.Free:
    return pb.Free(sequence=sequence, reason=reason, preempted_for_group=served)


def commits(*items: tuple[int, int, list[int]]) -> pb.Commits:
    """Build commits from tuples of sequence, first index and tokens."""
    request = step_message(Step(1, commits=[Commit(*item) for item in items]))
    return request.step.commits


def extends(*items: tuple[int, list[tuple[int, int]]]) -> pb.Extends:
    """Build extends from a group and pairs of sequence and room in tokens."""
    return step_message(Step(1, extends=[Extend(*item) for item in items])).step.extends


def tables_of(result: pb.StepResult) -> list[TableChange]:
    return list(result_of(result).tables)


def register(**fields: Any) -> pb.Register:
    usual = {"engine_id": "engine", "incarnation": 5, "model_fingerprint": "m", "block_size": 4, "device_blocks": 20}
    return pb.Register(**(usual | fields))


def pools(stub: Stub) -> list[pb.PoolInfo]:
    return list(stub.ListPools(pb.ListPoolsRequest()).pools)
