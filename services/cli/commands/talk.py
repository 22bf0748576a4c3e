"""The commands that call running services: generate, chat, health, explain."""

from dataclasses import dataclass, field, replace
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blocks import counted
from quire.v1 import (
    decoding_pb2,
    engine_pb2,
    engine_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    kvmanager_pb2,
    kvmanager_pb2_grpc,
)
from services.cli.connection import Connection
from services.cli.model_line import model_line
from services.cli.request_options import set_request_options
from services.gateway.fleet.discovery import ServiceAddresses, watch_addresses
from services.runtime.errors import FIELD_METADATA
from services.runtime.settings import InvalidSetting
from services.wire.field_rules import numbers_of

Message = gateway_pb2.ChatMessage
Metadata = tuple[tuple[str, str], ...]


async def generate(connection: Connection, text: str, timeout: float, options: dict[str, Any]) -> int:
    """Stream one answer to stdout, and its usage to stderr; return the exit status."""
    request = _request(options)
    system = options.get("system")
    if system or options.get("as_chat"):
        request.prompt.chat.messages.extend(_system(system))
        request.prompt.chat.messages.append(Message(role="user", content=text))
    else:
        request.prompt.text = text
    try:
        async with connection.channel() as channel:
            answer = await _answer_that_fits(channel, request, timeout, connection.metadata, options)
    except grpc.aio.AioRpcError as error:
        return fail(connection.address, error)
    if not answer.text.endswith("\n"):
        click.echo()
    click.echo(f"{usage_line(answer.finished)}, {_name(answer, connection)}", err=True)
    if answer.model_defaults:
        click.echo(f"the model's defaults: {answer.model_defaults}", err=True)
    _print_stop(answer, request)
    return 0


async def chat(connection: Connection, timeout: float, options: dict[str, Any]) -> int:
    """Answer line by line until an empty one; return the exit status."""
    history = _system(options.get("system"))
    async with connection.channel() as channel:
        while line := _read_line():
            history.append(Message(role="user", content=line))
            request = _request(options)
            request.prompt.chat.messages.extend(history)
            try:
                answer = await _print_answer(channel, request, timeout, connection.metadata)
            except grpc.aio.AioRpcError as error:
                return fail(connection.address, error)
            click.echo()
            _print_stop(answer, request)
            history.append(Message(role="assistant", content=answer.text))
    return 0


async def health(connection: Connection, service: str, timeout: float) -> int:
    """Print a service's status; return 0 when it is SERVING."""
    try:
        async with connection.channel() as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            click.echo(status)
            if status != "SERVING":
                return 1
            for line in await _devices(channel, service, timeout, connection.metadata):
                click.echo(line)
    except grpc.aio.AioRpcError as error:
        return fail(connection.address, error)
    return 0


async def _devices(channel: grpc.aio.Channel, service: str, timeout: float, metadata: Metadata) -> list[str]:
    """Describe the models of a gateway or an engine, and their devices; empty for others, and if they do not answer.

    Only the status decides about health: a probe must not fail for a missing permission or a late description.
    """
    try:
        if service == "quire.v1.Engine":
            engine = await engine_pb2_grpc.EngineStub(channel).GetEngine(engine_pb2.GetEngineRequest(), timeout=timeout)
            formats = [engine.weights], [engine.kv_dtype]
            return [model_line(engine.model, engine.dtype, *formats, [engine.device])]
        if service == "quire.v1.Gateway":
            stub = gateway_pb2_grpc.GatewayStub(channel)
            listed = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=timeout, metadata=metadata)
            return [model_line(one.model, one.dtype, one.weights, one.kv_dtypes, one.devices) for one in listed.models]
    except grpc.aio.AioRpcError:
        return []
    return []


async def explain(connection: Connection, request_id: str, timeout: float) -> int:
    """Print the explanations of a request's blocks by all KV managers of the address; return the exit status."""
    found = 0
    failures: list[tuple[str, grpc.aio.AioRpcError]] = []
    for address in await _addresses(connection.address):
        try:
            async with replace(connection, address=address).channel() as channel:
                request = kvmanager_pb2.ExplainRequest(request_id=request_id)
                answer = await kvmanager_pb2_grpc.KVManagerStub(channel).Explain(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failures.append((address, error))
        else:
            click.echo(answer.summary)
            found += 1
    if found:
        return 0
    # A KV manager that does not answer may be the one with the request.
    address, failure = min(failures, key=lambda one: one[1].code() is grpc.StatusCode.NOT_FOUND)
    unknown = failure.code() is grpc.StatusCode.NOT_FOUND
    return fail(address, failure, connection.instance if unknown else "")


async def _addresses(given: str) -> list[str]:
    """Return the addresses of a list in which names are resolved."""
    try:
        services = ServiceAddresses.of(given, "--address")
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error
    resolved = list(await anext(watch_addresses(services, interval_seconds=1.0)))
    if not resolved:
        raise click.ClickException(f"{given} resolves to no address")
    return resolved


def usage_line(finished: gateway_pb2.Finished) -> str:
    """Return token counts and times of an answer in one line."""
    usage, timing = finished.usage, finished.timing
    seconds = timing.decode.ToTimedelta().total_seconds()
    rate = f", {(usage.generated_tokens - 1) / seconds:.1f} tokens/s" if seconds else ""
    first = timing.time_to_first_token.ToTimedelta().total_seconds()
    prompt = counted(usage.prompt_tokens, "prompt token")
    return (
        f"{prompt} ({usage.cached_tokens} cached), {usage.generated_tokens} generated, "
        f"first token after {first:.2f} s{rate}"
    )


def _request(options: dict[str, Any]) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(model=options["model"])
    if beams := options.get("beams"):
        request.beam_search.width = beams
    set_request_options(request, options)
    request.stopping.stop_strings.extend(options.get("stop", ()))
    if options["max_tokens"]:
        request.stopping.max_tokens = options["max_tokens"]
    if (schema := options.get("json_schema")) is not None:
        request.constraint.json_schema = schema
    if (regex := options.get("regex")) is not None:
        request.constraint.regex = regex
    return request


def _system(content: str | None) -> list[Message]:
    return [Message(role="system", content=content)] if content else []


@dataclass
class _PrintedAnswer:
    request_id: str = ""
    model_defaults: str = ""
    default_limit: int = 0  # max_tokens of the model, if the request got them
    text: str = ""
    finished: gateway_pb2.Finished = field(default_factory=gateway_pb2.Finished)


async def _print_answer(
    channel: grpc.aio.Channel, request: gateway_pb2.GenerateRequest, timeout: float, metadata: Metadata
) -> _PrintedAnswer:
    answer = _PrintedAnswer()
    stub = gateway_pb2_grpc.GatewayStub(channel)
    async for response in stub.Generate(request, timeout=timeout, metadata=metadata):
        answer.text += response.delta.text
        click.echo(response.delta.text, nl=False)
        match response.WhichOneof("event"):
            case "started":
                answer.request_id = response.started.request_id
                answer.model_defaults = numbers_of(response.started.model_defaults)
                answer.default_limit = response.started.model_defaults.max_tokens
                for warning in response.started.warnings:
                    click.echo(f"warning: {warning}", err=True)
            case "finished":
                answer.finished = response.finished
    return answer


async def _answer_that_fits(
    channel: grpc.aio.Channel,
    request: gateway_pb2.GenerateRequest,
    timeout: float,
    metadata: Metadata,
    options: dict[str, Any],
) -> _PrintedAnswer:
    """Print an answer. If the default of max_tokens does not fit, try again without it."""
    try:
        return await _print_answer(channel, request, timeout, metadata)
    except grpc.aio.AioRpcError as error:
        fields = {value for key, value in error.trailing_metadata() or () if key == FIELD_METADATA}
        if options["limit_given"] or "stopping.max_tokens" not in fields:
            raise
    request.stopping.ClearField("max_tokens")
    return await _print_answer(channel, request, timeout, metadata)


def _name(answer: _PrintedAnswer, connection: Connection) -> str:
    """Return the request's name for `quire explain`: with an API key, the tenant precedes the id."""
    return f"request {'TENANT/' if connection.api_key else ''}{answer.request_id}"


def _print_stop(answer: _PrintedAnswer, request: gateway_pb2.GenerateRequest) -> None:
    limit = request.stopping.max_tokens or answer.default_limit
    reasons = {sample.reason for sample in answer.finished.samples}
    if limit and decoding_pb2.FINISH_REASON_LENGTH in reasons:
        click.echo(f"stopped at {counted(limit, 'token')}; raise it with --max-tokens", err=True)


def _read_line() -> str:
    try:
        line: str = click.prompt("you", default="", show_default=False, prompt_suffix="> ").strip()
        line.encode()
    except click.Abort:
        return ""
    except UnicodeError as error:
        raise click.UsageError("standard input must be UTF-8 text") from error
    return line


def fail(address: str, error: grpc.aio.AioRpcError, note: str = "") -> int:
    """Print the error of a call, and return the exit status."""
    click.echo(f"{address}: {error.code().name}: {error.details()}{note and f'; {note}'}", err=True)
    return 1
