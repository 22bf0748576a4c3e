"""`quire forget`: erases the blocks that an engine has left."""

from pathlib import Path

import click

from services.runtime.settings import InvalidSetting


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def forget(file: Path) -> None:
    """Erase the blocks in FILE, the --keep-blocks of an engine that has ended.

    They contain what was computed from the prompts of all tenants. The memory of a running engine is refused: `quire
    reset-cache` withdraws its blocks, and its end erases them unless it has --keep-at-stop.
    """
    from services.engine.kept.memory_file import MemoryFile

    try:
        memory = MemoryFile(file)
        memory.erase()
        memory.close()
    except InvalidSetting as error:
        raise click.ClickException(str(error).removeprefix("keep_blocks is ")) from error
    click.echo(f"{file}: erased")
