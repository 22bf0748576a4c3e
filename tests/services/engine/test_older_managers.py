"""An engine at a KV manager that lacks what it would send: it sends what has the same effect on requests."""

import asyncio

import pytest

from blocks import Condemn, CondemnReason, Pin, Reset, Step
from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.engine.block_client import BlockClient, _NewStream

SPEC = PoolSpec("engine", 1, "model", 4, 8)
STEP = Step(1, condemns=[Condemn(0, [2, 3], CondemnReason.HIT)], pins=[Pin("p", 1, 1)])


async def sent(missing: list[str]) -> tuple[Step, pb.Step]:
    """Return a Step as the replica will apply it, and as it was written to the stream."""
    client = BlockClient("127.0.0.1:1", SPEC, lambda: None)
    outgoing: asyncio.Queue[pb.PoolRequest | None] = asyncio.Queue()
    client._put(_NewStream(outgoing, None, (), missing))
    client.receive()
    client.send(STEP)
    message = await outgoing.get()
    assert message is not None
    return client.replica._in_flight[0], message.step


@pytest.mark.parametrize("missing", [[], ["step.condemns"]], ids=["a new manager", "an older manager"])
def test_a_manager_that_cannot_condemn_forgets_all_keys(missing: list[str]) -> None:
    applied, message = asyncio.run(sent(missing))
    if missing:
        assert (applied.condemns, applied.pins) == ((), (*STEP.pins, Reset()))
        assert message.pins[-1].WhichOneof("kind") == "reset"
        assert not message.HasField("condemns")
    else:
        assert applied == STEP
        assert message.HasField("condemns")
