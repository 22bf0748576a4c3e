"""The commands for operators of the prefix cache: pin, unpin, pins, reset-cache."""

import click
import grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc, pins_pb2
from services.cli.commands.talk import fail
from services.cli.connection import Connection


async def pin(
    text: str, given: gateway_pb2.PinPrompt, *, system: bool, connection: Connection, model: str, timeout: float
) -> int:
    """Pin a prefix as `given` says, but for its prompt, and list what is pinned; return the exit status."""
    prompt = gateway_pb2.Prompt()
    if system:
        prompt.chat.messages.add(role="system", content=text)
    else:
        prompt.text = text
    given.prompt.CopyFrom(prompt)
    return await _ask(gateway_pb2.AdminRequest(model=model, pin_prefix=given), connection, timeout)


async def unpin(name: str, *, connection: Connection, model: str, timeout: float) -> int:
    """Remove a pin, and list what is pinned; return the exit status."""
    given = pins_pb2.UnpinPrefix(name=name)
    return await _ask(gateway_pb2.AdminRequest(model=model, unpin_prefix=given), connection, timeout)


async def pins(*, connection: Connection, model: str, timeout: float) -> int:
    """List what is pinned; return the exit status."""
    return await _ask(gateway_pb2.AdminRequest(model=model, list_pinned=pins_pb2.ListPinned()), connection, timeout)


async def reset_cache(*, connection: Connection, model: str, timeout: float) -> int:
    """Forget the prefix cache, and list what is pinned; return the exit status."""
    reset = pins_pb2.ResetPrefixCache()
    return await _ask(gateway_pb2.AdminRequest(model=model, reset_prefix_cache=reset), connection, timeout)


async def _ask(request: gateway_pb2.AdminRequest, connection: Connection, timeout: float) -> int:
    try:
        async with connection.channel() as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            response = await stub.Admin(request, timeout=timeout, metadata=connection.metadata)
    except grpc.aio.AioRpcError as error:
        return fail(connection.address, error)
    for one in response.pins:
        where = f"in {len(one.block_ids)} blocks" if one.pinned else "being computed"
        click.echo(f"{one.name}: {one.token_count} tokens, {where}")
    if not response.pins:
        click.echo("nothing is pinned", err=True)
    return 0
