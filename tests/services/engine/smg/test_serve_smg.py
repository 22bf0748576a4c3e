"""The service for smg over gRPC, in front of a real engine."""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from quire.v1 import decoding_pb2, gateway_pb2
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.services.engine.link import Link
from tests.services.engine.smg.client import PROMPT, SmgAnswer, SmgClient, request_of
from tests.tiny_models import CONTEXT, VOCABULARY


@pytest.fixture(scope="module")
def expected(smg_quire: RunningQuire) -> list[int]:
    """The first 60 tokens after PROMPT, by the protocol of gateways."""
    link = Link(smg_quire.engine)
    link.submit("expected", 60)
    tokens = link.complete("expected")
    link.break_off()
    return tokens


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))


def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details() or ""


# Answers


def test_an_answer_that_is_not_streamed_is_one_message_with_all_tokens(smg: SmgClient, expected: list[int]) -> None:
    answer = smg.generate("whole")
    complete = answer.complete
    assert answer.chunks == []
    assert list(complete.output_ids) == expected[:20]
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", len(PROMPT), 20)
    assert complete.WhichOneof("matched_stop") is None


def test_a_streamed_answer_has_the_new_tokens_of_each_step(smg: SmgClient, expected: list[int]) -> None:
    answer = smg.generate("streamed", stream=True)
    assert answer.streamed() == expected[:20]
    assert [chunk.completion_tokens for chunk in answer.chunks] == [len(chunk.token_ids) for chunk in answer.chunks]
    assert len(answer.chunks) > 1
    assert answer.complete.completion_tokens == 20
    assert list(answer.complete.output_ids) == list(answer.chunks[-1].token_ids)


def test_cached_tokens_are_reported(smg: SmgClient) -> None:
    prompt = [*range(100, 150)]
    first, second = (smg.answer(request_of(name, prompt, stream=True)) for name in ("first", "second"))
    assert [first.complete.cached_tokens, second.complete.cached_tokens] == [0, 48]
    assert {chunk.cached_tokens for chunk in second.chunks} == {48}


@pytest.mark.parametrize("stream", [False, True])
def test_samples_have_an_index_and_a_last_message_each(smg: SmgClient, stream: bool) -> None:
    answer = smg.generate("samples", stream=stream, n=3, temperature=1, seed=4)
    assert sorted(answer.completes) == [0, 1, 2]
    texts = [answer.streamed(at) if stream else list(answer.completes[at].output_ids) for at in range(3)]
    assert [len(text) for text in texts] == [20] * 3
    assert len({*map(tuple, texts)}) == 3
    again = smg.generate("samples", n=3, temperature=1, seed=4)
    assert [list(again.completes[at].output_ids) for at in range(3)] == texts


def test_a_stop_token_of_the_request_is_named_and_the_models_own_is_not(smg: SmgClient, expected: list[int]) -> None:
    stop = expected[7]
    named = smg.generate("named", stop_token_ids=[stop]).complete
    assert list(named.output_ids) == expected[: expected.index(stop) + 1]
    assert (named.finish_reason, named.matched_token_id) == ("stop", stop)
    own = smg.generate("own", logit_bias={0: 1000.0}, ignore_eos=False).complete
    assert (list(own.output_ids), own.finish_reason, own.WhichOneof("matched_stop")) == ([0], "stop", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_sample_at_its_last_token(
    smg: SmgClient, expected: list[int], tokenizer: tokenizers.Tokenizer, stream: bool
) -> None:
    text = tokenizer.decode(expected[:20])
    stop = next(text[at : at + 3] for at in range(8, len(text)) if "\ufffd" not in text[at : at + 3])
    end = next(at for at in range(1, 21) if stop in tokenizer.decode(expected[:at]))
    answer = smg.generate("stop", stream=stream, stop=["not there", stop], max_tokens=60)
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", stop)
    assert (answer.streamed() if stream else list(answer.complete.output_ids)) == expected[:end]
    assert answer.complete.completion_tokens == end


def test_a_stop_string_before_min_tokens_does_not_count(
    smg: SmgClient, expected: list[int], tokenizer: tokenizers.Tokenizer
) -> None:
    character = next(one for one in tokenizer.decode(expected[:8]) if one.isascii())
    complete = smg.generate("early", stop=[character], min_tokens=12).complete
    assert complete.completion_tokens > 12


def test_log_probabilities_stand_beside_their_tokens(smg: SmgClient, expected: list[int]) -> None:
    complete = smg.generate("scored", logprobs=2, max_tokens=4).complete
    scores = complete.output_logprobs
    assert list(scores.token_ids) == expected[:4]
    assert [one.token_ids[0] for one in scores.top_logprobs] == expected[:4]
    assert [one.values[0] for one in scores.top_logprobs] == list(scores.token_logprobs)
    assert {len(one.values) for one in scores.top_logprobs} == {2}
    streamed = smg.generate("scored", stream=True, logprobs=2, max_tokens=4)
    values = [value for chunk in streamed.chunks for value in chunk.output_logprobs.token_logprobs]
    assert values == pytest.approx(list(scores.token_logprobs), abs=1e-5)


def test_the_first_token_of_a_prompt_has_no_log_probability(smg: SmgClient) -> None:
    whole = smg.generate("scored", prompt_logprobs=1, max_tokens=3).complete.input_logprobs
    assert list(whole.token_ids) == list(PROMPT)
    assert [one.HasField("value") for one in whole.token_logprobs] == [False, True, True, True, True]
    assert [len(one.values) for one in whole.top_logprobs] == [0, 1, 1, 1, 1]
    streamed = smg.generate("scored", stream=True, prompt_logprobs=1, max_tokens=3)
    assert [chunk.HasField("input_logprobs") for chunk in streamed.chunks] == [True] + [False] * (
        len(streamed.chunks) - 1
    )
    assert streamed.chunks[0].input_logprobs == whole


def test_a_request_of_no_tokens_scores_its_prompt(smg: SmgClient) -> None:
    complete = smg.generate("none", prompt_logprobs=0, max_tokens=0).complete
    assert (list(complete.output_ids), complete.finish_reason) == ([], "length")
    assert len(complete.input_logprobs.token_logprobs) == len(PROMPT)


CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[ab]{3}"}, "[ab]{3}"),
    "choice": ({"choice": smg_pb.ChoiceConstraint(choices=["yes.", "no!"])}, r"yes\.|no!"),
    "json_schema": ({"json_schema": json.dumps({"enum": [17, "x"]})}, '17|"x"'),
    "json_object": ({"json_object": True, "temperature": 1, "max_tokens": 30}, r"(?s)\s*\{.*"),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("from_first_token", [False, True])
def test_an_answer_follows_its_constraint_from_the_first_token(
    smg: SmgClient, tokenizer: tokenizers.Tokenizer, kind: str, from_first_token: bool
) -> None:
    fields, pattern = CONSTRAINTS[kind]
    request = request_of(kind, ignore_eos=False, grammar_from_first_token=from_first_token, **fields)
    text = tokenizer.decode(list(smg.answer(request).complete.output_ids))
    assert re.fullmatch(pattern, text), text


def test_a_text_is_tokenized_by_the_engine(smg: SmgClient, tokenizer: tokenizers.Tokenizer) -> None:
    text = "The quick brown fox"
    by_text = request_of("text")
    by_text.text = text
    by_ids = request_of("ids", tokenizer.encode(text).ids)
    assert smg.answer(by_text).complete.output_ids == smg.answer(by_ids).complete.output_ids


def test_special_tokens_count_for_stop_strings_unless_they_are_skipped(smg: SmgClient) -> None:
    fields: dict[str, Any] = {"stop": ["<|begin|>"], "logit_bias": {1: 1000.0}, "max_tokens": 5}
    kept = smg.generate("kept", skip_special_tokens=False, **fields).complete
    skipped = smg.generate("skipped", skip_special_tokens=True, **fields).complete
    assert (kept.matched_stop_str, list(kept.output_ids)) == ("<|begin|>", [1])
    assert (skipped.finish_reason, skipped.completion_tokens) == ("length", 5)


# Ends


def test_a_client_that_cancels_frees_the_blocks(smg: SmgClient, smg_quire: RunningQuire) -> None:
    call = smg.begin(request_of("cancelled", stream=True, slow=True, max_tokens=500))
    next(call)
    assert smg_quire.pool().device.held > 0
    call.cancel()
    assert smg_quire.settled_pool().device.held == 0


def test_an_aborted_request_ends_with_that_reason(smg: SmgClient) -> None:
    call = smg.begin(request_of("aborted", stream=True, slow=True, max_tokens=500))
    first = next(call)
    smg.stub.Abort(smg_pb.AbortRequest(request_ids=["unknown", "aborted"]), timeout=CALL_SECONDS)
    answer = SmgAnswer([first, *call])
    assert answer.complete.finish_reason == "abort"
    assert 0 < answer.complete.completion_tokens < 500


def test_a_deadline_ends_the_request(smg: SmgClient, smg_quire: RunningQuire) -> None:
    call = smg.begin(request_of("late", stream=True, slow=True, max_tokens=900), timeout=1)
    assert status_of(call)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    smg_quire.settled_pool()


def test_a_second_request_with_a_live_id_is_refused_and_the_first_continues(smg: SmgClient) -> None:
    first = smg.begin(request_of("twice", stream=True, slow=True, max_tokens=40))
    received = [next(first)]
    code, details = status_of(smg.begin(request_of("twice")))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "twice" in details
    assert SmgAnswer([*received, *first]).complete.completion_tokens == 40


REFUSED: dict[str, tuple[dict[str, Any], grpc.StatusCode]] = {
    "sampling_params.max_tokens": ({"max_tokens": CONTEXT}, grpc.StatusCode.INVALID_ARGUMENT),
    "tokenized.input_ids": ({"prompt": [VOCABULARY]}, grpc.StatusCode.INVALID_ARGUMENT),
    "sampling_params.min_tokens": ({"min_tokens": 30}, grpc.StatusCode.INVALID_ARGUMENT),
    "sampling_params.logprobs": ({"logprobs": 1000}, grpc.StatusCode.INVALID_ARGUMENT),
    "sampling_params.regex": ({"regex": "(", "ignore_eos": False}, grpc.StatusCode.INVALID_ARGUMENT),
    "sampling_params.json_schema": (
        {"json_schema": '{"not": {}}', "ignore_eos": False},
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "sampling_params.ignore_eos": ({"regex": "a", "ignore_eos": True}, grpc.StatusCode.INVALID_ARGUMENT),
    "cannot be combined with sampling_params.json_object": (
        {"json_object": True, "min_tokens": 3, "ignore_eos": False},
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "must be at most sampling_params.max_tokens": ({"min_tokens": 30}, grpc.StatusCode.INVALID_ARGUMENT),
    "sampling_params.logit_bias[5]": ({"logit_bias": {5: float("nan")}}, grpc.StatusCode.INVALID_ARGUMENT),
    "sampling_params.json_schema: #/const has U+D800": (
        {"json_schema": r'{"const": "\ud800"}', "ignore_eos": False},
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "sampling_params.choice": (
        {"choice": smg_pb.ChoiceConstraint(choices=["<|end|>" * 9000]), "ignore_eos": False},
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "sampling_params.grammar": ({"grammar": "root ::= x"}, grpc.StatusCode.UNIMPLEMENTED),
    "sampling_params.structural_tag": ({"structural_tag": "{}"}, grpc.StatusCode.UNIMPLEMENTED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field_as_smg_does(smg: SmgClient, name: str) -> None:
    fields, code = REFUSED[name]
    found, details = status_of(smg.begin(request_of("refused", **fields)))
    assert found is code, details
    assert name in details


def test_a_malformed_request_is_refused(smg_quire: RunningQuire) -> None:
    with grpc.insecure_channel(smg_quire.addresses["engine"]) as channel:
        method: Any = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        call = method(b"\xff\xff", timeout=CALL_SECONDS)
        assert status_of(call)[0] is grpc.StatusCode.INVALID_ARGUMENT


# Other methods


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", smg_pb.EmbedRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
def test_what_an_engine_does_not_do_is_refused_in_a_sentence(smg: SmgClient, method: str, request_: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(smg.stub, method)(request_, timeout=CALL_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert len((caught.value.details() or "").split()) > 5


def test_an_attached_engine_is_healthy(smg: SmgClient) -> None:
    health = smg.stub.HealthCheck(smg_pb.HealthCheckRequest(), timeout=CALL_SECONDS)
    assert health.healthy


def test_the_model_is_described_without_a_path_of_the_machine(
    smg: SmgClient, smg_quire: RunningQuire, tiny_model: Callable[[str], Path]
) -> None:
    info = smg.stub.GetModelInfo(smg_pb.GetModelInfoRequest(), timeout=CALL_SECONDS)
    assert (info.served_model_name, info.model_type, list(info.architectures)) == (
        "tiny-llama",
        "llama",
        ["LlamaForCausalLM"],
    )
    assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (CONTEXT, VOCABULARY, [0])
    assert info.is_generation
    for path in (info.model_path, info.tokenizer_path):
        assert not Path(path).exists()
        assert Path(path).is_absolute()
    server = smg.stub.GetServerInfo(smg_pb.GetServerInfoRequest(), timeout=CALL_SECONDS)
    assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (16, 16, 1)
    assert server.constrained_decoding_start == "first_token"


def test_the_tokenizer_comes_as_an_archive_with_its_digest(smg: SmgClient, tiny_model: Callable[[str], Path]) -> None:
    pieces = list(smg.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=CALL_SECONDS))
    content = b"".join(piece.data for piece in pieces)
    assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [hashlib.sha256(content).hexdigest()]
    assert max(len(piece.data) for piece in pieces) <= 64 * 1024
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = set(archive.namelist())
        folder = tiny_model("llama")
        assert {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"} <= names
        assert all(archive.read(name) == (folder / name).read_bytes() for name in names)


def test_the_load_has_what_runs_and_what_it_holds(smg: SmgClient) -> None:
    call = smg.begin(request_of("running", stream=True, slow=True, max_tokens=100))
    next(call)
    (load,) = smg.stub.GetLoads(smg_pb.GetLoadsRequest(), timeout=CALL_SECONDS).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (1, 0, 16)
    assert 0 < load.num_used_tokens <= 16 * 16
    assert load.max_total_num_tokens == 64 * 16
    assert load.token_usage == load.num_used_tokens / load.max_total_num_tokens
    call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        smg.stub.GetLoads(smg_pb.GetLoadsRequest(dp_rank=1), timeout=CALL_SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_flush_resets_the_prefix_cache_also_while_a_request_runs(smg: SmgClient) -> None:
    prompt = [*range(200, 240)]
    smg.answer(request_of("fills", prompt))
    running = smg.begin(request_of("running", stream=True, slow=True, max_tokens=60))
    received = [next(running)]
    flushed = smg.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=CALL_SECONDS)
    assert flushed.success, flushed.message
    assert smg.answer(request_of("again", prompt)).complete.cached_tokens == 0
    assert SmgAnswer([*received, *running]).complete.completion_tokens == 60


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e9])
def test_a_flush_refuses_a_time_out_of_bounds(smg: SmgClient, seconds: float) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        smg.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=seconds), timeout=CALL_SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "timeout_s" in (caught.value.details() or "")


def test_smg_and_a_gateway_use_one_engine_and_one_cache(smg: SmgClient, smg_quire: RunningQuire) -> None:
    prompt = [*range(250, 300)]
    smg.answer(request_of("smg", prompt))
    request = gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt)),
        sampling=decoding_pb2.Sampling(temperature=0),
        stopping=decoding_pb2.Stopping(max_tokens=5, ignore_eos=True),
    )
    assert smg_quire.generate(request).started.cached_tokens == 48
