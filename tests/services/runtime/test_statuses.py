"""The table from domain errors to statuses is complete, and clients receive each status."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.message import DecodeError

import kvmanager
from engine import errors as engine_errors
from kvmanager import limits
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
from services.runtime import errors, statuses
from services.wire.duration import duration
from services.wire.requests import errors as requests_errors
from services.wire.requests import output
from tests.api_keys import bearer, write_keys
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningService
from tests.services.kvmanager.attach_stream import Stream, register

Status = grpc.StatusCode
KEY = make_key()

# As documented in services.runtime.statuses.
INTERNAL = {
    *(kvmanager.OutOfBlocks, kvmanager.UnknownSequence, kvmanager.IdInUse, kvmanager.InvalidItem),
    *(kvmanager.UnknownPin, kvmanager.PinTooLarge),
    *(engine_errors.RequestExists, engine_errors.InvalidRequest),
    *(engine_errors.UnsupportedField, engine_errors.QueueFull, engine_errors.EngineUnavailable),
    engine_errors.SubmissionFailed,
    engine_errors.ConstraintFailed,
    *(engine_errors.InvalidPin, engine_errors.PinExists, engine_errors.PinTooLarge, engine_errors.UnknownPin),
    *(engine_errors.PinFailed, engine_errors.PinUnavailable),
    *(engine_errors.ModelUnsupported, engine_errors.BackendUnavailable, engine_errors.HostTierUnavailable),
    *(engine_errors.BlockManagerBroken, engine_errors.CopyFailed, engine_errors.DeviceLost),
    *(engine_errors.RankFailed, engine_errors.KeptMemoryLost),
}


def leaves(base: type[Exception]) -> set[type[Exception]]:
    """Return the subclasses without subclasses outside of tests."""
    narrower = [kind for kind in base.__subclasses__() if not kind.__module__.startswith("tests.")]
    return set().union(*(leaves(kind) for kind in narrower)) or {base}


def test_every_domain_error_has_a_row_or_is_internal() -> None:
    roots = (kvmanager.KVManagerError, engine_errors.EngineError, errors.ServiceError)
    domain = set().union(*(leaves(root) for root in roots))
    rows = {kind: [one for one in kind.__mro__ if one in statuses.STATUS] for kind in domain}
    assert {kind for kind in domain if not rows[kind]} == INTERNAL
    assert set(statuses.STATUS) == {DecodeError}.union(*rows.values())


def test_an_error_of_a_narrower_type_has_the_status_of_the_wider_one() -> None:
    class TooLong(errors.InvalidField):
        pass

    assert statuses.status_of(TooLong("x")).grpc == Status.INVALID_ARGUMENT


def test_every_refusal_of_the_engine_has_its_reason_on_the_wire() -> None:
    assert set(output._REFUSALS) == leaves(engine_errors.RequestRefused)
    reasons = set(engine_pb2.RefusalReason.values()) - {engine_pb2.REFUSAL_REASON_UNSPECIFIED}
    assert set(requests_errors.REFUSALS) == reasons
    assert set(output._REFUSALS.values()) == reasons


def test_every_failure_of_a_request_has_its_error_except_the_deadlines() -> None:
    deadlines = {engine_pb2.FAILURE_REASON_DEADLINE, engine_pb2.FAILURE_REASON_DEADLINE_QUEUED}
    reasons = set(engine_pb2.FailureReason.values()) - {engine_pb2.FAILURE_REASON_UNSPECIFIED}
    assert set(requests_errors.FAILURES) == reasons - deadlines


# Real gateway and KV manager; the engine is simulated, because a real one does not fail on demand.


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Ends each request as its id requires. Requests with other ids are not answered."""

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        self._tokenizer = tokenizer
        self._numbers = count()

    def GetEngine(self, _request: engine_pb2.GetEngineRequest, _context: Any) -> engine_pb2.GetEngineResponse:  # noqa: N802
        return engine_pb2.GetEngineResponse(
            model="played",
            engine_id=f"engine-{next(self._numbers)}",  # one for each link
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
        names = {"request_id": submission.request_id, "attempt": submission.attempt}
        # A request that moves fails at one engine, and is refused by the next.
        name = submission.request_id.split(", then ")[submission.attempt > 1 and "," in submission.request_id]
        if name.startswith("REFUSAL_REASON"):
            reason = engine_pb2.RefusalReason.Value(name)
            refused = engine_pb2.RequestRefused(**names, reason=reason, detail="the detail", field="a.field")
            return engine_pb2.StepOutput(refused=[refused])
        if name.startswith("FAILURE_REASON"):
            failure = engine_pb2.FailureReason.Value(name)
            samples = [engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_FAILED)]
            finished = engine_pb2.RequestFinished(**names, samples=samples, failure=failure, detail="the detail")
            return engine_pb2.StepOutput(finished=[finished])
        if name == "started":
            return engine_pb2.StepOutput(started=[engine_pb2.RequestStarted(**names)])
        if name == "flood":  # more than is queued for a client, before it can have read any
            tokens = [engine_pb2.SampleTokens(**names, token_ids=[1] * 5000) for _ in range(2)]
            return engine_pb2.StepOutput(tokens=tokens)
        if name == "shutting down":
            samples = [engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_CANCELLED)]
            return engine_pb2.StepOutput(finished=[engine_pb2.RequestFinished(**names, samples=samples)])
        return None


@pytest.fixture(scope="module")
def scripted_engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"unix:{tmp_path_factory.mktemp('engine')}/engine.sock"
    with ThreadPoolExecutor(8) as threads:  # one for each open stream
        server = grpc.server(threads)
        engine_pb2_grpc.add_EngineServicer_to_server(ScriptedEngine(TokenizerFiles(tiny_model("llama"))), server)
        server.add_insecure_port(address)
        server.add_insecure_port(f"{address}.second")
        server.start()
        yield address
        server.stop(grace=0).wait()


def started_gateway(
    service: Callable[..., RunningService], engine: str, *arguments: str
) -> gateway_pb2_grpc.GatewayStub:
    address = ("--listen", "127.0.0.1:0", "--engines", engine, "--link-timeout-seconds", "600")
    one = service("gateway", *address, *arguments)
    one.output.wait_for("gateway is ready")
    stub = gateway_pb2_grpc.GatewayStub(one.channel)
    stub.GetModel(gateway_pb2.GetModelRequest(), metadata=bearer(KEY))  # connected: later calls arrive in order
    return stub


class Servers(NamedTuple):
    """Stubs of two gateways, the second with API keys, of a KV manager, and of a gateway of two engines."""

    gateway: gateway_pb2_grpc.GatewayStub
    keyed_gateway: gateway_pb2_grpc.GatewayStub
    manager: kvmanager_pb2_grpc.KVManagerStub
    gateway_of_two: gateway_pb2_grpc.GatewayStub


@pytest.fixture(scope="module")
def servers(
    service: Callable[..., RunningService], scripted_engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Servers:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", {KEY: "tenant = 'acme'"})
    manager = service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0")
    return Servers(
        started_gateway(service, scripted_engine, "--failovers", "0", "--max-requests", "2"),
        started_gateway(service, scripted_engine, "--failovers", "9", "--api-keys", str(keys)),
        kvmanager_pb2_grpc.KVManagerStub(manager.channel),
        started_gateway(service, f"{scripted_engine},{scripted_engine}.second"),
    )


class Failure(NamedTuple):
    code: Status
    detail: str
    field: str | None


def failure_of(method: Callable[..., Any], request: Any, **options: Any) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        list(method(request, timeout=CALL_SECONDS, **options))
    error: Any = caught.value
    return Failure(error.code(), error.details(), dict(error.trailing_metadata()).get(errors.FIELD_METADATA))


def generate_request(**fields: Any) -> gateway_pb2.GenerateRequest:
    request = prompt_request("Hello")
    request.MergeFrom(gateway_pb2.GenerateRequest(**fields))
    return request


def generate(gateway: gateway_pb2_grpc.GatewayStub, **fields: Any) -> Failure:
    return failure_of(gateway.Generate, generate_request(**fields), metadata=bearer(KEY))


def administer(gateway: gateway_pb2_grpc.GatewayStub, code: Status) -> Failure:
    """Send an Admin call that the engine ends with this status."""
    return failure_of(gateway.Admin, gateway_pb2.AdminRequest(unpin_prefix={"name": code.name}))


@pytest.mark.parametrize(
    ("request_id", "code", "field", "detail"),
    [
        ("REFUSAL_REASON_ALREADY_EXISTS", Status.ALREADY_EXISTS, "a.field", "the detail"),
        ("REFUSAL_REASON_INVALID", Status.INVALID_ARGUMENT, "a.field", "the detail"),
        ("REFUSAL_REASON_QUEUE_FULL", Status.RESOURCE_EXHAUSTED, "a.field", "the detail"),
        ("REFUSAL_REASON_UNAVAILABLE", Status.UNAVAILABLE, "a.field", "the detail"),
        ("REFUSAL_REASON_UNIMPLEMENTED", Status.UNIMPLEMENTED, "a.field", "the detail"),
        ("REFUSAL_REASON_UNSPECIFIED", Status.INTERNAL, "a.field", "the detail"),
        ("FAILURE_REASON_STEP", Status.INTERNAL, None, "the detail"),
        ("FAILURE_REASON_BLOCK_MANAGER", Status.UNAVAILABLE, None, "the detail"),
        (
            "FAILURE_REASON_DEADLINE",
            Status.DEADLINE_EXCEEDED,
            "timeout",
            "timeout exceeded while the request was running",
        ),
        (
            "FAILURE_REASON_DEADLINE_QUEUED",
            Status.DEADLINE_EXCEEDED,
            "timeout",
            "timeout exceeded while the request was queued",
        ),
        ("FAILURE_REASON_CONSTRAINT", Status.INVALID_ARGUMENT, "constraint", "the detail"),
        ("FAILURE_REASON_UNSPECIFIED", Status.INTERNAL, None, "the detail"),
    ],
)
def test_an_engines_refusal_or_failure_reaches_the_client_with_its_status(
    servers: Servers, request_id: str, code: Status, field: str | None, detail: str
) -> None:
    assert generate(servers.gateway, request_id=request_id) == (code, detail, field)


@pytest.mark.parametrize("refusal", ["REFUSAL_REASON_INVALID", "REFUSAL_REASON_QUEUE_FULL"])
def test_a_refusal_by_the_next_engine_does_not_replace_the_reason_of_a_failover(servers: Servers, refusal: str) -> None:
    wait_until(
        lambda: servers.gateway_of_two.GetModel(gateway_pb2.GetModelRequest()).engines == 2, "both are connected"
    )
    moved = generate(servers.gateway_of_two, request_id=f"FAILURE_REASON_BLOCK_MANAGER, then {refusal}")
    assert moved == (Status.UNAVAILABLE, "the detail", None)


@pytest.mark.parametrize(
    ("request_id", "phase"),
    [("unanswered", "before the first token"), ("started", "while the request was running")],
)
def test_a_deadline_that_passes_at_the_gateway_names_the_phase_that_is_known(
    servers: Servers, request_id: str, phase: str
) -> None:
    failure = generate(servers.gateway, request_id=request_id, timeout=duration(0.2))
    assert failure == (Status.DEADLINE_EXCEEDED, f"timeout exceeded {phase}", "timeout")


@pytest.mark.parametrize(
    "code",
    [
        *(Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.ALREADY_EXISTS, Status.RESOURCE_EXHAUSTED),
        *(Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED, Status.INTERNAL),
    ],
)
def test_the_engines_status_of_an_admin_call_reaches_the_operator(servers: Servers, code: Status) -> None:
    assert administer(servers.gateway, code) == (code, "the detail", "a.field")


def test_a_request_cancelled_by_a_shutdown_of_the_engine_is_unavailable(servers: Servers) -> None:
    failure = generate(servers.gateway, request_id="shutting down")
    assert failure[:2] == (Status.UNAVAILABLE, "the engine is shutting down")


def registration(**fields: Any) -> kvmanager_pb2.PoolRequest:
    return kvmanager_pb2.PoolRequest(register=register(**fields))


REPORT = kvmanager_pb2.PoolRequest(report=kvmanager_pb2.ReportPage(last=True))
CONTRADICTION = kvmanager_pb2.PoolRequest(report=kvmanager_pb2.ReportPage(release_order=[1, 1], last=True))
STEP = kvmanager_pb2.PoolRequest(step=kvmanager_pb2.Step(step=1))


def attach(servers: Servers, *messages: kvmanager_pb2.PoolRequest) -> Failure:
    return failure_of(servers.manager.Attach, iter(messages))


@contextmanager
def attached(servers: Servers, **fields: Any) -> Iterator[Stream]:
    """Hold a stream open."""
    stream = Stream(servers.manager).attach(**fields)
    try:
        yield stream
    finally:
        stream.break_off()


def stale_incarnation(servers: Servers) -> Failure:
    with attached(servers, engine_id="stale", incarnation=9):
        return attach(servers, registration(engine_id="stale", incarnation=8), REPORT)


def unknown_kind(servers: Servers) -> Failure:
    with attached(servers, engine_id="uniform"):
        asked = kvmanager_pb2.GetBlockMapRequest(engine_id="uniform", kind="window-8")
        return failure_of(servers.manager.GetBlockMap, asked)


def too_many_blocks(servers: Servers) -> Failure:
    """Attach while another pool has nearly all blocks that are allowed together."""
    with attached(servers, engine_id="large", device_blocks=limits.MAX_BLOCKS - 50):
        return attach(servers, registration(engine_id="small", device_blocks=51))


def session_replaced(servers: Servers) -> Failure:
    with (
        attached(servers, engine_id="replaced", incarnation=10) as older,
        attached(servers, engine_id="replaced", incarnation=11),
    ):
        older.send(step=STEP.step)
        return Failure(*older.refusal())


def while_in_flight(servers: Servers, ids: tuple[str, ...], **fields: Any) -> Failure:
    """Send a request while requests of these ids are in flight."""
    gateway = servers.gateway
    calls = [gateway.Generate(generate_request(request_id=name), timeout=CALL_SECONDS) for name in ids]
    gateway.GetModel(gateway_pb2.GetModelRequest())  # calls arrive in order
    try:
        return generate(gateway, **fields)
    finally:
        for call in calls:
            call.cancel()
        wait_until(lambda: has_room(gateway), "the gateway has received a cancellation")


def has_room(gateway: gateway_pb2_grpc.GatewayStub) -> bool:
    return generate(gateway, request_id="REFUSAL_REASON_INVALID").code == Status.INVALID_ARGUMENT


PROVOCATIONS: dict[type[Exception], Callable[[Servers], Failure]] = {
    kvmanager.InvalidRegistration: lambda to: attach(to, registration(incarnation=0)),
    kvmanager.InvalidReport: lambda to: attach(to, registration(), CONTRADICTION),
    kvmanager.StepOutOfOrder: lambda to: attach(to, registration(), REPORT, STEP, STEP),
    kvmanager.UnknownPool: lambda to: failure_of(to.manager.GetPool, kvmanager_pb2.GetPoolRequest(engine_id="nobody")),
    kvmanager.UnknownKind: unknown_kind,
    kvmanager.UnknownKind: unknown_kind,
    kvmanager.UnknownRequest: lambda to: failure_of(
        to.manager.Explain, kvmanager_pb2.ExplainRequest(request_id="nobody")
    ),
    kvmanager.StaleIncarnation: stale_incarnation,
    kvmanager.SessionReplaced: session_replaced,
    kvmanager.TooManyBlocks: too_many_blocks,
    errors.UnexpectedMessage: lambda to: attach(to, STEP),
    errors.InvalidField: lambda to: generate(to.gateway, sampling={"top_k": -1}),
    errors.UnsupportedField: lambda to: generate(to.gateway, request_id="REFUSAL_REASON_UNIMPLEMENTED"),
    errors.UnknownModel: lambda to: generate(to.gateway, model="nobody"),
    errors.RequestExists: lambda to: while_in_flight(to, ("live",), request_id="live"),
    errors.UnknownPin: lambda to: administer(to.gateway, Status.NOT_FOUND),
    errors.PinExists: lambda to: administer(to.gateway, Status.ALREADY_EXISTS),
    errors.PinTooLarge: lambda to: administer(to.gateway, Status.RESOURCE_EXHAUSTED),
    errors.Overloaded: lambda to: while_in_flight(to, ("a", "b")),
    errors.SlowClient: lambda to: generate(to.gateway, request_id="flood"),
    errors.Unavailable: lambda to: generate(to.gateway, request_id="FAILURE_REASON_BLOCK_MANAGER"),
    errors.DeadlineExceeded: lambda to: generate(to.gateway, timeout=timedelta(seconds=0.05)),
    errors.GenerationFailed: lambda to: generate(to.gateway, request_id="FAILURE_REASON_STEP"),
    errors.RepeatedEngineLoss: lambda to: generate(to.keyed_gateway, request_id="deadly"),
    errors.Unauthenticated: lambda to: failure_of(to.keyed_gateway.GetModel, gateway_pb2.GetModelRequest()),
    errors.PermissionDenied: lambda to: failure_of(
        to.keyed_gateway.Admin, gateway_pb2.AdminRequest(), metadata=bearer(KEY)
    ),
}
# DecodeError is no domain error; tests/services/wire/test_fuzzed_bytes.py provokes it.
ROWS = [error for error in statuses.STATUS if error is not DecodeError]


@pytest.mark.parametrize("error", ROWS, ids=[error.__name__ for error in ROWS])
def test_a_client_receives_every_status(servers: Servers, error: type[Exception]) -> None:
    failure = PROVOCATIONS[error](servers)
    assert failure.code == statuses.STATUS[error].grpc
    if error is errors.RepeatedEngineLoss:
        assert "3 engines were lost one after the other" in failure.detail


def test_a_message_that_cannot_be_sent_ends_the_call_as_its_cancellation_does() -> None:
    async def call() -> None:
        async with statuses.abort_on_error(None):  # type: ignore[arg-type]  # such a call gets no status
            raise grpc.aio.InternalError("Failed execute_batch")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(call())
