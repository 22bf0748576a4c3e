"""Load on the demo model: all streams finish, and no blocks are held afterwards."""

from quire.v1 import gateway_pb2
from tests.acceptance.conftest import Record
from tests.load import (
    cancel_at_random,
    kill_a_client_mid_stream,
    let_deadlines_pass,
    prompt_request,
    run_streams,
    slow_request,
)
from tests.running_quire import RunningQuire

SYSTEM = "The town library opens at nine in the morning and closes at six in the evening. " * 4


def test_64_concurrent_streams_finish_and_no_blocks_are_held(demo_quire: RunningQuire, record: Record) -> None:
    requests = [prompt_request(f"{SYSTEM}Story number {number}:", max_tokens=24) for number in range(64)]
    answers = run_streams(demo_quire, requests, concurrency=64)
    pool = demo_quire.settled_pool()
    record(
        streams=len(answers),
        generated_tokens=sum(answer.finished.usage.generated_tokens for answer in answers),
        cached_tokens=sum(answer.started.cached_tokens for answer in answers),
        held_afterwards=pool.device.held,
    )
    assert all(len(answer.token_ids) == 24 for answer in answers)
    assert (pool.sequences, pool.device.held) == (0, 0)


def test_no_blocks_are_held_after_200_cancellations_missed_deadlines_and_a_killed_client(
    demo_quire: RunningQuire, record: Record
) -> None:
    def request(number: int) -> gateway_pb2.GenerateRequest:
        return slow_request(f"{SYSTEM}Letter number {number}:", max_tokens=400)

    cancelled = cancel_at_random(demo_quire, request, 200, seed=1)
    let_deadlines_pass(demo_quire, request, 40, seed=2, longest=2.0)
    kill_a_client_mid_stream(demo_quire, request(1000))
    pool = demo_quire.settled_pool()
    record(cancelled=sum(cancelled.values()), deadlines=40, killed_clients=1, held_afterwards=pool.device.held)
    assert (pool.sequences, pool.device.held) == (0, 0)
    assert pool.device.free + pool.device.cached == pool.device_blocks
    after = demo_quire.generate(prompt_request("Once upon a time", max_tokens=8))
    assert len(after.token_ids) == 8
