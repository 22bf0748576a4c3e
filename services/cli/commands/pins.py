"""The commands for operators of the prefix cache: pin, unpin, pins, reset-cache, forget."""

from pathlib import Path
from typing import Any

import click
import grpc

from blocks import counted
from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.cli.commands.talk import fail
from services.cli.connection import Connection
from services.engine.kept.memory_file import SUFFIX, MemoryFile
from services.runtime.settings import InvalidSetting


async def administer(connection: Connection, timeout: float, **request: Any) -> int:
    """Send an AdminRequest with these fields, and print the pinned prefixes; return the exit status."""
    try:
        async with connection.channel() as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            given = gateway_pb2.AdminRequest(**request)
            response = await stub.Admin(given, timeout=timeout, metadata=connection.metadata)
    except grpc.aio.AioRpcError as error:
        return fail(connection.address, error)
    for one in response.pins:
        where = f"in {counted(len(one.block_ids), 'block')}" if one.pinned else "being computed"
        click.echo(f"{one.name}: {counted(one.token_count, 'token')}, {where}")
    if not response.pins:
        click.echo("no prefix is pinned", err=True)
    return 0


def forget(path: Path) -> None:
    """Erase the kept memory of engines that have ended: a file, or all of a folder.

    Raises click.ClickException at the first that is another file, or that an engine uses.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise click.ClickException(f"{path} has no files of engines (*{SUFFIX})")
    for file in files:
        _forget_file(file)


def _forget_file(file: Path) -> None:
    try:
        memory = MemoryFile(file)
    except InvalidSetting as error:
        _, _, reason = str(error).partition(", which ")
        raise click.ClickException(f"{file} {reason}") from error
    memory.erase()
    memory.close()
    click.echo(f"{file}: erased")
