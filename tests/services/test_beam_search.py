"""Beam search of a running Quire with a tiny model: the answers of transformers, and refused options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.schedule.request import BeamSearch
from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.runtime.errors import FIELD_METADATA
from tests.reference import beam_reference
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire

PROMPT = tuple(range(40, 77))
# The tiny model's weights are so wide that float32 sums in another order differ by a little more than 1e-4.
TOLERANCE = 5e-4


def beam_request(width: int | None = 4, answers: int = 1, max_tokens: int = 16, **search: Any) -> Any:
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=PROMPT)),
        sampling=decoding_pb2.Sampling(sample_count=answers),
        beam_search=decoding_pb2.BeamSearch(width=width, **search),
        stopping=decoding_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    )


def by_sample(answer: Answer) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in answer.finished.samples]
    for delta in answer.deltas:
        tokens[delta.sample] += delta.token_ids
    return tokens


def check(answer: Answer, folder: Path, search: BeamSearch, max_tokens: int = 16, **rest: Any) -> None:
    count = len(answer.finished.samples)
    expected = beam_reference(folder, PROMPT, search, max_tokens, count, **rest)
    assert by_sample(answer) == expected.token_ids
    scores = [sample.score for sample in answer.finished.samples]
    assert scores == pytest.approx(expected.scores, abs=TOLERANCE)


def only(token: int) -> gateway_pb2.GenerateRequest:
    request = beam_request(1, 1, 1)
    request.logit_rules.allowed_token_ids.append(token)
    return request


def steps(quire: RunningQuire) -> int:
    """Return the count of steps of an idle engine, as the first message of a new link reports it."""
    quire.settled_pool()
    call = quire.engine.Serve(iter(()), timeout=CALL_SECONDS)
    response: engine_pb2.ServeResponse = next(call)
    call.cancel()
    return response.heartbeat.steps


def test_answers_of_a_beam_search_are_sorted_by_score(
    tiny_quire: RunningQuire, tiny_model: Callable[[str], Path]
) -> None:
    answer = tiny_quire.generate(beam_request(6, answers=6))
    check(answer, tiny_model("llama"), BeamSearch(6))
    assert [delta.sample for delta in answer.deltas] == [*range(6)], "each in one delta"
    assert answer.finished.usage.generated_tokens == sum(map(len, by_sample(answer)))
    assert answer.started.sampling.temperature == 0
    assert tiny_quire.settled_pool().device.held == 0


def test_length_penalty_early_stopping_rules_and_stop_tokens_are_transformers(
    tiny_quire: RunningQuire, tiny_model: Callable[[str], Path]
) -> None:
    ends = [*range(100, 160)]
    request = beam_request(4, 4, 24, length_penalty=0.5, early_stopping=True)
    request.stopping.stop_token_ids.extend(ends)
    request.logit_rules.repetition_penalty = 1.3
    answer = tiny_quire.generate(request)
    search = BeamSearch(4, 0.5, early_stopping=True)
    check(answer, tiny_model("llama"), search, 24, eos_token_id=ends, repetition_penalty=1.3)
    for tokens, sample in zip(by_sample(answer), answer.finished.samples, strict=True):
        stopped = tokens[-1] in ends
        assert sample.reason == (decoding_pb2.FINISH_REASON_STOP if stopped else decoding_pb2.FINISH_REASON_LENGTH)
        assert sample.stop_token_id == (tokens[-1] if stopped else 0)


def test_a_beam_search_without_a_width_is_greedy_decoding(tiny_quire: RunningQuire) -> None:
    request = beam_request(None)
    searched = tiny_quire.generate(request)
    request.ClearField("beam_search")
    request.sampling.temperature = 0
    assert tiny_quire.generate(request).token_ids == searched.token_ids


def test_the_stop_token_is_not_in_the_text_of_an_answer(tiny_quire: RunningQuire) -> None:
    request = beam_request()
    request.logit_rules.logit_bias[101] = 100  # a letter
    request.stopping.stop_token_ids.append(101)
    request.stopping.min_tokens = 3
    answer = tiny_quire.generate(request)
    assert answer.finished.samples[0].stop_token_id == answer.token_ids[-1] == 101
    request.stopping.include_stop = True
    assert tiny_quire.generate(request).text == answer.text + tiny_quire.generate(only(101)).text


def test_a_cancelled_beam_search_frees_all_its_blocks(tiny_quire: RunningQuire) -> None:
    call = tiny_quire.gateway.Generate(beam_request(6, 6, 100), timeout=CALL_SECONDS)
    assert next(call).HasField("started")
    call.cancel()
    pool = tiny_quire.settled_pool()
    assert (pool.sequences, pool.device.held) == (0, 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"beam_search": {"width": 0}}, "beam_search.width"),
    ({"beam_search": {"width": 129}}, "beam_search.width"),  # above the maximum
    ({"beam_search": {"width": 65}}, "beam_search.width"),  # more than run at once
    ({"beam_search": {"length_penalty": float("nan")}}, "beam_search.length_penalty"),
    ({"sampling": {"sample_count": 5}}, "sampling.sample_count"),
    ({"sampling": {"temperature": 0.7}}, "sampling.temperature"),
    ({"sampling": {"top_k": 5}}, "sampling.top_k"),
    ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
    ({"sampling": {"min_p": 0.1}}, "sampling.min_p"),
    ({"output": {"logprobs": 0}}, "output.logprobs"),
    ({"stopping": {"stop_strings": ["x"]}}, "stopping.stop_strings"),
    ({"stopping": {"max_tokens": 400}, "beam_search": {"width": 16}}, "stopping.max_tokens"),  # beyond the pool
]


def test_unsupported_options_of_a_beam_search_are_refused_by_name_without_a_step(tiny_quire: RunningQuire) -> None:
    before = steps(tiny_quire)
    for change, field in REFUSED:
        request = beam_request()
        request.MergeFrom(gateway_pb2.GenerateRequest(**change))
        with pytest.raises(grpc.RpcError) as caught:
            tiny_quire.generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())[FIELD_METADATA] == field
        assert caught.value.details().startswith((field, "prompt ("))
    assert steps(tiny_quire) == before
