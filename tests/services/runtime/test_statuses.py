"""The table from domain errors to statuses is complete, and clients receive each status."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

import kvmanager
from engine import errors as engine_errors
from quire.v1 import (
    decoding_pb2,
    engine_pb2,
    engine_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    kvmanager_pb2,
    kvmanager_pb2_grpc,
)
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.gateway.access.api_keys import make_key
from services.gateway.fleet import engine_events
from services.runtime import errors, statuses
from services.wire import output
from tests.api_keys import bearer, write_keys
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningService

Status = grpc.StatusCode

# As the documentation of services.runtime.statuses says.
INTERNAL = {
    *(kvmanager.OutOfBlocks, kvmanager.UnknownSequence, kvmanager.IdInUse, kvmanager.InvalidItem),
    *(kvmanager.UnknownPin, kvmanager.PinTooLarge),
    *(engine_errors.RequestExists, engine_errors.InvalidRequest),
    *(engine_errors.UnsupportedField, engine_errors.QueueFull, engine_errors.EngineUnavailable),
    engine_errors.SubmissionFailed,
    engine_errors.ConstraintFailed,
    *(engine_errors.InvalidPin, engine_errors.PinExists, engine_errors.PinTooLarge, engine_errors.UnknownPin),
    *(engine_errors.PinFailed, engine_errors.PinUnavailable),
    *(engine_errors.ModelUnsupported, engine_errors.BackendUnavailable),
    *(engine_errors.BlockManagerBroken, engine_errors.CopyFailed, engine_errors.DeviceLost),
}


def leaves(base: type[Exception]) -> set[type[Exception]]:
    """Return the subclasses without subclasses outside of tests."""
    narrower = [kind for kind in base.__subclasses__() if not kind.__module__.startswith("tests.")]
    return set().union(*(leaves(kind) for kind in narrower)) or {base}


def test_every_domain_error_has_a_row_or_is_internal() -> None:
    roots = (kvmanager.KVManagerError, engine_errors.EngineError, errors.ServiceError)
    domain = set().union(*(leaves(root) for root in roots))
    assert domain | {DecodeError} == set(statuses.STATUS) | INTERNAL
    assert not set(statuses.STATUS) & INTERNAL


def test_an_error_of_a_narrower_type_has_the_status_of_the_wider_one() -> None:
    class TooLong(errors.InvalidField):
        pass

    assert statuses.status_of(TooLong("x")).grpc == Status.INVALID_ARGUMENT


def test_every_refusal_of_the_engine_has_its_reason_on_the_wire() -> None:
    assert set(output._REFUSALS) == leaves(engine_errors.RequestRefused)
    reasons = set(engine_pb2.RefusalReason.values()) - {engine_pb2.REFUSAL_REASON_UNSPECIFIED}
    assert set(engine_events._REFUSALS) == reasons
    assert set(output._REFUSALS.values()) == reasons


# Real gateway and KV manager; the engine is simulated, because a real one does not fail on demand.


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Ends each request as its id requires; others stay unanswered."""

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        self._tokenizer = tokenizer

    def GetEngine(self, _request: engine_pb2.GetEngineRequest, _context: Any) -> engine_pb2.GetEngineResponse:  # noqa: N802
        return engine_pb2.GetEngineResponse(
            model="played",
            context_tokens=100,
            vocabulary_size=384,
            block_size=16,
            device_blocks=10,
            tokenizer_digest=self._tokenizer.digest(),
        )

    def GetTokenizer(  # noqa: N802
        self, _request: engine_pb2.GetTokenizerRequest, _context: Any
    ) -> Iterator[engine_pb2.GetTokenizerResponse]:
        return self._tokenizer.pieces()

    def Serve(self, requests: Any, _context: Any) -> Iterator[engine_pb2.ServeResponse]:  # noqa: N802
        yield engine_pb2.ServeResponse(heartbeat=engine_pb2.Heartbeat())
        for request in requests:
            if request.submission.request_id.endswith("deadly"):
                yield from self._die(request.submission)
                return
            if request.HasField("submission") and (step := self.end_of(request.submission)):
                yield engine_pb2.ServeResponse(step=step)

    def Admin(self, request: engine_pb2.EngineAdminRequest, context: Any) -> engine_pb2.EngineAdminResponse:  # noqa: N802
        context.set_trailing_metadata(((errors.FIELD_METADATA, "a.field"),))
        context.abort(Status[request.unpin_prefix.name], "the detail")
        raise AssertionError("abort raises")

    def _die(self, submission: engine_pb2.Submission) -> Iterator[engine_pb2.ServeResponse]:
        """End the link; an isolated request is started first."""
        if submission.isolated:
            names = {"request_id": submission.request_id, "attempt": submission.attempt}
            started = engine_pb2.RequestStarted(**names, isolated=True)
            yield engine_pb2.ServeResponse(step=engine_pb2.StepOutput(started=[started]))

    def end_of(self, submission: engine_pb2.Submission) -> engine_pb2.StepOutput | None:
        name = submission.request_id
        names = {"request_id": name, "attempt": submission.attempt}
        if name.startswith("REFUSAL_REASON"):
            reason = engine_pb2.RefusalReason.Value(name)
            refused = engine_pb2.RequestRefused(**names, reason=reason, detail="the detail", field="a.field")
            return engine_pb2.StepOutput(refused=[refused])
        if name.startswith("FAILURE_REASON"):
            failure = engine_pb2.FailureReason.Value(name)
            samples = [engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_FAILED)]
            finished = engine_pb2.RequestFinished(**names, samples=samples, failure=failure, detail="the detail")
            return engine_pb2.StepOutput(finished=[finished])
        if name == "flood":  # more than may wait for a client, before it can have read any
            tokens = [engine_pb2.SampleTokens(**names, token_ids=[1] * 5000) for _ in range(2)]
            return engine_pb2.StepOutput(tokens=tokens)
        if name == "shutting down":
            samples = [engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_CANCELLED)]
            return engine_pb2.StepOutput(finished=[engine_pb2.RequestFinished(**names, samples=samples)])
        return None


@pytest.fixture(scope="module")
def scripted_engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"unix:{tmp_path_factory.mktemp('engine')}/engine.sock"
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        engine_pb2_grpc.add_EngineServicer_to_server(ScriptedEngine(TokenizerFiles(tiny_model("llama"))), server)
        server.add_insecure_port(address)
        server.start()
        yield address
        server.stop(grace=0).wait()


@pytest.fixture(scope="module")
def gateway(service: Callable[..., RunningService], scripted_engine: str) -> gateway_pb2_grpc.GatewayStub:
    return started_gateway(service, scripted_engine, "--failovers", "0", "--max-requests", "2")


def started_gateway(
    service: Callable[..., RunningService], engine: str, *arguments: str
) -> gateway_pb2_grpc.GatewayStub:
    address = ("--listen", "127.0.0.1:0", "--engines", engine, "--link-timeout-seconds", "600")
    one = service("gateway", *address, *arguments)
    one.output.wait_for("gateway is ready")
    stub = gateway_pb2_grpc.GatewayStub(one.channel)
    stub.GetModel(gateway_pb2.GetModelRequest(), metadata=bearer(KEY))  # connected: later calls arrive in order
    return stub


@pytest.fixture(scope="module")
def manager(service: Callable[..., RunningService]) -> kvmanager_pb2_grpc.KVManagerStub:
    return kvmanager_pb2_grpc.KVManagerStub(
        service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0").channel
    )


def failure_of(call: Any) -> tuple[Status, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


# Details of the gateway itself.
OWN_DETAILS = {
    "FAILURE_REASON_DEADLINE": "timeout exceeded while the request was running",
    "FAILURE_REASON_DEADLINE_QUEUED": "timeout exceeded while the request was queued",
}


@pytest.mark.parametrize(
    ("request_id", "code"),
    [
        ("REFUSAL_REASON_ALREADY_EXISTS", Status.ALREADY_EXISTS),
        ("REFUSAL_REASON_INVALID", Status.INVALID_ARGUMENT),
        ("REFUSAL_REASON_QUEUE_FULL", Status.RESOURCE_EXHAUSTED),
        ("REFUSAL_REASON_UNAVAILABLE", Status.UNAVAILABLE),
        ("REFUSAL_REASON_UNIMPLEMENTED", Status.UNIMPLEMENTED),
        ("REFUSAL_REASON_UNSPECIFIED", Status.INTERNAL),
        ("FAILURE_REASON_STEP", Status.INTERNAL),
        ("FAILURE_REASON_BLOCK_MANAGER", Status.UNAVAILABLE),
        ("FAILURE_REASON_DEADLINE", Status.DEADLINE_EXCEEDED),
        ("FAILURE_REASON_DEADLINE_QUEUED", Status.DEADLINE_EXCEEDED),
        ("FAILURE_REASON_CONSTRAINT", Status.INVALID_ARGUMENT),
        ("FAILURE_REASON_UNSPECIFIED", Status.INTERNAL),
    ],
)
def test_an_engines_refusal_or_failure_reaches_the_client_with_its_status(
    gateway: gateway_pb2_grpc.GatewayStub, request_id: str, code: Status
) -> None:
    request = prompt_request("Hello")
    request.request_id = request_id
    call = gateway.Generate(request, timeout=10)
    assert failure_of(call) == (code, OWN_DETAILS.get(request_id, "the detail"))
    blamed = "a.field" if request_id.startswith("REFUSAL") else None
    blamed = "constraint" if request_id.endswith("CONSTRAINT") else blamed
    blamed = "timeout" if "DEADLINE" in request_id else blamed
    assert dict(call.trailing_metadata()).get(errors.FIELD_METADATA) == blamed


@pytest.mark.parametrize(
    "code",
    [
        *(Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.ALREADY_EXISTS, Status.RESOURCE_EXHAUSTED),
        *(Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED, Status.INTERNAL),
    ],
)
def test_the_engines_status_of_an_admin_call_reaches_the_operator(
    gateway: gateway_pb2_grpc.GatewayStub, code: Status
) -> None:
    assert administer(gateway, code) == (code, "the detail", "a.field")


def administer(gateway: gateway_pb2_grpc.GatewayStub, code: Status) -> tuple[Status, str, str]:
    """Return the status, detail and field of an Admin call that the engine ends with this status."""
    with pytest.raises(grpc.RpcError) as caught:
        gateway.Admin(gateway_pb2.AdminRequest(unpin_prefix={"name": code.name}), timeout=10)
    error: Any = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata())[errors.FIELD_METADATA]


def test_a_request_cancelled_by_a_shutdown_of_the_engine_is_unavailable(
    gateway: gateway_pb2_grpc.GatewayStub,
) -> None:
    request = prompt_request("Hello")
    request.request_id = "shutting down"
    assert failure_of(gateway.Generate(request, timeout=10)) == (Status.UNAVAILABLE, "the engine is shutting down")


def attach(manager: kvmanager_pb2_grpc.KVManagerStub, *messages: dict[str, Any]) -> Any:
    requests = [kvmanager_pb2.PoolRequest(**message) for message in messages]
    return manager.Attach(iter(requests), timeout=CALL_SECONDS)


def register(incarnation: int = 1, engine_id: str = "e") -> dict[str, Any]:
    return {
        "register": kvmanager_pb2.Register(
            engine_id=engine_id, incarnation=incarnation, model_fingerprint="m", block_size=4, device_blocks=4
        )
    }


REPORT = {"report": kvmanager_pb2.ReportPage(last=True)}
CONTRADICTION = {"report": kvmanager_pb2.ReportPage(release_order=[1, 1], last=True)}
STEP = {"step": kvmanager_pb2.Step(step=1)}


class Held:
    """A stream that stays open."""

    def __init__(self, manager: kvmanager_pb2_grpc.KVManagerStub, incarnation: int, engine_id: str) -> None:
        self.outgoing: queue.SimpleQueue[kvmanager_pb2.PoolRequest | None] = queue.SimpleQueue()
        for message in (register(incarnation, engine_id), REPORT):
            self.outgoing.put(kvmanager_pb2.PoolRequest(**message))
        self.call = manager.Attach(iter(self.outgoing.get, None), timeout=CALL_SECONDS)
        next(self.call)

    def close(self) -> None:
        self.call.cancel()
        self.outgoing.put(None)


def stale_incarnation(_gateway: Any, manager: kvmanager_pb2_grpc.KVManagerStub) -> Status:
    newer = Held(manager, 9, "stale")
    try:
        return failure_of(attach(manager, register(8, "stale"), REPORT))[0]
    finally:
        newer.close()


def session_replaced(_gateway: Any, manager: kvmanager_pb2_grpc.KVManagerStub) -> Status:
    older = Held(manager, 10, "replaced")
    newer = Held(manager, 11, "replaced")
    try:
        older.outgoing.put(kvmanager_pb2.PoolRequest(**STEP))
        return failure_of(older.call)[0]
    finally:
        older.close()
        newer.close()


def generate(gateway: gateway_pb2_grpc.GatewayStub, **fields: Any) -> Status:
    request = prompt_request("Hello")
    request.MergeFrom(gateway_pb2.GenerateRequest(**fields))
    return failure_of(gateway.Generate(request, timeout=10))[0]


def while_unanswered(
    gateway: gateway_pb2_grpc.GatewayStub, ids: tuple[str, ...], provoke: Callable[[], Status]
) -> Status:
    """Provoke an error while requests of these ids are in flight."""
    calls = [gateway.Generate(prompt_with_id(request_id), timeout=10) for request_id in ids]
    gateway.GetModel(gateway_pb2.GetModelRequest())  # calls arrive in order
    try:
        return provoke()
    finally:
        for call in calls:
            call.cancel()
        wait_until(lambda: has_room(gateway), "the gateway has received a cancellation")


def has_room(gateway: gateway_pb2_grpc.GatewayStub) -> bool:
    return generate(gateway, request_id="REFUSAL_REASON_INVALID") == Status.INVALID_ARGUMENT


def prompt_with_id(request_id: str) -> gateway_pb2.GenerateRequest:
    request = prompt_request("Hello")
    request.request_id = request_id
    return request


PROVOCATIONS: dict[type[Exception], Callable[[Any, Any], Status]] = {
    kvmanager.InvalidRegistration: lambda _, manager: failure_of(attach(manager, register(0)))[0],
    kvmanager.InvalidReport: lambda _, manager: failure_of(attach(manager, register(), CONTRADICTION))[0],
    kvmanager.StepOutOfOrder: lambda _, manager: failure_of(attach(manager, register(), REPORT, STEP, STEP))[0],
    kvmanager.UnknownPool: lambda _, manager: failure_of(
        manager.GetPool(kvmanager_pb2.GetPoolRequest(engine_id="nobody")) for _ in "x"
    )[0],
    kvmanager.UnknownRequest: lambda _, manager: failure_of(
        manager.Explain(kvmanager_pb2.ExplainRequest(request_id="nobody")) for _ in "x"
    )[0],
    kvmanager.StaleIncarnation: stale_incarnation,
    kvmanager.SessionReplaced: session_replaced,
    errors.UnexpectedMessage: lambda _, manager: failure_of(attach(manager, STEP))[0],
    errors.InvalidField: lambda gateway, _: generate(gateway, sampling={"top_k": -1}),
    errors.UnsupportedField: lambda gateway, _: generate(gateway, request_id="REFUSAL_REASON_UNIMPLEMENTED"),
    errors.UnknownModel: lambda gateway, _: generate(gateway, model="nobody"),
    errors.RequestExists: lambda gateway, _: while_unanswered(
        gateway, ("live",), lambda: generate(gateway, request_id="live")
    ),
    errors.UnknownPin: lambda gateway, _: administer(gateway, Status.NOT_FOUND)[0],
    errors.PinExists: lambda gateway, _: administer(gateway, Status.ALREADY_EXISTS)[0],
    errors.PinTooLarge: lambda gateway, _: administer(gateway, Status.RESOURCE_EXHAUSTED)[0],
    errors.Overloaded: lambda gateway, _: while_unanswered(gateway, ("a", "b"), lambda: generate(gateway)),
    errors.SlowClient: lambda gateway, _: generate(gateway, request_id="flood"),
    errors.Unavailable: lambda gateway, _: generate(gateway, request_id="FAILURE_REASON_BLOCK_MANAGER"),
    errors.DeadlineExceeded: lambda gateway, _: generate(gateway, timeout=timedelta(seconds=0.05)),
    errors.GenerationFailed: lambda gateway, _: generate(gateway, request_id="FAILURE_REASON_STEP"),
}


# At a gateway with API keys.
KEYED_PROVOCATIONS: dict[type[Exception], Callable[[Any], Status]] = {
    errors.Unauthenticated: lambda gateway: failure_of(gateway.GetModel(gateway_pb2.GetModelRequest()) for _ in "x")[0],
    errors.PermissionDenied: lambda gateway: failure_of(
        gateway.Admin(gateway_pb2.AdminRequest(), metadata=bearer(KEY)) for _ in "x"
    )[0],
}

KEY = make_key()


@pytest.fixture(scope="module")
def keyed_gateway(
    service: Callable[..., RunningService], scripted_engine: str, tmp_path_factory: pytest.TempPathFactory
) -> gateway_pb2_grpc.GatewayStub:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", {KEY: "tenant = 'acme'"})
    return started_gateway(service, scripted_engine, "--failovers", "9", "--api-keys", str(keys))


@pytest.mark.parametrize("error", KEYED_PROVOCATIONS, ids=[error.__name__ for error in KEYED_PROVOCATIONS])
def test_a_client_receives_every_status_about_keys(
    keyed_gateway: gateway_pb2_grpc.GatewayStub, error: type[Exception]
) -> None:
    assert KEYED_PROVOCATIONS[error](keyed_gateway) == statuses.STATUS[error].grpc


def test_a_client_receives_the_status_of_a_request_that_loses_engines(
    keyed_gateway: gateway_pb2_grpc.GatewayStub,
) -> None:
    request = prompt_request("x", 5)
    request.request_id = "deadly"
    code, detail = failure_of(keyed_gateway.Generate(request, timeout=CALL_SECONDS, metadata=bearer(KEY)))
    assert code == statuses.STATUS[errors.RepeatedEngineLoss].grpc
    assert "3 engines were lost one after the other" in detail


# DecodeError is no domain error; tests/services/wire/test_fuzzed_bytes.py provokes it.
TESTED_ELSEWHERE = {DecodeError, errors.RepeatedEngineLoss, *KEYED_PROVOCATIONS}
ROWS = [error for error in statuses.STATUS if error not in TESTED_ELSEWHERE]


@pytest.mark.parametrize("error", ROWS, ids=[error.__name__ for error in ROWS])
def test_a_client_receives_every_status(
    gateway: gateway_pb2_grpc.GatewayStub, manager: kvmanager_pb2_grpc.KVManagerStub, error: type[Exception]
) -> None:
    assert PROVOCATIONS[error](gateway, manager) == statuses.STATUS[error].grpc
