"""Generate, Tokenize and GetModel of a running Quire with a tiny model."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import tokenizers

from quire.v1 import decoding_pb2, gateway_pb2, kvmanager_pb2
from services.wire.field_rules import fill
from tests.engine.native_kernels import device_name
from tests.faults import wait_until
from tests.load import SLOW_SEED, prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire
from tests.timing import standing_still
from tests.tiny_models import CONTEXT, VOCABULARY

EOS = 0
POOL_TOKENS = 64 * 16
PROMPT = "Blocks of keys and values"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))


@pytest.fixture(scope="module")
def whole(tiny_quire: RunningQuire) -> Answer:
    """The greedy continuation of PROMPT."""
    return tiny_quire.generate(prompt_request(PROMPT, 60))


def seconds(duration: object) -> float:
    return duration.ToTimedelta().total_seconds()  # type: ignore[attr-defined]


def ids_request(ids: list[int], max_tokens: int | None = 8) -> gateway_pb2.GenerateRequest:
    request = prompt_request("")
    request.prompt.token_ids.ids.extend(ids)
    request.stopping.ClearField("max_tokens")
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    return request


def numbered_ids(count: int, start: int) -> list[int]:
    """Return a prompt; those of different `start` share no prefix."""
    return [2 + (start + 7 * position) % (VOCABULARY - 2) for position in range(count)]


# The stream


def test_a_stream_is_started_once_then_deltas_then_finished_once(whole: Answer) -> None:
    assert whole.events == ["started"] + ["delta"] * len(whole.deltas) + ["finished"]
    assert whole.started.model == "tiny-llama"
    assert whole.started.max_tokens == 60


def test_finished_holds_token_counts_and_the_finish_reason(whole: Answer, tokenizer: tokenizers.Tokenizer) -> None:
    assert [sample.reason for sample in whole.finished.samples] == [decoding_pb2.FINISH_REASON_LENGTH]
    assert whole.finished.samples[0].WhichOneof("matched") is None
    assert len(whole.token_ids) == 60
    assert whole.finished.usage == gateway_pb2.Usage(
        prompt_tokens=len(tokenizer.encode(PROMPT).ids), generated_tokens=60
    )
    assert whole.started.prompt_tokens == whole.finished.usage.prompt_tokens


def test_finished_holds_the_times_of_each_phase(whole: Answer) -> None:
    timing = whole.finished.timing
    assert 0 < seconds(timing.prefill) <= seconds(timing.time_to_first_token) < seconds(timing.total)
    assert 0 < seconds(timing.decode) < seconds(timing.total)
    assert seconds(timing.queued) + seconds(timing.prefill) + seconds(timing.decode) <= seconds(timing.total)
    assert timing.preemptions == 0


def test_tokens_are_streamed_one_by_one(tiny_quire: RunningQuire) -> None:
    """A paused process may receive some tokens together."""
    assert len(tiny_quire.generate(slow_request(PROMPT, 30)).deltas) > 10


@pytest.mark.parametrize("special_tokens", [False, True])
def test_text_is_the_tokenizers_decode_of_the_token_ids(
    tiny_quire: RunningQuire, tokenizer: tokenizers.Tokenizer, special_tokens: bool
) -> None:
    request = sampled_request(3, 150)
    request.output.special_tokens = special_tokens
    texts = by_sample(tiny_quire.generate(request))
    for text, token_ids in texts.values():
        assert text == tokenizer.decode(token_ids, skip_special_tokens=not special_tokens)
    assert any("<|" in text for text, _ in texts.values()) == special_tokens, "450 random tokens contain special ones"


def test_a_given_request_id_is_returned_and_a_missing_one_is_generated(tiny_quire: RunningQuire) -> None:
    request = prompt_request(PROMPT, 1)
    made = [tiny_quire.generate(request).started.request_id for _ in range(2)]
    assert "" not in made
    assert made[0] != made[1]
    request.request_id = "mine"
    assert tiny_quire.generate(request).started.request_id == "mine"


# Prompts


def test_a_text_and_its_token_ids_are_the_same_prompt(
    tiny_quire: RunningQuire, whole: Answer, tokenizer: tokenizers.Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    assert list(tiny_quire.gateway.Tokenize(tokenize_request(text=PROMPT)).token_ids) == ids
    assert tiny_quire.generate(ids_request(ids, 60)).token_ids == whole.token_ids


def test_a_chat_is_the_prompt_that_its_template_makes(
    tiny_quire: RunningQuire, tokenizer: tokenizers.Tokenizer
) -> None:
    messages = [("system", "Be brief."), ("user", "北京?")]
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role=role, content=text) for role, text in messages])
    written = "<|system|>Be brief.\n<|user|>北京?\n<|assistant|>"
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    assert list(tiny_quire.gateway.Tokenize(tokenize_request(chat=chat)).token_ids) == ids
    request = prompt_request("", 20)
    request.prompt.chat.CopyFrom(chat)
    answer = tiny_quire.generate(request)
    assert answer.started.prompt_tokens == len(ids)
    assert answer.token_ids == tiny_quire.generate(ids_request(ids, 20)).token_ids


def test_tokenize_returns_token_ids_unchanged(tiny_quire: RunningQuire) -> None:
    ids = gateway_pb2.TokenIds(ids=[5, 5, 0, 1])
    assert list(tiny_quire.gateway.Tokenize(tokenize_request(token_ids=ids)).token_ids) == [5, 5, 0, 1]


def tokenize_request(model: str = "", **prompt: object) -> gateway_pb2.TokenizeRequest:
    return gateway_pb2.TokenizeRequest(model=model, prompt=gateway_pb2.Prompt(**prompt))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "tiny-llama"])
def test_get_model_describes_the_model_by_its_name_or_none(tiny_quire: RunningQuire, name: str) -> None:
    model = tiny_quire.gateway.GetModel(gateway_pb2.GetModelRequest(model=name))
    assert list(tiny_quire.gateway.ListModels(gateway_pb2.ListModelsRequest()).models) == [model]
    assert model == gateway_pb2.GetModelResponse(
        model="tiny-llama",
        context_tokens=CONTEXT,
        vocabulary_size=VOCABULARY,
        block_size=16,
        device_blocks=64,
        dtype="float32",
        engines=1,
        devices=[device_name()],
        weights=["float32"],
        kv_dtypes=["float32"],
        generation_defaults=decoding_pb2.GenerationDefaults(),
        call_format="hermes",
    )


# Ends


def eos_request(seed: int, *, ignore_eos: bool) -> gateway_pb2.GenerateRequest:
    request = prompt_request(PROMPT, 60, seed=seed, ignore_eos=ignore_eos)
    request.logit_rules.logit_bias[EOS] = 2
    return request


def ending_with_eos(quire: RunningQuire) -> tuple[int, Answer]:
    """Find a seed whose sampled answer contains the end-of-sequence token before its end."""
    for seed in range(20):
        answer = quire.generate(eos_request(seed, ignore_eos=True))
        if EOS in answer.token_ids[5:-5] and EOS not in answer.token_ids[:5]:
            return seed, answer
    raise AssertionError("20 seeds without an end-of-sequence token")


def test_the_models_own_end_token_ends_a_stream_unless_it_is_ignored(
    tiny_quire: RunningQuire, tokenizer: tokenizers.Tokenizer
) -> None:
    seed, ignoring = ending_with_eos(tiny_quire)
    ended = tiny_quire.generate(eos_request(seed, ignore_eos=False))
    length = ignoring.token_ids.index(EOS) + 1
    assert ended.token_ids == ignoring.token_ids[:length]
    assert ended.text == tokenizer.decode(ended.token_ids[:-1])
    assert ended.finished.usage.generated_tokens == length
    sample = ended.finished.samples[0]
    assert (sample.reason, sample.WhichOneof("matched"), sample.stop_token_id) == (
        decoding_pb2.FINISH_REASON_STOP,
        "stop_token_id",
        EOS,
    )


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_ends_a_stream_and_is_included_on_request(
    tiny_quire: RunningQuire, tokenizer: tokenizers.Tokenizer, whole: Answer, include_stop: bool
) -> None:
    stop = whole.token_ids[12]
    length = whole.token_ids.index(stop) + 1
    request = prompt_request(PROMPT, 60)
    request.stopping.stop_token_ids.extend([VOCABULARY - 1 if stop != VOCABULARY - 1 else 5, stop])
    request.stopping.include_stop = include_stop
    request.output.special_tokens = True
    answer = tiny_quire.generate(request)
    assert answer.token_ids == whole.token_ids[:length]
    shown = answer.token_ids if include_stop else answer.token_ids[:-1]
    assert answer.text == tokenizer.decode(shown, skip_special_tokens=False)
    assert answer.finished.samples[0].stop_token_id == stop
    assert answer.finished.samples[0].reason == decoding_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_of_several_tokens_ends_the_text_exactly_before_it(
    tiny_quire: RunningQuire, whole: Answer, tokenizer: tokenizers.Tokenizer, include_stop: bool
) -> None:
    beginnings = ((count, tokenizer.decode(whole.token_ids[:count])) for count in range(10, 100))
    at_characters = [(count, text) for count, text in beginnings if whole.text.startswith(text)]
    (_, before), (count, with_stop) = at_characters[0], at_characters[6]
    stop = with_stop.removeprefix(before)
    begin = whole.text.index(stop)
    request = prompt_request(PROMPT, 1000)
    request.stopping.stop_strings.extend(["nowhere in this text", stop[1:-1]])
    request.stopping.include_stop = include_stop
    answer = tiny_quire.generate(request)
    assert len(before) <= begin
    assert answer.text == whole.text[: begin + len(stop) - 1 if include_stop else begin + 1]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) <= count
    assert answer.finished.usage.generated_tokens == len(answer.token_ids)
    sample = answer.finished.samples[0]
    assert (sample.reason, sample.stop_string) == (decoding_pb2.FINISH_REASON_STOP, stop[1:-1])
    assert tiny_quire.settled_pool().device.held == 0

    def granted() -> int:
        before = tiny_quire.settled_pool().totals.granted_blocks
        tiny_quire.generate(request)
        return tiny_quire.settled_pool().totals.granted_blocks - before

    # The engine continues until it receives the gateway's cancellation, which may be late.
    wait_until(lambda: granted() < 10, "the engine stops at the stop string")


def test_text_that_begins_like_a_stop_string_is_complete_at_the_end(tiny_quire: RunningQuire, whole: Answer) -> None:
    request = prompt_request(PROMPT, 60)
    request.stopping.stop_strings.extend([whole.text[-4:] + "more", whole.text[8:12] + "\0\0"])
    answer = tiny_quire.generate(request)
    assert (answer.text, answer.token_ids) == (whole.text, whole.token_ids)
    assert answer.finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH


def test_without_max_tokens_a_stream_ends_when_the_pool_is_full(tiny_quire: RunningQuire) -> None:
    assert POOL_TOKENS < CONTEXT
    answer = tiny_quire.generate(ids_request(numbered_ids(1000, 0), None))
    # The last token is never fed back, so it takes no slot.
    assert answer.started.max_tokens == len(answer.token_ids) == POOL_TOKENS + 1 - 1000
    assert answer.finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH


# Random numbers


def test_a_seed_repeats_an_answer_and_another_seed_gives_another(tiny_quire: RunningQuire) -> None:
    first, again, other = (tiny_quire.generate(prompt_request(PROMPT, 20, seed=seed)) for seed in (5, 5, 6))
    assert first.token_ids == again.token_ids != other.token_ids
    assert first.started.sampling.seed == 5


def test_without_a_seed_one_is_drawn_which_repeats_the_answer(tiny_quire: RunningQuire) -> None:
    request = prompt_request(PROMPT, 20)
    request.sampling.temperature = 1
    drawn, other = tiny_quire.generate(request), tiny_quire.generate(request)
    assert drawn.token_ids != other.token_ids
    seed = drawn.started.sampling.seed
    assert seed != other.started.sampling.seed
    assert tiny_quire.generate(prompt_request(PROMPT, 20, seed=seed)).token_ids == drawn.token_ids


def test_started_holds_the_defaults_of_sampling(tiny_quire: RunningQuire) -> None:
    request = gateway_pb2.GenerateRequest(stopping=decoding_pb2.Stopping(max_tokens=1))
    request.prompt.text = PROMPT
    sampling = tiny_quire.generate(request).started.sampling
    assert sampling.HasField("seed")
    sampling.ClearField("seed")
    usual = decoding_pb2.Sampling(temperature=1, top_k=0, top_p=1, min_p=0, sample_count=1)
    fill(usual)
    assert sampling == usual


# The prefix cache


def test_a_repeated_prompt_hits_the_cache_and_gets_the_same_answer(tiny_quire: RunningQuire) -> None:
    prompt = numbered_ids(40, 1)
    first, second = (tiny_quire.generate(ids_request(prompt, 20)) for _ in range(2))
    assert (first.started.cached_tokens, second.started.cached_tokens) == (0, 32)
    assert second.finished.usage.cached_tokens == 32
    assert first.token_ids == second.token_ids


def test_prompts_with_different_salts_share_no_blocks(tiny_quire: RunningQuire) -> None:
    request = ids_request(numbered_ids(40, 2), 4)
    cached = []
    for salt in ("", "mine", "yours", "mine"):
        request.cache.salt = salt
        cached.append(tiny_quire.generate(request).started.cached_tokens)
    assert cached == [0, 0, 0, 32]


# Time and order


def test_an_exceeded_timeout_ends_the_call_and_frees_its_blocks(tiny_quire: RunningQuire) -> None:
    request = prompt_request(PROMPT, 900)
    request.timeout.FromTimedelta(timedelta(seconds=0.3))
    granted = tiny_quire.settled_pool().totals.granted_blocks
    call = tiny_quire.gateway.Generate(request, timeout=CALL_SECONDS)
    kinds = []
    with pytest.raises(grpc.RpcError) as caught:
        kinds.extend(response.WhichOneof("event") for response in call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert ("quire-field", "timeout") in caught.value.trailing_metadata()
    assert "finished" not in kinds
    pool = tiny_quire.settled_pool()
    assert pool.device.held == 0
    assert pool.totals.granted_blocks - granted < 50, "the engine continued after the deadline"


def test_a_smaller_priority_is_served_before_an_earlier_request(tiny_quire: RunningQuire) -> None:
    """A request fills so much of the pool that two others wait; only one of them fits at a time."""
    wait_until(lambda: tiny_quire.open_streams() == 0, "streams of earlier tests have ended")
    calls = []
    with standing_still(tiny_quire.children()["engine"]):  # it receives them together, in this order
        for place, (name, priority, prompt_tokens, max_tokens) in enumerate(
            (("holder", 0, 600, 400), ("early", 3, 900, 2), ("urgent", -3, 900, 2))
        ):
            request = ids_request(numbered_ids(prompt_tokens, 3 + place), max_tokens)
            request.priority, request.request_id = priority, name
            calls.append(tiny_quire.gateway.Generate(request, timeout=CALL_SECONDS))
            wait_until(lambda place=place: tiny_quire.open_streams() == place + 1, f"{name} is in flight")  # type: ignore[misc]
    calls[0].cancel()
    assert [len(Answer.of(call).token_ids) for call in calls[1:]] == [2, 2]
    assert admission(tiny_quire, "urgent") < admission(tiny_quire, "early")


def admission(quire: RunningQuire, request_id: str) -> int:
    explanation = quire.kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=request_id), timeout=CALL_SECONDS)
    return next(
        event.event
        for event in explanation.events
        if (event.item, event.refusal) == (kvmanager_pb2.STEP_ITEM_ALLOCATE, kvmanager_pb2.STEP_REFUSAL_UNSPECIFIED)
    )


# Several samples


def sampled_request(samples: int, max_tokens: int = 24) -> gateway_pb2.GenerateRequest:
    request = prompt_request(PROMPT, max_tokens)
    request.sampling.temperature = 1.0
    request.sampling.seed = 11
    request.sampling.sample_count = samples
    return request


def by_sample(answer: Answer) -> dict[int, tuple[str, list[int]]]:
    found: dict[int, tuple[str, list[int]]] = {}
    for delta in answer.deltas:
        text, token_ids = found.get(delta.sample, ("", []))
        found[delta.sample] = (text + delta.text, [*token_ids, *delta.token_ids])
    return found


@pytest.fixture(scope="module")
def three(tiny_quire: RunningQuire) -> dict[int, tuple[str, list[int]]]:
    return by_sample(tiny_quire.generate(sampled_request(3)))


def test_samples_are_streamed_side_by_side_and_counted_together(
    tiny_quire: RunningQuire, three: dict[int, tuple[str, list[int]]]
) -> None:
    answer = tiny_quire.generate(sampled_request(3))
    assert by_sample(answer) == three
    assert len({text for text, _ in three.values()}) == 3
    assert by_sample(tiny_quire.generate(sampled_request(1))) == {0: three[0]}
    slow_samples = sampled_request(3)
    slow_samples.sampling.seed = SLOW_SEED
    assert [sample.reason for sample in answer.finished.samples] == [decoding_pb2.FINISH_REASON_LENGTH] * 3
    assert answer.finished.usage.generated_tokens == 3 * 24
    order = [delta.sample for delta in tiny_quire.generate(slow_samples).deltas]
    assert order != sorted(order), "the samples are interleaved"


def test_samples_share_the_blocks_of_the_prompt_and_copy_the_last_one(tiny_quire: RunningQuire) -> None:
    request = ids_request(numbered_ids(40, 5), 24)
    request.sampling.sample_count = 3
    before = tiny_quire.settled_pool().totals
    tiny_quire.generate(request)
    after = tiny_quire.settled_pool().totals
    assert after.copied_blocks - before.copied_blocks == 2
    assert after.granted_blocks - before.granted_blocks == 3 + 2 + 3, "three requests would take four blocks each"
    assert after.peak_saved_blocks >= 4


def test_a_stop_string_ends_only_the_sample_that_contains_it(
    tiny_quire: RunningQuire, three: dict[int, tuple[str, list[int]]]
) -> None:
    stop = three[1][0][6:9]
    assert stop not in three[0][0] + three[2][0]
    request = sampled_request(3)
    request.stopping.stop_strings.append(stop)
    answer = tiny_quire.generate(request)
    texts = {sample: text for sample, (text, _) in by_sample(answer).items()}
    end = three[1][0].index(stop)
    assert texts == {0: three[0][0], 1: three[1][0][:end], 2: three[2][0]}
    ends = [(sample.reason, sample.stop_string) for sample in answer.finished.samples]
    assert ends[1] == (decoding_pb2.FINISH_REASON_STOP, stop)
    assert ends[0] == ends[2] == (decoding_pb2.FINISH_REASON_LENGTH, "")
    assert tiny_quire.settled_pool().device.held == 0


def test_a_stop_token_that_ended_a_sample_early_is_not_in_its_text(
    tiny_quire: RunningQuire, three: dict[int, tuple[str, list[int]]]
) -> None:
    ids = three[2][1]
    stop = next(token for token in ids[2:] if token not in three[0][1] + three[1][1])
    request = sampled_request(3)
    request.stopping.stop_token_ids.append(stop)
    answer = tiny_quire.generate(request)
    text, token_ids = by_sample(answer)[2]
    assert token_ids == ids[: ids.index(stop) + 1]
    assert three[2][0].startswith(text)
    assert answer.finished.samples[2].stop_token_id == stop
    assert len(by_sample(answer)[0][1]) == 24


def test_all_samples_at_a_stop_string_end_the_request(tiny_quire: RunningQuire) -> None:
    request = sampled_request(4, 200)
    request.stopping.stop_strings.extend("abcdefghijklmnopqrstuvwxyz \n.,e")
    answer = tiny_quire.generate(request)
    assert [sample.reason for sample in answer.finished.samples] == [decoding_pb2.FINISH_REASON_STOP] * 4
    assert tiny_quire.settled_pool().device.held == 0
