"""Engine.Serve as a gateway uses it."""

from collections.abc import Callable, Iterator

import grpc
import pytest

from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from services.wire.features import FEATURES
from tests.engine.native_kernels import device_name
from tests.faults import wait_until
from tests.running_quire import RunningQuire
from tests.services.engine.link import Link, ended
from tests.tiny_models import CONTEXT, VOCABULARY


@pytest.fixture
def link(tiny_quire: RunningQuire) -> Iterator[Callable[[], Link]]:
    """Opens links. They are broken off at the end, which must release all blocks."""
    links: list[Link] = []

    def begin() -> Link:
        links.append(Link(tiny_quire.engine))
        return links[-1]

    yield begin
    for one in links:
        one.break_off()
    pool = tiny_quire.settled_pool()
    assert (pool.sequences, pool.device.held) == (0, 0)


@pytest.fixture
def gateway(link: Callable[[], Link]) -> Link:
    return link()


@pytest.fixture(scope="module")
def expected(tiny_quire: RunningQuire) -> list[int]:
    """The first 200 tokens after PROMPT."""
    link = Link(tiny_quire.engine)
    link.submit("expected", 200)
    tokens = link.complete("expected")
    link.break_off()
    return tokens


def granted_blocks(quire: RunningQuire) -> int:
    return quire.pool().totals.granted_blocks


# Responses


def test_a_request_starts_generates_tokens_and_finishes(gateway: Link, expected: list[int]) -> None:
    gateway.submit("r", 20, attempt=3)
    finished = gateway.finish("r")
    assert gateway.tokens("r") == expected[:20]
    steps = [response.step for response in gateway.responses if response.HasField("step")]
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    started = [(event.request_id, event.attempt) for step in steps for event in step.started]
    assert started == [("r", 3)]
    assert {event.attempt for step in steps for event in step.tokens} == {3}
    assert (finished.attempt, finished.preemptions, finished.recomputed_tokens) == (3, 0, 0)
    assert [sample.reason for sample in finished.samples] == [decoding_pb2.FINISH_REASON_LENGTH]


def test_the_outputs_of_one_step_for_a_gateway_are_one_message(gateway: Link, expected: list[int]) -> None:
    names = {"a", "b"}
    for name in names:
        gateway.submit(name, 40, slow=True)
    for name in names:
        assert gateway.complete(name) == expected[:40]
    steps = [response.step for response in gateway.responses if response.step.tokens]
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    assert any({one.request_id for one in step.tokens} == names for step in steps)


def test_each_gateway_receives_only_its_own_outputs(link: Callable[[], Link], expected: list[int]) -> None:
    links = {"a": link(), "b": link()}
    for name, one in links.items():
        one.submit(name, 30)
    for name, one in links.items():
        assert one.complete(name) == expected[:30]
        assert {tokens.request_id for response in one.responses for tokens in response.step.tokens} == {name}


def test_an_idle_link_receives_heartbeats(gateway: Link) -> None:
    gateway.read_until(lambda _: len(gateway.responses) == 2)
    assert [response.WhichOneof("kind") for response in gateway.responses] == ["heartbeat"] * 2
    assert gateway.responses[0].heartbeat.steps >= 0


def test_a_stop_token_is_among_the_tokens_and_in_the_finish(gateway: Link, expected: list[int]) -> None:
    stop = expected[7]
    stopping = decoding_pb2.Stopping(max_tokens=50, stop_token_ids=[stop], ignore_eos=True)
    gateway.submit("r", stopping=stopping)
    (sample,) = gateway.finish("r").samples
    assert gateway.tokens("r") == expected[: expected.index(stop) + 1]
    assert (sample.reason, sample.stop_token_id) == (decoding_pb2.FINISH_REASON_STOP, stop)


def test_a_continued_request_keeps_its_penalties_and_log_probabilities(gateway: Link) -> None:
    fields = {
        "logit_rules": decoding_pb2.LogitRules(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        "stopping": decoding_pb2.Stopping(max_tokens=20, min_tokens=18, stop_token_ids=[11]),
        "logprobs": 1,
    }
    gateway.submit("whole", **fields)
    whole = gateway.complete("whole")
    for done in (1, 17):
        name = f"failover after {done}"
        gateway.submit(name, samples=[engine_pb2.SampleState(generated_token_ids=whole[:done])], **fields)
        assert whole[:done] + gateway.complete(name) == whole
    received = [tokens for response in gateway.responses for tokens in response.step.tokens]
    assert all(len(one.logprobs) == len(one.token_ids) for one in received)


def test_samples_that_ended_before_a_failover_appear_only_in_the_finish(gateway: Link) -> None:
    fields = {"sampling": decoding_pb2.Sampling(temperature=1, top_p=1, seed=5, sample_count=3)}
    gateway.submit("whole", **fields, samples=[engine_pb2.SampleState()] * 3)
    gateway.finish("whole")
    whole = [gateway.tokens("whole", sample) for sample in range(3)]
    states = [engine_pb2.SampleState(generated_token_ids=tokens, ended=True) for tokens in whole]
    states[1] = engine_pb2.SampleState(generated_token_ids=whole[1][:9])
    gateway.submit("failover", **fields, samples=states, attempt=2)
    finished = gateway.finish("failover")
    assert [gateway.tokens("failover", sample) for sample in range(3)] == [[], whole[1][9:], []]
    ends = [decoding_pb2.FINISH_REASON_STOP, decoding_pb2.FINISH_REASON_LENGTH, decoding_pb2.FINISH_REASON_STOP]
    assert [end.reason for end in finished.samples] == ends


def test_every_message_has_the_engines_load(tiny_quire: RunningQuire, gateway: Link) -> None:
    blocks = tiny_quire.pool().device_blocks
    no_load = engine_pb2.EngineLoad(available_blocks=blocks)
    # The engine frees the blocks of earlier requests a moment after the pool.
    idle = gateway.read_until(lambda response: response.HasField("heartbeat") and response.load == no_load)
    assert (idle.draining, idle.request_blocks) == (False, blocks)

    begin = len(gateway.responses)
    for number in range(20, 24):  # prompts of 32 blocks: two of them fit
        gateway.submit(f"r{number}", 8, prompt_token_ids=[number] * 500, slow=True)
    for number in range(20, 24):
        gateway.finish(f"r{number}")
    loads = [response.load for response in gateway.responses[begin:]]
    assert max(load.running for load in loads) >= 1
    assert max(load.waiting for load in loads) >= 2
    assert 2 * 500 <= max(load.prompt_tokens for load in loads) <= 4 * 500
    assert min(load.available_blocks for load in loads) <= 32
    gateway.read_until(lambda response: response.HasField("heartbeat") and response.load == no_load)


def test_get_engine_describes_the_registered_pool(tiny_quire: RunningQuire) -> None:
    engine = tiny_quire.engine.GetEngine(engine_pb2.GetEngineRequest())
    pool = tiny_quire.pool()
    assert engine == engine_pb2.GetEngineResponse(
        model="tiny-llama",
        engine_id=pool.engine_id,
        model_fingerprint=pool.model_fingerprint,
        context_tokens=CONTEXT,
        vocabulary_size=VOCABULARY,
        block_size=pool.block_size,
        device_blocks=pool.device_blocks,
        dtype="float32",
        tokenizer_digest=engine.tokenizer_digest,
        max_sequences=16,
        device=device_name(),
        features=FEATURES,
        weights="float32",
        kv_dtype="float32",
        generation_defaults=decoding_pb2.GenerationDefaults(),
    )
    assert len(engine.tokenizer_digest) == 32


# Refusals


@pytest.mark.parametrize("same_link", [True, False])
def test_a_second_submission_of_a_live_id_is_refused_and_the_first_continues(
    link: Callable[[], Link], expected: list[int], same_link: bool
) -> None:
    first = link()
    second = first if same_link else link()
    first.start("r", 50)
    second.submit("r", 5, attempt=2)
    refused = second.refusal("r")
    assert refused.attempt == 2
    assert (refused.reason, refused.field) == (engine_pb2.REFUSAL_REASON_ALREADY_EXISTS, "request_id")
    assert first.complete("r") == expected[:50]


INVALID = {
    "prompt": {"prompt_token_ids": []},
    "prompt.token_ids": {"prompt_token_ids": [5, VOCABULARY]},
    "stopping.max_tokens": {"stopping": decoding_pb2.Stopping(max_tokens=-1)},
    "stopping.min_tokens": {"stopping": decoding_pb2.Stopping(max_tokens=5, min_tokens=6)},
    "logit_rules.repetition_penalty": {"logit_rules": decoding_pb2.LogitRules(repetition_penalty=0)},
    "logit_rules.logit_bias": {"logit_rules": decoding_pb2.LogitRules(logit_bias={VOCABULARY: 1.0})},
    "logit_rules.allowed_token_ids": {"logit_rules": decoding_pb2.LogitRules(allowed_token_ids=[-1])},
    "logprobs": {"logprobs": 21},
    "prompt_logprobs": {"prompt_logprobs": -1},
    "sampling.sample_count": {"samples": [engine_pb2.SampleState()] * 65},
    "salt": {"salt": b"s" * 100_000},
}


@pytest.mark.parametrize("field", INVALID)
def test_an_impossible_request_is_refused_with_its_field(gateway: Link, field: str) -> None:
    gateway.submit("r", **INVALID[field])
    refused = gateway.refusal("r")
    assert (refused.reason, refused.field, refused.attempt) == (engine_pb2.REFUSAL_REASON_INVALID, field, 1)
    assert refused.detail


def test_an_id_of_100_kb_is_refused_and_other_requests_continue(
    tiny_quire: RunningQuire, link: Callable[[], Link], expected: list[int]
) -> None:
    session = tiny_quire.pool().session
    neighbour, hostile, long_id = link(), link(), "i" * 100_000
    neighbour.start("neighbour", 50)
    hostile.submit(long_id)
    answer = hostile.read_until(lambda one: one.step.refused or ended(one, long_id))
    assert [(one.request_id, one.field) for one in answer.step.refused] == [(long_id, "request_id")]
    assert neighbour.complete("neighbour") == expected[:50]
    assert tiny_quire.pool().session == session


def test_a_request_beyond_its_deadline_fails(gateway: Link) -> None:
    gateway.submit("r", 900, timeout={"nanos": 1})
    finished = gateway.read_until(lambda response: response.step.finished).step.finished[0]
    assert finished.failure == engine_pb2.FAILURE_REASON_DEADLINE_QUEUED
    assert finished.detail.startswith("deadline exceeded")


def test_an_empty_message_ends_the_link_and_its_requests(tiny_quire: RunningQuire, link: Callable[[], Link]) -> None:
    granted, gateway = granted_blocks(tiny_quire), link()
    gateway.start("r", 900)
    gateway.send(engine_pb2.ServeRequest())
    assert gateway.status() == grpc.StatusCode.INVALID_ARGUMENT
    assert tiny_quire.settled_pool().sequences == 0
    assert granted_blocks(tiny_quire) - granted < 50


def test_an_id_is_free_as_soon_as_its_link_has_ended(link: Callable[[], Link], expected: list[int]) -> None:
    for attempt in range(1, 6):
        gateway = link()
        gateway.start("r", 900, attempt=attempt)
        gateway.half_close()
    last = link()
    last.submit("r", 20, attempt=6)
    assert last.complete("r") == expected[:20]


# Ends of requests


def test_a_cancel_ends_its_request(tiny_quire: RunningQuire, gateway: Link) -> None:
    gateway.start("r", 900)
    gateway.cancel("r")
    (sample,) = gateway.finish("r").samples
    assert sample.reason == decoding_pb2.FINISH_REASON_CANCELLED
    assert len(gateway.tokens("r")) < 900
    assert tiny_quire.settled_pool().device.held == 0


def test_a_cancel_of_another_attempt_another_id_or_another_link_is_ignored(
    link: Callable[[], Link], expected: list[int]
) -> None:
    gateway, stranger = link(), link()
    gateway.start("r", 50, attempt=2)
    gateway.cancel("r", attempt=1)
    gateway.cancel("r", attempt=3)
    gateway.cancel("nobody", attempt=2)
    stranger.cancel("r", attempt=2)
    assert [sample.reason for sample in gateway.finish("r").samples] == [decoding_pb2.FINISH_REASON_LENGTH]
    assert gateway.tokens("r") == expected[:50]


def test_an_id_is_free_as_soon_as_its_request_is_cancelled(gateway: Link, expected: list[int]) -> None:
    for attempt in range(1, 20):
        gateway.submit("r", 900, attempt=attempt)
        gateway.cancel("r", attempt)
    gateway.submit("r", 10, attempt=20)
    response = gateway.read_until(lambda response: any(end.attempt == 20 for end in response.step.finished))
    last = [end for end in response.step.finished if end.attempt == 20]
    assert [sample.reason for sample in last[0].samples] == [decoding_pb2.FINISH_REASON_LENGTH]
    received = [tokens for response in gateway.responses for tokens in response.step.tokens if tokens.attempt == 20]
    assert [token for one in received for token in one.token_ids] == expected[:10]


@pytest.mark.parametrize("end", [Link.half_close, Link.break_off])
def test_the_end_of_a_link_cancels_its_requests_and_no_others(
    tiny_quire: RunningQuire, link: Callable[[], Link], expected: list[int], end: Callable[[Link], None]
) -> None:
    granted, first, second = granted_blocks(tiny_quire), link(), link()
    first.start("first", 900)
    second.start("second", 50)
    end(first)
    assert second.complete("second") == expected[:50]
    assert tiny_quire.settled_pool().sequences == 0
    assert granted_blocks(tiny_quire) - granted < 60
    second.submit("first", 20, attempt=2)
    assert second.complete("first") == expected[:20]


# Slow gateways


@pytest.fixture
def unread(tiny_quire: RunningQuire) -> Iterator[Link]:
    """A link over a connection that buffers no more than 64 KiB."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(tiny_quire.addresses["engine"], options=options) as channel:
        one = Link(engine_pb2_grpc.EngineStub(channel))
        yield one
        one.break_off()
    assert tiny_quire.settled_pool().sequences == 0


def test_output_that_is_not_read_is_merged_without_loss(
    tiny_quire: RunningQuire, unread: Link, expected: list[int]
) -> None:
    before = tiny_quire.pool().totals.prefix_query_tokens
    request_id = "r" * 512  # with all log-probabilities a token takes 700 bytes
    unread.submit(request_id, 200, samples=[engine_pb2.SampleState()] * 4, logprobs=20)
    wait_until(lambda: tiny_quire.pool().totals.prefix_query_tokens > before, "the request has started")
    assert tiny_quire.settled_pool().sequences == 0
    unread.finish(request_id)
    for sample in range(4):
        assert unread.tokens(request_id, sample) == expected
    assert len(unread.responses) < 150


def test_a_gateway_that_does_not_read_is_disconnected_and_delays_no_other(
    tiny_quire: RunningQuire, gateway: Link, expected: list[int]
) -> None:
    """A request has some 100 KiB of output: log-probabilities of its prompt."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 16384),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(tiny_quire.addresses["engine"], options=options) as channel:
        before = tiny_quire.pool().totals.prefix_query_tokens
        unread = Link(engine_pb2_grpc.EngineStub(channel))
        for number in range(150):
            unread.submit(f"u{number}", 1, prompt_token_ids=[20 + number] * 1000, prompt_logprobs=20)
        wait_until(
            lambda: unread.all_sent and tiny_quire.pool().totals.prefix_query_tokens > before, "requests have started"
        )
        gateway.submit("read", 100, priority=-1)
        assert gateway.complete("read") == expected[:100]
        # The pool may also be empty between two requests.
        gateway.read_until(lambda one: one.HasField("heartbeat") and not (one.load.running or one.load.waiting))
        assert unread.status() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len([one for response in unread.responses for one in response.step.finished]) < 150
