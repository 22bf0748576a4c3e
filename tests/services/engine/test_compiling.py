"""The cache and the queue of compiled constraints."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable, InvalidRequest, QueueFull, UnsupportedField
from quire.v1 import decoding_pb2
from services.engine.guided.constraints import Constraints
from tests.tiny_models import VOCABULARY

pytestmark = pytest.mark.anyio


def constraint(regex: str) -> decoding_pb2.OutputConstraint:
    return decoding_pb2.OutputConstraint(regex=regex)


@pytest.fixture
async def constraints(tiny_model: Callable[[str], Path]) -> AsyncIterator[Constraints]:
    one = Constraints(tiny_model("llama"), VOCABULARY, [0])
    await one.load()
    yield one
    one.close()


async def test_a_constraint_is_compiled_once_and_the_oldest_is_evicted(constraints: Constraints) -> None:
    first, same = await asyncio.gather(*(constraints.compiled(constraint("a")) for _ in range(2)))
    assert first is same
    for number in range(31):
        await constraints.compiled(constraint(f"b{number}"))
    assert await constraints.compiled(constraint("a")) is first
    for number in range(32):
        await constraints.compiled(constraint(f"c{number}"))
    assert await constraints.compiled(constraint("a")) is not first


async def test_pending_compilations_beyond_the_limit_are_refused_until_one_is_cancelled(
    constraints: Constraints,
) -> None:
    waiting = [asyncio.create_task(constraints.compiled(constraint(f"a{number}"))) for number in range(32)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="32 constraints are being compiled"):
        await constraints.compiled(constraint("b"))
    for task in waiting[1:]:
        task.cancel()
    await asyncio.wait(waiting[1:])
    await constraints.compiled(constraint("a5"))  # its only waiter was cancelled, so it starts again
    await waiting[0]
    constraints.close()
    with pytest.raises(EngineUnavailable):
        await constraints.compiled(constraint("c"))


async def test_constraints_need_a_readable_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    constraints = Constraints(tmp_path, VOCABULARY, [0])
    await constraints.load()
    with pytest.raises(UnsupportedField, match="is not supported with the model") as refused:
        await constraints.compiled(constraint("a"))
    assert refused.value.field == "constraint"
    with pytest.raises(InvalidRequest, match="must have one of"):
        await constraints.compiled(decoding_pb2.OutputConstraint(json_object=False))
    constraints.close()
