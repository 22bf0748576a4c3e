"""Logit rules, min_tokens and log-probabilities of a running Quire with a tiny model."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
import torch

from quire.v1 import decoding_pb2, gateway_pb2
from tests.faults import wait_until
from tests.load import prompt_request
from tests.reference import reference_logprobs
from tests.running_quire import Answer, RunningQuire
from tests.tiny_models import VOCABULARY

EOS = 0
PROMPT = tuple(range(40, 77))
# The tiny model's weights are so wide that float32 sums in another order differ by a little more than 1e-4.
TOLERANCE = 5e-4


def ids_request(
    prompt: Sequence[int] = PROMPT, max_tokens: int = 20, seed: int | None = None, *, ignore_eos: bool = True
) -> gateway_pb2.GenerateRequest:
    request = prompt_request("", max_tokens, seed=seed, ignore_eos=ignore_eos)
    request.prompt.token_ids.ids.extend(prompt)
    return request


@pytest.fixture(scope="module")
def whole(tiny_quire: RunningQuire) -> Answer:
    """The most likely continuation of PROMPT."""
    return tiny_quire.generate(ids_request())


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[[str], Path]) -> Callable[[Sequence[int]], torch.Tensor]:
    return lambda tokens: reference_logprobs(tiny_model("llama"), tokens)


def check(tokens: Sequence[int], rows: torch.Tensor, actual: Sequence[decoding_pb2.TokenLogprobs], count: int) -> None:
    assert len(actual) == len(tokens) == len(rows)
    for token, row, one in zip(tokens, rows, actual, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert list(one.top_logprobs) == pytest.approx(row.topk(count).values.tolist(), abs=TOLERANCE)
        assert [float(row[top]) for top in one.top_token_ids] == pytest.approx(list(one.top_logprobs), abs=TOLERANCE)


# Rules


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_of_the_output_forbids_repetition_but_not_tokens_of_the_prompt(
    tiny_quire: RunningQuire, penalty: str
) -> None:
    request = ids_request(max_tokens=100)
    setattr(request.logit_rules, penalty, 1000)
    request.logit_rules.allowed_token_ids.extend(range(40, 140))
    assert sorted(tiny_quire.generate(request).token_ids) == list(range(40, 140))


def test_a_bias_makes_a_token_certain_or_impossible(tiny_quire: RunningQuire, whole: Answer) -> None:
    request = ids_request()
    request.logit_rules.logit_bias[123] = 100
    assert tiny_quire.generate(request).token_ids == [123] * 20
    request = ids_request()
    request.logit_rules.logit_bias[whole.token_ids[0]] = -100
    assert whole.token_ids[0] not in tiny_quire.generate(request).token_ids


@pytest.mark.parametrize("seed", [None, 3])
def test_only_allowed_tokens_are_chosen(tiny_quire: RunningQuire, seed: int | None) -> None:
    request = ids_request(max_tokens=50, seed=seed)
    request.sampling.temperature *= 9
    request.logit_rules.allowed_token_ids.extend([7, 300, 12])
    chosen = set(tiny_quire.generate(request).token_ids)
    assert chosen == {7, 300, 12} if seed else chosen <= {7, 300, 12}


def test_rules_that_change_nothing_change_nothing(tiny_quire: RunningQuire, whole: Answer) -> None:
    request = ids_request()
    request.logit_rules.CopyFrom(
        decoding_pb2.LogitRules(repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={5: 0})
    )
    assert tiny_quire.generate(request).token_ids == whole.token_ids


def test_a_bad_word_is_neither_generated_alone_nor_after_a_space(
    tiny_quire: RunningQuire, tiny_model: Callable[[str], Path]
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))
    words = ["x", " y", "zz", "<|end|>"]
    forms = {form for word in words for form in (word.lstrip(), f" {word.lstrip()}")}
    banned = [one.ids for one in tokenizer.encode_batch(sorted(forms), add_special_tokens=False)]
    request = ids_request(max_tokens=60, seed=3)
    request.logit_rules.allowed_token_ids.extend(
        {tokenizer.token_to_id("a"), *(token for ids in banned for token in ids)}
    )
    request.logit_rules.bad_words.extend(words)
    tokens = tiny_quire.generate(request).token_ids
    assert len(set(tokens)) > 1
    for ids in banned:
        assert not any(tokens[at : at + len(ids)] == ids for at in range(len(tokens)))
    del request.logit_rules.bad_words[:]
    free = tiny_quire.generate(request).token_ids
    assert any(free[at : at + len(ids)] == ids for ids in banned for at in range(len(free)))


# Prompts


@pytest.mark.parametrize(("most", "kept"), [(5, 5), (2048, 37), (-1, 37)])
def test_a_truncated_prompt_is_its_last_tokens(tiny_quire: RunningQuire, most: int, kept: int) -> None:
    expected = tiny_quire.generate(ids_request(PROMPT[-kept:]))
    request = ids_request()
    request.truncate_prompt_tokens = most
    request.output.prompt_token_ids = True
    answer = tiny_quire.generate(request)
    assert answer.token_ids == expected.token_ids
    assert tuple(answer.started.prompt_token_ids) == PROMPT[-kept:]
    assert answer.finished.usage.prompt_tokens == kept
    assert not expected.started.prompt_token_ids


def test_a_prompt_beyond_what_fits_is_truncated_to_that(tiny_quire: RunningQuire) -> None:
    request = ids_request([50 + number % 300 for number in range(3000)], max_tokens=3)
    request.truncate_prompt_tokens = -1
    pool = tiny_quire.gateway.GetModel(gateway_pb2.GetModelRequest(), timeout=60)
    slots = min(pool.context_tokens, pool.device_blocks * pool.block_size)
    kept = tiny_quire.generate(request).finished.usage.prompt_tokens
    assert slots - 3 * pool.block_size < kept <= slots - 3


# min_tokens


@pytest.mark.parametrize("stop_token", [False, True])
def test_no_stop_condition_ends_an_answer_before_min_tokens(tiny_quire: RunningQuire, stop_token: bool) -> None:
    request = ids_request(max_tokens=40, ignore_eos=stop_token)
    ending = 99 if stop_token else EOS
    request.stopping.stop_token_ids.extend([ending] * stop_token)
    request.logit_rules.logit_bias[ending] = 100
    assert tiny_quire.generate(request).token_ids == [ending]
    request.stopping.min_tokens = 12
    answer = tiny_quire.generate(request)
    assert answer.token_ids.index(ending) == len(answer.token_ids) - 1 == 12
    assert answer.finished.samples[0].stop_token_id == ending


def test_a_stop_string_before_min_tokens_does_not_stop(
    tiny_quire: RunningQuire, tiny_model: Callable[[str], Path]
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))
    letter = tokenizer.token_to_id("x")
    request = ids_request(max_tokens=30)
    request.logit_rules.allowed_token_ids.append(letter)
    request.stopping.stop_strings.append("xx")
    assert (answer := tiny_quire.generate(request)).token_ids == [letter] * 2
    assert answer.text == ""
    request.stopping.min_tokens = 9
    answer = tiny_quire.generate(request)
    assert (answer.token_ids, answer.text) == ([letter] * 9, "x" * 7)
    assert answer.finished.samples[0].stop_string == "xx"
    request.stopping.min_tokens = 30
    answer = tiny_quire.generate(request)
    assert (len(answer.token_ids), answer.text[:28]) == (30, "x" * 28)


# Log-probabilities


@pytest.mark.parametrize("count", [0, 20])
def test_log_probabilities_are_the_models_and_not_those_of_sampling(
    tiny_quire: RunningQuire, reference: Callable[[Sequence[int]], torch.Tensor], count: int
) -> None:
    request = ids_request(seed=5)
    request.sampling.temperature, request.sampling.top_k = 1.5, 30
    request.logit_rules.repetition_penalty = 1.4
    request.output.logprobs = count
    answer = tiny_quire.generate(request)
    check(answer.token_ids, reference([*PROMPT, *answer.token_ids])[-20:], answer.logprobs, count)
    assert answer.prompt_logprobs == []


def test_log_probabilities_are_absent_by_default(whole: Answer) -> None:
    assert (whole.logprobs, whole.prompt_logprobs) == ([], [])


def test_each_delta_has_a_log_probability_for_each_token_while_text_is_held_back(
    tiny_quire: RunningQuire, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    request = ids_request(max_tokens=150, seed=11)
    request.output.logprobs = 2
    answers: list[Answer] = []

    def held_back() -> bool:
        answers.append(tiny_quire.generate(request))
        return any(delta.token_ids and not delta.text for delta in answers[-1].deltas)

    wait_until(held_back, "a delta has tokens without text")
    free = answers[-1]
    request.stopping.stop_strings.extend([free.text[40:43], "\0never"])
    stopped = tiny_quire.generate(request)
    assert 0 < len(stopped.token_ids) < 150
    for answer in (free, stopped):
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in answer.deltas)
        rows = reference([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
        check(answer.token_ids, rows, answer.logprobs, 2)


def test_a_stop_token_has_a_log_probability(tiny_quire: RunningQuire, whole: Answer) -> None:
    request = ids_request()
    request.stopping.stop_token_ids.append(whole.token_ids[7])
    request.output.logprobs = 0
    answer = tiny_quire.generate(request)
    assert len(answer.logprobs) == len(answer.token_ids) == whole.token_ids.index(whole.token_ids[7]) + 1


def test_each_sample_has_its_own_log_probabilities(
    tiny_quire: RunningQuire, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    request = ids_request(seed=5)
    request.sampling.sample_count = 3
    request.output.logprobs, request.output.prompt_logprobs = 2, 1
    answer = tiny_quire.generate(request)
    check(PROMPT[1:], reference(PROMPT), answer.prompt_logprobs, 1)
    for sample in range(3):
        deltas = [delta for delta in answer.deltas if delta.sample == sample]
        tokens = [token for delta in deltas for token in delta.token_ids]
        rows = reference([*PROMPT, *tokens])[len(PROMPT) - 1 :]
        check(tokens, rows, [one for delta in deltas for one in delta.logprobs], 2)


# Of prompts


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_come_after_started_and_before_tokens_also_of_a_cached_prompt(
    tiny_quire: RunningQuire, whole: Answer, reference: Callable[[Sequence[int]], torch.Tensor], count: int
) -> None:
    request = ids_request()
    request.output.prompt_logprobs = count
    for _ in range(2):
        answer = tiny_quire.generate(request)
        check(PROMPT[1:], reference(PROMPT), answer.prompt_logprobs, count)
        assert answer.events[:3] == ["started", "prompt_logprobs", "delta"]
        assert answer.started.cached_tokens == 0
        assert answer.logprobs == []
        assert answer.token_ids == whole.token_ids
    assert tiny_quire.generate(ids_request()).started.cached_tokens == 32, "other requests still hit the cache"


def test_log_probabilities_of_a_long_prompt_arrive_in_several_messages(
    tiny_quire: RunningQuire, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    prompt = [2 + 7 * position % (VOCABULARY - 2) for position in range(900)]
    request = ids_request(prompt, 2)
    request.output.prompt_logprobs = 5
    other = threading.Thread(target=tiny_quire.generate, args=(ids_request(max_tokens=50),))
    other.start()
    answer = tiny_quire.generate(request)
    other.join()
    check(prompt[1:], reference(prompt), answer.prompt_logprobs, 5)
    assert answer.events.count("prompt_logprobs") >= 2, "the engine computes at most 512 tokens a step"
