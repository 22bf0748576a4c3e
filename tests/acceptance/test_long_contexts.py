"""The FlexAttention paper's scenarios: a sequence of 100,000 tokens, prompts of mixed lengths, a chat up to 32,000.

Random prompts of the tiny model with a long context. Tokens are compared with transformers', blocks with arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from quire.v1 import kvmanager_pb2
from services.runtime.errors import FIELD_METADATA
from tests.acceptance.conftest import Record
from tests.faults import wait_until
from tests.long_contexts import (
    EngineCounts,
    Event,
    LongStreams,
    Request,
    events_of,
    granted,
    greedy_choices,
    ids,
    largest_error,
    named,
    near_ties,
    of_item,
    tables,
    tokens_of,
    wait_for_extensions,
    watch,
)
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.scrape import Scrape

BLOCK = 16
BUDGET = 512
# Of a prompt in prefill beyond its computed tokens: for the step in flight and the next one, in whole blocks.
PREFILL_LOOKAHEAD = 2 * BUDGET + BLOCK
# Growths of a prompt in prefill after which its table is read.
SNAPSHOTS = range(40, 161, 40)
# Blocks of a decoding sequence beyond those of its computed tokens: at most this many.
DECODE_LOOKAHEAD = 2

TOKENS = 100_000
PROMPT, ANSWER = 99_936, 64
# The last token of an answer is never computed, so it needs no slot.
POOL = 6250
assert POOL == -(-(TOKENS - 1) // BLOCK)


# Of log-probabilities after 100,000 tokens in float32. One lost block makes it thirty times larger.
LOGPROB_ERROR = 1e-3


def blocks_for(slots: int) -> int:
    return -(-slots // BLOCK)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("long-llama")


def start(model: Path, budget: int = BUDGET) -> RunningQuire:
    """Start a Quire whose pool has exactly the blocks of a sequence of 100,000 tokens."""
    return start_quire(
        *("--model", str(model), "--device-blocks", str(POOL), "--block-size", str(BLOCK)),
        *("--token-budget", str(budget)),
    )


@pytest.fixture
def fresh(model: Path) -> Iterator[RunningQuire]:
    """A Quire of this test alone, so that its totals are those of the test."""
    quire = start(model)
    yield quire
    assert quire.close() == 0


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[RunningQuire]:
    quire = start(model)
    yield quire
    assert quire.close() == 0


def check_nothing_held(quire: RunningQuire, cached: int) -> kvmanager_pb2.PoolInfo:
    """Check the states of all blocks after the last request, and return the pool."""
    pool = quire.settled_pool()
    assert (pool.sequences, pool.device.held, pool.device.withheld) == (0, 0, 0)
    assert (pool.device.cached, pool.device.free) == (cached, POOL - cached)
    return pool


def check_all_free_or_cached(quire: RunningQuire) -> None:
    pool = quire.settled_pool()
    assert (pool.sequences, pool.device.held) == (0, 0)
    assert pool.device.free + pool.device.cached == POOL


# One sequence of 100,000 tokens


def test_a_sequence_of_100_000_tokens_takes_exactly_its_6250_blocks(
    fresh: RunningQuire, model: Path, record: Record
) -> None:
    request = named("long", PROMPT, ANSWER)
    request.output.logprobs = 0
    streams = LongStreams(fresh, request)
    events, snapshots = watch_prefill(fresh, "long")
    (answer,) = streams.tokens()
    check_growth(granted(events), PROMPT)
    assert [len(ids(event)) for event in of_item(events, kvmanager_pb2.STEP_ITEM_FREE)] == [POOL]
    pool = check_nothing_held(fresh, cached=(TOKENS - 1) // BLOCK)
    assert (pool.totals.granted_blocks, pool.totals.peak_held_blocks) == (POOL, POOL)
    assert (pool.totals.refusals, pool.totals.preemptions, pool.totals.prefix_hit_tokens) == (0, 0, 0)
    whole = [*tokens_of(request), *answer]
    assert len(whole) == TOKENS
    ties = near_ties(model, whole, [range(PROMPT, TOKENS)])
    error = largest_error(model, whole, range(PROMPT, TOKENS), streams.answers[0].logprobs)
    assert error < LOGPROB_ERROR
    changed = changed_choices(model, whole)
    assert changed >= ANSWER // 2
    record(
        tokens=TOKENS,
        tokens_checked=len(answer),
        different_tokens=len(set(answer)),
        near_ties=ties,
        largest_error_of_logprobs=error,
        other_choices_after_another_first_half=changed,
        blocks=POOL,
        chunks=len(granted(events)),
        snapshots=snapshots,
    )


def watch_prefill(quire: RunningQuire, name: str) -> tuple[list[Event], list[tuple[int, int, int]]]:
    """Watch a request to its end; several times in its prefill, compare its table with its computed tokens.

    Return its events, and the blocks, computed tokens and room at these moments.
    """
    events: list[Event] = []
    snapshots: list[tuple[int, int, int]] = []
    for event in watch(quire, name):
        events.append(event)
        if event.item == kvmanager_pb2.STEP_ITEM_EXTEND and len(granted(events)) in SNAPSHOTS:
            table = tables(quire)[name]
            assert len(set(table.block_ids)) == len(table.block_ids) == blocks_for(table.room_tokens)
            assert table.computed_tokens < table.room_tokens <= table.computed_tokens + PREFILL_LOOKAHEAD
            assert table.committed_tokens == table.computed_tokens // BLOCK * BLOCK
            snapshots.append((len(table.block_ids), table.computed_tokens, table.room_tokens))
    assert len(snapshots) == len(SNAPSHOTS)
    assert snapshots == sorted(set(snapshots))
    return events, snapshots


def check_growth(grants: Sequence[Event], prompt: int) -> None:
    """Check that a prompt grew by at most a step's tokens at a time, and that no block was granted twice."""
    sizes = [len(ids(event)) for event in grants]
    assert sizes[0] == blocks_for(BUDGET)
    assert max(sizes) <= blocks_for(BUDGET) + 1
    assert len(sizes) >= prompt // (BUDGET + BLOCK)
    blocks = [block for event in grants for block in ids(event)]
    assert len(set(blocks)) == len(blocks) == POOL


def changed_choices(model: Path, tokens: list[int]) -> int:
    """Count the tokens of the answer that the reference would not choose after another first half of the prompt.

    If there were few, the comparison with the reference would overlook lost blocks.
    """
    changed = [*tokens_of(named("changed", TOKENS // 2, 1)), *tokens[TOKENS // 2 :]]
    choices = greedy_choices(model, changed, range(PROMPT, TOKENS))
    return sum(choice != token for choice, token in zip(choices, tokens[PROMPT:], strict=True))


# Prompts of mixed lengths

LENGTHS = range(500, 8001, 500)
MIXED_BUDGET = 2048
MIXED_ANSWER = 128
# Steps in which only part of the prompts have arrived.
ARRIVAL_STEPS = 16


def test_16_prompts_of_500_to_8000_tokens_run_in_one_batch(model: Path, record: Record) -> None:
    quire = start(model, MIXED_BUDGET)
    try:
        requests = [named(f"of {length}", length, MIXED_ANSWER, slow=True) for length in LENGTHS]
        before = EngineCounts.of(quire)
        streams = LongStreams(quire, *requests)
        decode_steps = check_one_batch(quire, streams)
        answers = streams.tokens()
        steps = EngineCounts.of(quire).since(before).steps
        grants = [check_grants(quire, request) for request in requests]
        pool = check_nothing_held(quire, cached=sum(slots_of(one) // BLOCK for one in requests))
    finally:
        assert quire.close() == 0
    assert pool.totals.granted_blocks == sum(grants)
    assert sum(map(blocks_for, LENGTHS)) <= pool.totals.peak_held_blocks <= sum(grants)
    assert (pool.totals.refusals, pool.totals.preemptions) == (0, 0)
    prefill_steps = -(-(sum(LENGTHS) + len(LENGTHS) * MIXED_ANSWER) // MIXED_BUDGET)
    assert steps <= prefill_steps + MIXED_ANSWER + ARRIVAL_STEPS
    ties = [check_answer(model, request, answer) for request, answer in zip(requests, answers, strict=True)]
    record(
        prompts=len(requests),
        tokens_checked=sum(map(len, answers)),
        near_ties=sum(ties),
        blocks=grants,
        peak_held_blocks=pool.totals.peak_held_blocks,
        steps=steps,
        decode_steps_of_all=decode_steps,
    )


def check_one_batch(quire: RunningQuire, streams: LongStreams) -> int:
    """Once all decode, check their blocks, and that each step computes all of them; return the number of such steps."""
    streams.wait_for_tokens_of_each(1)
    before = EngineCounts.of(quire)
    check_tables(quire, streams)
    streams.wait_for_tokens_of_each(50)
    steps, planned, _ = EngineCounts.of(quire).since(before)
    assert streams.running() == len(LENGTHS)
    # A step is counted after its plan, so that the difference is at most the sequences of one step.
    assert steps > 2 * len(LENGTHS)
    assert abs(planned - len(LENGTHS) * steps) <= len(LENGTHS)
    return steps


def check_tables(quire: RunningQuire, streams: LongStreams) -> None:
    """Check each table while all streams decode: blocks are only added meanwhile, and by no more than the lookahead."""
    least, earlier = streams.received, quire.pool().device.held
    found = tables(quire)
    later = quire.pool().device.held
    most = EngineCounts.of(quire).tokens
    assert len(found) == len(LENGTHS)
    rows = [found[f"of {length}"] for length in LENGTHS]
    blocks = [block for row in rows for block in row.block_ids]
    assert len(set(blocks)) == len(blocks)
    assert earlier <= len(blocks) <= later
    for length, row, received in zip(LENGTHS, rows, least, strict=True):
        assert len(row.block_ids) == blocks_for(row.room_tokens)
        assert length + received - 1 <= row.room_tokens <= length + MIXED_ANSWER - 1
    assert sum(row.room_tokens for row in rows) <= sum(LENGTHS) + most + len(LENGTHS) * DECODE_LOOKAHEAD * BLOCK


def check_grants(quire: RunningQuire, request: Request) -> int:
    """Check that a request was granted exactly the blocks of its computed tokens, and return their number."""
    grants = granted(events_of(quire, request.request_id))
    blocks = [block for event in grants for block in ids(event)]
    assert len(set(blocks)) == len(blocks) == blocks_for(slots_of(request))
    return len(blocks)


def slots_of(request: Request) -> int:
    """Return the computed tokens of a request that generates all its tokens."""
    return len(request.prompt.token_ids.ids) + request.stopping.max_tokens - 1


def check_answer(model: Path, request: Request, answer: Sequence[int]) -> int:
    """Check the tokens and the length of an answer, and count near ties."""
    prompt = tokens_of(request)
    assert len(answer) == request.stopping.max_tokens
    return near_ties(model, [*prompt, *answer], [range(len(prompt), len(prompt) + len(answer))])


# A chat that grows from 1,000 to 32,000 tokens

FIRST_TURN, TURNS, CHAT_ANSWER = 1000, 32, 24
# With the answer 1001 tokens, so that turns end at all places within a block.
USER_TURN = 977


def test_each_turn_of_a_chat_up_to_32_000_tokens_is_cached_up_to_its_last_full_block(
    fresh: RunningQuire, model: Path, record: Record
) -> None:
    conversation = tokens_of(named("the first", FIRST_TURN, CHAT_ANSWER))
    computed, answers, cached, new_blocks = 0, [], [], 0
    for number in range(TURNS):
        answer = take_turn(fresh, conversation, f"turn {number}")
        cached.append(answer.started.cached_tokens)
        assert cached[-1] == answer.finished.usage.cached_tokens == computed // BLOCK * BLOCK
        answers.append(range(len(conversation), len(conversation) + CHAT_ANSWER))
        conversation += answer.token_ids
        computed = len(conversation) - 1
        new_blocks += check_turn(fresh, f"turn {number}", cached[-1], computed)
        conversation += tokens_of(named(f"user {number}", USER_TURN, 1))
    pool = check_nothing_held(fresh, cached=computed // BLOCK)
    assert {answer.stop % BLOCK for answer in answers} == set(range(BLOCK))
    assert (pool.totals.granted_blocks, pool.totals.peak_held_blocks) == (new_blocks, blocks_for(computed))
    assert pool.totals.prefix_hit_tokens == sum(cached)
    assert (pool.totals.evicted_blocks, pool.totals.copied_blocks, pool.totals.refusals) == (0, 0, 0)
    ties = near_ties(model, conversation, answers)
    record(
        turns=TURNS,
        longest_prompt=answers[-1].start,
        tokens_checked=TURNS * CHAT_ANSWER,
        near_ties=ties,
        cached_tokens=cached,
        peak_held_blocks=pool.totals.peak_held_blocks,
        granted_blocks=new_blocks,
    )


def take_turn(quire: RunningQuire, conversation: Sequence[int], name: str) -> Answer:
    request = named(name, 1, CHAT_ANSWER)
    request.prompt.token_ids.ids[:] = conversation
    answer = quire.generate(request)
    assert len(answer.token_ids) == CHAT_ANSWER
    return answer


def check_turn(quire: RunningQuire, name: str, cached: int, computed: int) -> int:
    """Check the table of a turn: the cached blocks, then the new ones, which are counted."""
    grants = granted(events_of(quire, name))
    blocks = [block for event in grants for block in ids(event)]
    assert grants[0].cached_tokens == cached
    assert len(set(blocks)) == len(blocks) == blocks_for(computed)
    return len(blocks) - cached // BLOCK


# Requests beside a long prefill

# Leaves room for a short request and the admission watermark.
SHORTER = 97_000
SHORT, SHORT_ANSWER = 300, 8
STREAM_ANSWER = 150


def test_a_request_of_better_priority_takes_two_steps_to_its_first_token_beside_a_long_prefill(
    shared: RunningQuire, model: Path, record: Record
) -> None:
    long = LongStreams(shared, named("being prefilled", SHORTER, 1))
    wait_for_extensions(shared, "being prefilled", 40)
    request = named("urgent", SHORT, SHORT_ANSWER, priority=-100)
    (answer,) = LongStreams(shared, request).tokens()
    assert long.received == [0]
    long.cancel(0)
    assert long.codes() == {0: grpc.StatusCode.CANCELLED}
    check_all_free_or_cached(shared)
    events, others = events_of(shared, "urgent"), granted(events_of(shared, "being prefilled"))
    allocated, freed = events[0].step, events[-1].step
    prefilled = of_item(events, kvmanager_pb2.STEP_ITEM_COMMIT)[0].step
    meanwhile = [event for event in others if allocated < event.step < freed]
    record(steps_to_prefill=prefilled - allocated, steps=freed - allocated, chunks_of_the_long_prompt=len(meanwhile))
    assert prefilled - allocated <= 2
    assert freed - allocated <= 1 + SHORT_ANSWER
    assert len(meanwhile) >= SHORT_ANSWER // 2  # the prefill goes on, except where the manager's answer is late
    assert check_answer(model, request, answer) == 0


def test_a_stream_gains_a_token_in_each_step_of_a_long_prefill(
    shared: RunningQuire, model: Path, record: Record
) -> None:
    request = named("stream", SHORT, STREAM_ANSWER, slow=True)
    stream = LongStreams(shared, request)
    stream.wait_for_tokens_of_each(1)
    long = LongStreams(shared, named("beside a stream", SHORTER, 1))
    wait_for_extensions(shared, "beside a stream", 10)
    before = EngineCounts.of(shared)
    wait_for_extensions(shared, "beside a stream", 50)
    steps, _, tokens = EngineCounts.of(shared).since(before)
    assert (stream.running(), long.received) == (1, [0])
    long.cancel(0)
    (answer,) = stream.tokens()
    check_all_free_or_cached(shared)
    record(steps=steps, tokens=tokens)
    assert steps >= 30
    assert abs(steps - tokens) <= 1
    assert check_answer(model, request, answer) == 0


def test_a_cancelled_prefill_leaves_all_its_blocks_to_the_next_request_in_the_same_step(
    shared: RunningQuire, model: Path, record: Record
) -> None:
    long = LongStreams(shared, named("cancelled", PROMPT, ANSWER))
    wait_for_extensions(shared, "cancelled", 40)
    request = named("next", SHORT, SHORT_ANSWER)
    following = LongStreams(shared, request)
    wait_until(lambda: waiting(shared) == 1, "the pool has no room for the next request")
    long.cancel(0)
    assert long.codes() == {0: grpc.StatusCode.CANCELLED}
    (answer,) = following.tokens()
    check_all_free_or_cached(shared)
    events = events_of(shared, "cancelled")
    grants, freed = granted(events), events[-1]
    blocks = [block for event in grants for block in ids(event)]
    assert (freed.item, freed.free_reason) == (kvmanager_pb2.STEP_ITEM_FREE, kvmanager_pb2.FREE_REASON_CANCELLED)
    assert sorted(ids(freed)) == sorted(blocks)
    assert len(blocks) < POOL // 2
    begun = granted(events_of(shared, "next"))[0].step
    record(blocks_at_the_cancellation=len(blocks))
    assert begun == freed.step
    assert check_answer(model, request, answer) == 0


def waiting(quire: RunningQuire) -> float:
    return Scrape.of(quire.metrics_urls["engine"]).value("quire_num_requests_waiting")


# Bounds


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "words"),
    [
        (131_073, 1, "prompt.token_ids.ids", "at most 131072 tokens, not 131073"),
        (131_072, 1, "prompt", "at most 131072 tokens, not 131073"),
        (131_000, 73, "stopping.max_tokens", "at most 131072 tokens, not 131073"),
        (131_000, 72, "prompt", "6250"),
        (PROMPT, ANSWER + 2, "stopping.max_tokens", "6250"),
    ],
)
def test_a_request_beyond_the_context_or_the_pool_is_refused_naming_the_field(
    shared: RunningQuire, prompt: int, max_tokens: int, field: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        shared.generate(named("too long", prompt, max_tokens))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(refused.value.details())
    assert {str(one.key): str(one.value) for one in refused.value.trailing_metadata()}[FIELD_METADATA] == field


@pytest.mark.parametrize(("prompt", "max_tokens"), [(PROMPT, ANSWER + 1), (TOKENS, 1)])
def test_a_request_that_fills_the_pool_to_its_last_slot_is_started(
    shared: RunningQuire, prompt: int, max_tokens: int
) -> None:
    request = named("as long as possible", prompt, max_tokens)
    call = shared.gateway.Generate(request, timeout=CALL_SECONDS)
    assert next(iter(call)).started.max_tokens == max_tokens
    call.cancel()
    check_all_free_or_cached(shared)
