"""A pool of two blocks of four tokens: a request that fits exactly runs, one token more is refused."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import Record
from tests.reference import near_ties
from tests.running_quire import RunningQuire, start_quire

EOS = (2,)


@pytest.fixture(scope="module")
def two_blocks() -> Iterator[RunningQuire]:
    running = start_quire("--block-size", "4", "--device-blocks", "2")
    yield running
    running.close()


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [([504, 3575, 253, 655], 5), ([504, 3575, 253], 6), ([504, 3575, 253, 655, 28, 504, 314], 1), ([504] * 8, 1)],
    ids=["prompt 4, max 5", "ends on a block boundary", "the last free slot", "the prompt fills the pool"],
)
def test_a_request_that_fits_exactly_completes(
    two_blocks: RunningQuire,
    demo_model: Path,
    record: Record,
    prompt: list[int],
    max_tokens: int,
) -> None:
    answer = two_blocks.generate(_request(prompt, max_tokens))
    ties = near_ties(demo_model, [prompt], [answer.token_ids], max_tokens, EOS)
    record(generated_tokens=len(answer.token_ids), near_ties=ties)
    pool = two_blocks.settled_pool()
    assert (pool.sequences, pool.device.held) == (0, 0)


def test_one_token_more_is_refused_with_both_numbers(two_blocks: RunningQuire, record: Record) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        two_blocks.generate(_request([504, 3575, 253, 655], 6))
    record(status=refused.value.code().name, message=refused.value.details())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "take 3 blocks; the pool has 2" in refused.value.details()


def _request(prompt: list[int], max_tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt)),
        sampling=decoding_pb2.Sampling(temperature=0),
        stopping=decoding_pb2.Stopping(max_tokens=max_tokens),
    )
