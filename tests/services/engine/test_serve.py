"""Engine.Serve, spoken to as a gateway speaks to it."""

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.tiny_models import CONTEXT, VOCABULARY

PROMPT = [20, 30, 40, 50, 60]
# What is to meet a request while it runs comes too late where this process is held up: then it is tried with another.
ATTEMPTS = 20


class Link:
    """A gateway's end of a Serve stream. Everything that was read is kept."""

    def __init__(self, engine: engine_pb2_grpc.EngineStub) -> None:
        self._outgoing: queue.SimpleQueue[engine_pb2.ServeRequest | None] = queue.SimpleQueue()
        self._call = engine.Serve(iter(self._outgoing.get, None), timeout=CALL_SECONDS)
        self.responses: list[engine_pb2.ServeResponse] = []

    def submit(self, request_id: str, max_tokens: int = 20, **fields: Any) -> None:
        self._outgoing.put(engine_pb2.ServeRequest(submission=submission(request_id, max_tokens, **fields)))

    def cancel(self, request_id: str, attempt: int = 1) -> None:
        self._outgoing.put(engine_pb2.ServeRequest(cancel=engine_pb2.Cancel(request_id=request_id, attempt=attempt)))

    def send(self, message: engine_pb2.ServeRequest) -> None:
        self._outgoing.put(message)

    def read_until(self, holds: Callable[[engine_pb2.ServeResponse], object]) -> engine_pb2.ServeResponse:
        """Read on until a message holds what is looked for, and return that one."""
        for response in self._call:
            self.responses.append(response)
            if holds(response):
                return response
        raise AssertionError("the engine ended the stream")

    def finish(self, request_id: str) -> engine_pb2.RequestFinished:
        """Read until a request has ended, unless that was read already: news that wait come in one message."""
        ends = [end for response in self.responses for end in ended(response, request_id)]
        return ends[0] if ends else ended(self.read_until(lambda one: ended(one, request_id)), request_id)[0]

    def refusal(self, request_id: str) -> engine_pb2.RequestRefused:
        """Read until a submission is refused."""
        response = self.read_until(lambda response: response.step.refused)
        (refused,) = response.step.refused
        assert refused.request_id == request_id
        return refused

    def tokens(self, request_id: str, sample: int = 0) -> list[int]:
        """Return the tokens of a sample read so far."""
        news = [news for response in self.responses for news in response.step.tokens]
        own = [one for one in news if (one.request_id, one.sample) == (request_id, sample)]
        return [token for one in own for token in one.token_ids]

    @property
    def all_said(self) -> bool:
        """Whether gRPC has taken all messages."""
        return self._outgoing.empty()

    def half_close(self) -> None:
        """Say that nothing more comes, and read what the engine still says."""
        self._outgoing.put(None)
        self.responses.extend(self._call)

    def break_off(self) -> None:
        self._call.cancel()
        self._outgoing.put(None)

    def status(self) -> grpc.StatusCode:
        """Read until the engine ends the stream with an error."""
        with pytest.raises(grpc.RpcError) as caught:
            self.responses.extend(self._call)
        return caught.value.code()


def submission(request_id: str, max_tokens: int = 20, **fields: Any) -> engine_pb2.Submission:
    usual = {
        "attempt": 1,
        "prompt_token_ids": PROMPT,
        "sampling": decoding_pb2.Sampling(temperature=0, top_p=1, seed=0),
        "stopping": decoding_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    }
    return engine_pb2.Submission(request_id=request_id, **(usual | fields))


def ended(response: engine_pb2.ServeResponse, request_id: str) -> list[engine_pb2.RequestFinished]:
    return [finished for finished in response.step.finished if finished.request_id == request_id]


@pytest.fixture
def link(tiny_quire: RunningQuire) -> Iterator[Callable[[], Link]]:
    """Begins links; all of them are broken off at the end, which must leave nothing."""
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
    """The first 300 tokens after PROMPT."""
    link = Link(tiny_quire.engine)
    link.submit("expected", 300)
    link.finish("expected")
    link.break_off()
    return link.tokens("expected")


def granted_blocks(quire: RunningQuire) -> int:
    return quire.pool().totals.granted_blocks


def until_met(met: Callable[[str], bool]) -> None:
    """Try with one request id after another, until the request was met while it ran."""
    assert any(met(f"r{number}") for number in range(ATTEMPTS)), "the request is never met"


# What comes back


def test_a_request_is_started_makes_tokens_and_finishes(gateway: Link, expected: list[int]) -> None:
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


def test_the_news_of_one_step_for_a_gateway_are_one_message(gateway: Link, expected: list[int]) -> None:
    """Where the link is behind it has the news of several steps, and the number of the last one."""

    def ran_together(first: str) -> bool:
        names, begin = (first, f"{first}, the second"), len(gateway.responses)
        for name in names:
            gateway.submit(name, 100)
        for name in names:
            gateway.finish(name)
            assert gateway.tokens(name) == expected[:100]
        steps = [response.step for response in gateway.responses[begin:] if response.step.tokens]
        assert [step.step for step in steps] == sorted({step.step for step in steps})
        return sum({one.request_id for one in step.tokens} == set(names) for step in steps) > 10

    until_met(ran_together)


def test_each_gateway_receives_only_its_own_outputs(link: Callable[[], Link], expected: list[int]) -> None:
    links = {"a": link(), "b": link()}
    for name, one in links.items():
        one.submit(name, 30)
    for name, one in links.items():
        one.finish(name)
        assert one.tokens(name) == expected[:30]
        assert {news.request_id for response in one.responses for news in response.step.tokens} == {name}


def test_an_idle_link_receives_heartbeats(gateway: Link) -> None:
    gateway.read_until(lambda _: len(gateway.responses) == 2)
    assert [response.WhichOneof("kind") for response in gateway.responses] == ["heartbeat"] * 2
    assert gateway.responses[0].heartbeat.steps >= 0


def test_a_request_continues_at_another_engine(gateway: Link, expected: list[int]) -> None:
    gateway.submit("r", 20, samples=[engine_pb2.SampleState(generated_token_ids=expected[:15])], attempt=2)
    gateway.finish("r")
    assert gateway.tokens("r") == expected[15:20], "max_tokens counts from the prompt's end"


def test_a_stop_token_is_among_the_tokens_and_named_at_the_end(gateway: Link, expected: list[int]) -> None:
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
    gateway.finish("whole")
    whole = gateway.tokens("whole")
    for done in (1, 17):
        name = f"moved after {done}"
        gateway.submit(name, samples=[engine_pb2.SampleState(generated_token_ids=whole[:done])], **fields)
        gateway.finish(name)
        assert whole[:done] + gateway.tokens(name) == whole
    news = [news for response in gateway.responses for news in response.step.tokens]
    assert all(len(one.logprobs) == len(one.token_ids) for one in news)


def test_samples_that_ended_before_a_failover_appear_only_in_the_end(gateway: Link) -> None:
    fields = {"sampling": decoding_pb2.Sampling(temperature=1, top_p=1, seed=5, sample_count=3)}
    gateway.submit("whole", **fields, samples=[engine_pb2.SampleState()] * 3)
    gateway.finish("whole")
    whole = [gateway.tokens("whole", sample) for sample in range(3)]
    states = [engine_pb2.SampleState(generated_token_ids=tokens, ended=True) for tokens in whole]
    states[1] = engine_pb2.SampleState(generated_token_ids=whole[1][:9])
    gateway.submit("moved", **fields, samples=states, attempt=2)
    finished = gateway.finish("moved")
    assert [gateway.tokens("moved", sample) for sample in range(3)] == [[], whole[1][9:], []]
    ends = [decoding_pb2.FINISH_REASON_STOP, decoding_pb2.FINISH_REASON_LENGTH, decoding_pb2.FINISH_REASON_STOP]
    assert [end.reason for end in finished.samples] == ends


def test_every_message_has_the_engines_load(tiny_quire: RunningQuire, gateway: Link) -> None:
    blocks = tiny_quire.pool().device_blocks
    nothing = engine_pb2.EngineLoad(available_blocks=blocks)
    # The engine learns a moment after the pool that the blocks of the requests before are free.
    idle = gateway.read_until(lambda response: response.HasField("heartbeat") and response.load == nothing)
    assert (idle.draining, idle.request_blocks) == (False, blocks)

    def told(first: int) -> bool:
        """Four prompts of 32 blocks each: two of them fit. They may be over before all were submitted."""
        begin = len(gateway.responses)
        for number in range(first, first + 4):
            gateway.submit(f"r{number}", 8, prompt_token_ids=[number] * 500)
        for number in range(first, first + 4):
            gateway.finish(f"r{number}")
        loads = [response.load for response in gateway.responses[begin:]]
        assert max(load.prompt_tokens for load in loads) <= 4 * 500
        return (
            max(load.running for load in loads) >= 1
            and max(load.waiting for load in loads) >= 2
            and max(load.prompt_tokens for load in loads) >= 2 * 500
            and min(load.available_blocks for load in loads) <= 32
        )

    assert any(told(20 + 4 * attempt) for attempt in range(ATTEMPTS))
    gateway.read_until(lambda response: response.HasField("heartbeat") and response.load == nothing)


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
    )
    assert len(engine.tokenizer_digest) == 32


# What is refused


@pytest.mark.parametrize("same_link", [True, False])
def test_a_second_submission_of_a_live_id_is_refused_and_the_first_continues(
    link: Callable[[], Link], expected: list[int], same_link: bool
) -> None:
    first = link()
    second = first if same_link else link()

    def refused_while_live(request_id: str) -> bool:
        first.submit(request_id, 300)
        first.read_until(lambda response: response.step.started)
        second.submit(request_id, 5, attempt=2)
        answer = second.read_until(
            lambda response: response.step.refused or [end for end in ended(response, request_id) if end.attempt == 2]
        )
        if not answer.step.refused:  # the first one had ended
            return False
        (refused,) = answer.step.refused
        assert (refused.request_id, refused.attempt) == (request_id, 2)
        assert (refused.reason, refused.field) == (engine_pb2.REFUSAL_REASON_ALREADY_EXISTS, "request_id")
        first.finish(request_id)
        assert first.tokens(request_id) == expected
        return True

    until_met(refused_while_live)


INVALID = {
    "prompt": {"prompt_token_ids": []},
    "prompt.token_ids": {"prompt_token_ids": [5, VOCABULARY]},
    "stopping.max_tokens": {"stopping": decoding_pb2.Stopping(max_tokens=0)},
    "stopping.min_tokens": {"stopping": decoding_pb2.Stopping(max_tokens=5, min_tokens=6)},
    "logit_rules.repetition_penalty": {"logit_rules": decoding_pb2.LogitRules(repetition_penalty=0)},
    "logit_rules.logit_bias": {"logit_rules": decoding_pb2.LogitRules(logit_bias={VOCABULARY: 1.0})},
    "logit_rules.allowed_token_ids": {"logit_rules": decoding_pb2.LogitRules(allowed_token_ids=[-1])},
    "logprobs": {"logprobs": 21},
    "prompt_logprobs": {"prompt_logprobs": -1},
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
    neighbour.submit("neighbour", 300)
    neighbour.read_until(lambda response: response.step.started)
    hostile.submit(long_id)
    answer = hostile.read_until(lambda one: one.step.refused or ended(one, long_id))
    assert [(one.request_id, one.field) for one in answer.step.refused] == [(long_id, "request_id")]
    neighbour.finish("neighbour")
    assert neighbour.tokens("neighbour") == expected
    assert tiny_quire.pool().session == session


def test_more_samples_than_the_engine_runs_are_refused_naming_the_field(gateway: Link) -> None:
    gateway.submit("r", samples=[engine_pb2.SampleState()] * 65)
    refused = gateway.refusal("r")
    assert (refused.reason, refused.field) == (engine_pb2.REFUSAL_REASON_INVALID, "sampling.sample_count")


def test_a_request_whose_time_is_over_fails_by_its_deadline(gateway: Link) -> None:
    gateway.submit("r", 900, timeout={"nanos": 1})
    finished = gateway.read_until(lambda response: response.step.finished).step.finished[0]
    assert finished.failure == engine_pb2.FAILURE_REASON_DEADLINE_QUEUED
    assert finished.detail.startswith("deadline exceeded")


def test_an_empty_message_ends_the_link_and_its_requests(tiny_quire: RunningQuire, link: Callable[[], Link]) -> None:
    def cut_off(request_id: str) -> bool:
        granted, gateway = granted_blocks(tiny_quire), link()
        gateway.submit(request_id, 900)
        gateway.read_until(lambda response: response.step.started)
        gateway.send(engine_pb2.ServeRequest())
        assert gateway.status() == grpc.StatusCode.INVALID_ARGUMENT
        assert tiny_quire.settled_pool().sequences == 0
        return granted_blocks(tiny_quire) - granted < 50

    until_met(cut_off)


def test_an_id_is_free_again_when_the_end_of_its_link_was_seen(link: Callable[[], Link], expected: list[int]) -> None:
    """What the engine is told comes to it in order: the end of the old link's requests before the new request."""
    for attempt in range(1, 6):
        gateway = link()
        gateway.submit("r", 300, attempt=attempt)
        gateway.read_until(lambda response: response.step.tokens)
        gateway.half_close()
    last = link()
    last.submit("r", 20, attempt=6)
    last.finish("r")
    assert last.tokens("r") == expected[:20]


def test_an_id_whose_link_broke_is_free_again_after_a_few_attempts(
    link: Callable[[], Link], expected: list[int]
) -> None:
    first, second = link(), link()
    first.submit("r", 900)
    first.read_until(lambda response: response.step.tokens)
    first.break_off()
    for attempt in range(2, 40):
        second.submit("r", 20, attempt=attempt)
        answer = second.read_until(lambda response: response.step.refused or response.step.started)
        if answer.step.started:
            break
    second.finish("r")
    assert second.tokens("r") == expected[:20]


# What ends a request


def test_a_cancel_ends_its_request(tiny_quire: RunningQuire, gateway: Link) -> None:
    def cancelled(request_id: str) -> bool:
        gateway.submit(request_id, 900)
        gateway.read_until(lambda response: response.step.tokens)
        gateway.cancel(request_id)
        (sample,) = gateway.finish(request_id).samples
        return sample.reason == decoding_pb2.FINISH_REASON_CANCELLED and len(gateway.tokens(request_id)) < 900

    until_met(cancelled)
    assert tiny_quire.settled_pool().device.held == 0


def test_a_cancel_of_another_attempt_another_id_or_another_link_is_ignored(
    link: Callable[[], Link], expected: list[int]
) -> None:
    gateway, stranger = link(), link()
    gateway.submit("r", 300, attempt=2)
    gateway.read_until(lambda response: response.step.tokens)
    gateway.cancel("r", attempt=1)
    gateway.cancel("r", attempt=3)
    gateway.cancel("nobody", attempt=2)
    stranger.cancel("r", attempt=2)
    assert [sample.reason for sample in gateway.finish("r").samples] == [decoding_pb2.FINISH_REASON_LENGTH]
    assert gateway.tokens("r") == expected


def test_an_id_can_be_used_again_as_soon_as_its_request_is_cancelled(gateway: Link, expected: list[int]) -> None:
    """All in one batch: the engine still has the end of the first to tell when the second is there."""
    for attempt in range(1, 20):
        gateway.submit("r", 900, attempt=attempt)
        gateway.cancel("r", attempt)
    gateway.submit("r", 10, attempt=20)
    response = gateway.read_until(lambda response: any(end.attempt == 20 for end in response.step.finished))
    last = [end for end in response.step.finished if end.attempt == 20]
    assert [sample.reason for sample in last[0].samples] == [decoding_pb2.FINISH_REASON_LENGTH]
    news = [news for response in gateway.responses for news in response.step.tokens if news.attempt == 20]
    assert [token for one in news for token in one.token_ids] == expected[:10]


@pytest.mark.parametrize("end", [Link.half_close, Link.break_off])
def test_the_end_of_a_link_cancels_its_requests_and_no_others(
    tiny_quire: RunningQuire, link: Callable[[], Link], expected: list[int], end: Callable[[Link], None]
) -> None:
    def cut_off(request_id: str) -> bool:
        granted, leaving, staying = granted_blocks(tiny_quire), link(), link()
        leaving.submit("leaving", 900)
        leaving.read_until(lambda response: response.step.tokens)
        staying.submit(request_id, 300)
        staying.read_until(lambda response: response.step.tokens)
        end(leaving)
        staying.finish(request_id)
        assert staying.tokens(request_id) == expected
        assert tiny_quire.settled_pool().sequences == 0
        return granted_blocks(tiny_quire) - granted < 60

    until_met(cut_off)


# A gateway that does not read. Long ids make every message large, so that few fit into what gRPC buffers.


@pytest.fixture
def deaf(tiny_quire: RunningQuire) -> Iterator[Link]:
    """A link over a connection that buffers no more than 64 KiB."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(tiny_quire.addresses["engine"], options=options) as channel:
        one = Link(engine_pb2_grpc.EngineStub(channel))
        yield one
        one.break_off()
    assert tiny_quire.settled_pool().sequences == 0


def wait_until_over(quire: RunningQuire, request: int) -> None:
    """Wait, without reading the link, until all requests since are over."""
    while quire.pool().totals.prefix_query_tokens == request:
        pass  # each look is a call
    assert quire.settled_pool().sequences == 0


def much_output(samples: int) -> dict[str, Any]:
    """Return what makes each token some 700 bytes: with the longest id, and all the log-probabilities there can be."""
    return {"request_id": "r" * 512, "samples": [engine_pb2.SampleState()] * samples, "logprobs": 20}


def test_output_that_is_not_read_is_merged_and_nothing_of_it_lost(
    tiny_quire: RunningQuire, deaf: Link, expected: list[int]
) -> None:
    before = tiny_quire.pool().totals.prefix_query_tokens
    request = much_output(samples=4)
    deaf.submit(max_tokens=200, **request)
    wait_until_over(tiny_quire, before)
    deaf.finish(request["request_id"])
    for sample in range(4):
        assert deaf.tokens(request["request_id"], sample) == expected[:200]
    assert len(deaf.responses) < 150


def test_a_gateway_that_does_not_read_delays_no_other(gateway: Link, deaf: Link, expected: list[int]) -> None:
    deaf.submit(max_tokens=300, **much_output(samples=2))
    gateway.submit("r", 300)
    gateway.finish("r")
    assert gateway.tokens("r") == expected


# A gateway that does not read


def test_a_gateway_that_does_not_read_is_cut_off_and_no_other_waits(
    tiny_quire: RunningQuire, gateway: Link, expected: list[int]
) -> None:
    """Scores of prompts are much output for little work: a request brings some 100 KiB."""
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
        while not unread.all_said or tiny_quire.pool().totals.prefix_query_tokens == before:
            pass  # each look is a call
        gateway.submit("read", 100, priority=-1)
        gateway.finish("read")
        assert gateway.tokens("read") == expected[:100]
        # Between two requests the pool may have no sequence, but the engine is idle after the last one alone.
        gateway.read_until(lambda one: one.HasField("heartbeat") and not (one.load.running or one.load.waiting))
        assert unread.status() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len([one for response in unread.responses for one in response.step.finished]) < 150
