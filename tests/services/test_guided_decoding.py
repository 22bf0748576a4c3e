"""Guided decoding of a running Quire with a tiny model; with the demo model it is an acceptance test."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.runtime.errors import FIELD_METADATA
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.timing import standing_still

DATE = r"(19|20)\d{2}-(0[1-9]|1[0-2]), [a-z]{3,8}(!|\?)"
EXPLODES = json.dumps({"anyOf": [{"type": "integer", "multipleOf": 90000 - n} for n in range(500)]})
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def request(max_tokens: int = 150, seed: int | None = None, **constraint: Any) -> gateway_pb2.GenerateRequest:
    made = prompt_request("Tell me of a person, and of a date: ", max_tokens, seed=seed, ignore_eos=False)
    made.constraint.CopyFrom(decoding_pb2.OutputConstraint(**constraint))
    return made


def test_an_answer_cut_by_max_tokens_is_a_prefix_of_the_whole_answer(tiny_quire: RunningQuire) -> None:
    whole = tiny_quire.generate(request(regex=DATE))
    part = tiny_quire.generate(request(4, regex=DATE))
    assert part.token_ids == whole.token_ids[:4]
    assert part.finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH


def test_an_answer_names_the_case_of_its_schema_that_was_left_out(tiny_quire: RunningQuire) -> None:
    schema = {"anyOf": [{"type": "string", "pattern": "(?=a)b"}, {"const": 5}]}
    answer = tiny_quire.generate(request(json_schema=json.dumps(schema)))
    assert answer.text == "5"
    (warning,) = answer.started.warnings
    assert warning.startswith("#/anyOf/0 was left out: #/anyOf/0/pattern: look-around")
    assert not tiny_quire.generate(request(json_schema='{"const": 5}')).started.warnings


# Refusals


def refusal(quire: RunningQuire, invalid: gateway_pb2.GenerateRequest) -> tuple[str, str]:
    """Return the blamed field and the message of an invalid request."""
    call = quire.gateway.Generate(invalid, timeout=CALL_SECONDS)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == INVALID, caught.value.details()
    return dict(call.trailing_metadata())[FIELD_METADATA], caught.value.details()


BAD = [
    ({}, "constraint", "must have one of"),
    ({"json_object": False}, "constraint.json_object", "must be true"),
    ({"regex": ""}, "constraint.regex", "bytes, not 0"),
    ({"regex": "a" * 65537}, "constraint.regex", "bytes, not 65537"),
    ({"regex": "("}, "constraint.regex", "unclosed group"),
    ({"json_schema": "{"}, "constraint.json_schema", "is not JSON"),
    ({"json_schema": '{"type": 1, "type": 2}'}, "constraint.json_schema", "the key 'type' is duplicated"),
    ({"json_schema": "[" * 60000}, "constraint.json_schema", "nested"),
    ({"json_schema": EXPLODES}, "constraint.json_schema", "too much"),
]


def test_an_invalid_constraint_is_refused_by_its_field_without_a_step(tiny_quire: RunningQuire) -> None:
    before = tiny_quire.generate(prompt_request("Hello", 2)).token_ids
    heartbeat = steps(tiny_quire)
    for constraint, field, words in BAD:
        blamed, message = refusal(tiny_quire, request(**constraint))
        assert (blamed, words in message) == (field, True), message
    assert steps(tiny_quire) == heartbeat
    assert tiny_quire.generate(prompt_request("Hello", 2)).token_ids == before


def test_logit_rules_that_could_exclude_every_token_are_refused(tiny_quire: RunningQuire) -> None:
    invalid = request(json_object=True)
    invalid.stopping.ignore_eos = True
    assert refusal(tiny_quire, invalid)[0] == "stopping.ignore_eos"
    invalid = request(json_object=True)
    invalid.logit_rules.allowed_token_ids.append(5)
    assert refusal(tiny_quire, invalid)[0] == "logit_rules.allowed_token_ids"
    invalid = request(regex="a+")
    invalid.logit_rules.bad_words.append("b")
    message = "logit_rules.bad_words cannot be combined with constraint.regex"
    assert refusal(tiny_quire, invalid) == ("logit_rules.bad_words", message)
    invalid = request(regex="a+")
    invalid.stopping.min_tokens = 1
    assert refusal(tiny_quire, invalid)[0] == "stopping.min_tokens"


def steps(quire: RunningQuire) -> int:
    """Return the count of steps of an idle engine, as the first message of a new link reports it."""
    quire.settled_pool()
    return int(next(quire.engine.Serve(iter(()), timeout=CALL_SECONDS)).heartbeat.steps)


# While a constraint is compiled


def slow(number: int) -> dict[str, str]:
    """Return a schema as large as the limits allow."""
    return {"json_schema": EXPLODES.replace("90000", str(90000 + number))}


def sandbox_of(quire: RunningQuire) -> int:
    """Return the process that compiles constraints; the first constraint starts it."""
    quire.generate(request(1, regex="any"))
    (sandbox,) = psutil.Process(quire.children()["engine"]).children()
    return sandbox.pid


def test_other_requests_continue_while_a_constraint_is_compiled(tiny_quire: RunningQuire) -> None:
    expected = tiny_quire.generate(prompt_request("Once upon a time", 60)).token_ids
    with ThreadPoolExecutor(1) as client:
        with standing_still(sandbox_of(tiny_quire)):
            compiling = client.submit(refusal, tiny_quire, request(**slow(1)))
            wait_until(lambda: tiny_quire.open_streams() == 1, "the request with the constraint is in flight")
            assert tiny_quire.generate(prompt_request("Once upon a time", 60)).token_ids == expected
            assert not compiling.done()
        assert compiling.result()[0] == "constraint.json_schema"


def test_a_deadline_that_passes_while_a_constraint_is_compiled_ends_the_request(tiny_quire: RunningQuire) -> None:
    late = request(**slow(4))
    late.timeout.FromTimedelta(timedelta(seconds=0.2))
    with standing_still(sandbox_of(tiny_quire)), pytest.raises(grpc.RpcError) as caught:
        tiny_quire.generate(late)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def serve(quire: RunningQuire, *requests: engine_pb2.ServeRequest) -> Iterator[engine_pb2.ServeResponse]:
    """Open a gateway's link to the engine; it stays open until the call is cancelled."""
    ended = threading.Event()

    def outgoing() -> Iterator[engine_pb2.ServeRequest]:
        yield from requests
        ended.wait()

    call: Any = quire.engine.Serve(outgoing(), timeout=CALL_SECONDS)
    if not call.add_callback(ended.set):
        ended.set()
    return call


def submission(request_id: str, constraint: dict[str, str], **fields: Any) -> engine_pb2.ServeRequest:
    return engine_pb2.ServeRequest(
        submission=engine_pb2.Submission(
            request_id=request_id,
            attempt=1,
            prompt_token_ids=[20, 30, 40],
            sampling=decoding_pb2.Sampling(temperature=0, top_p=1),
            stopping=decoding_pb2.Stopping(max_tokens=60),
            constraint=decoding_pb2.OutputConstraint(**constraint),
            **fields,
        )
    )


def first_step(call: Any, holds: Callable[[engine_pb2.StepOutput], Any]) -> engine_pb2.StepOutput:
    return next(response.step for response in call if holds(response.step))


def test_a_cancel_ends_a_request_whose_constraint_is_compiled_and_its_id_is_free(tiny_quire: RunningQuire) -> None:
    cancel = engine_pb2.ServeRequest(cancel=engine_pb2.Cancel(request_id="r", attempt=1))
    twice = [engine_pb2.SampleState()] * 2
    with standing_still(sandbox_of(tiny_quire)):
        call = serve(
            tiny_quire,
            submission("r", slow(5), samples=twice),
            submission("r", {"regex": "ab"}),
            cancel,
            submission("r", {"regex": "ab"}, samples=twice[:1]),
        )
        (refused,) = first_step(call, lambda step: step.refused).refused
        assert refused.reason == engine_pb2.REFUSAL_REASON_ALREADY_EXISTS
        call.cancel()
        call = serve(tiny_quire, submission("r", slow(6), samples=twice), cancel, submission("r", {"regex": "ab"}))
        (cancelled,) = first_step(call, lambda step: step.finished).finished
        assert [sample.reason for sample in cancelled.samples] == [decoding_pb2.FINISH_REASON_CANCELLED] * 2
    (ended,) = first_step(call, lambda step: step.finished).finished
    assert [sample.reason for sample in ended.samples] == [decoding_pb2.FINISH_REASON_STOP]
    call.cancel()


def _until_ends(call: Any, count: int) -> Iterator[engine_pb2.ServeResponse]:
    for response in call:
        yield response
        count -= len(response.step.finished)
        if count <= 0:
            return


def test_a_constrained_request_continues_at_another_engine(tiny_quire: RunningQuire) -> None:
    whole = tiny_quire.generate(request(regex=DATE))
    prompt = list(tiny_quire.gateway.Tokenize(gateway_pb2.TokenizeRequest(prompt=request(regex=DATE).prompt)).token_ids)
    continued = submission("continued", {"regex": DATE}, samples=[{"generated_token_ids": whole.token_ids[:3]}])
    continued.submission.ClearField("prompt_token_ids")
    continued.submission.prompt_token_ids.extend(prompt)
    call = serve(tiny_quire, continued)
    tokens = [token for response in _until_ends(call, 1) for one in response.step.tokens for token in one.token_ids]
    assert tokens == whole.token_ids[3:]
    call.cancel()


def test_requests_of_a_broken_link_hold_no_blocks(tiny_quire: RunningQuire) -> None:
    long = {"regex": "[a-z]{400,}"}
    with standing_still(sandbox_of(tiny_quire)):
        before = steps(tiny_quire)
        call = serve(
            tiny_quire, submission("r", {"regex": "[a-z]{401,}"}), submission("s", long), submission("s", long)
        )
        (refused,) = first_step(call, lambda step: step.refused).refused
        assert refused.request_id == "s", "the last one that the engine received"
        call.cancel()
    tiny_quire.generate(request(8, regex="ef"))  # compiled after those
    assert steps(tiny_quire) - before < 50


def test_a_lost_sandbox_process_is_restarted(tiny_quire: RunningQuire) -> None:
    sandbox = sandbox_of(tiny_quire)
    os.kill(sandbox, signal.SIGKILL)
    wait_until(lambda: has_ended(sandbox), "the process has ended")
    assert tiny_quire.generate(request(regex="restarted")).text == "restarted"


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
