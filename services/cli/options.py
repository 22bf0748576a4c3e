"""Command-line options and environment variables made from the fields of a settings dataclass."""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import click

from services.runtime.logs.records import logging_to_stderr
from services.runtime.settings import InvalidSetting

log = logging.getLogger("quire")


class FiniteFloat(click.ParamType[float]):
    """A number, neither NaN nor infinite, above a limit (`above`) or between bounds that belong to the range."""

    name = "float"

    def __init__(self, least: float | None = None, most: float | None = None, *, above: float | None = None) -> None:
        """Without bounds every finite number is accepted."""
        self._least, self._most, self._above = least, most, above

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Raise click.BadParameter with the bounds and the value."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and self._holds(number)):
            self.fail(f"must be {self._bounds()}, not {value}", parameter, context)
        return number

    def _holds(self, number: float) -> bool:
        return (
            (self._above is None or number > self._above)
            and (self._least is None or number >= self._least)
            and (self._most is None or number <= self._most)
        )

    def _bounds(self) -> str:
        bounds = [
            f"{words} {bound:.12g}"
            for words, bound in (("above", self._above), ("at least", self._least), ("at most", self._most))
            if bound is not None
        ]
        return "a number " + " and ".join(bounds) if bounds else "a finite number"


# Deadlines. The upper bound is 10 years: gRPC's clock overflows at longer ones.
SECONDS = FiniteFloat(above=0, most=10 * 365 * 86400)

Settings = TypeVar("Settings")
Command = Callable[..., Any]


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine decorators into one, in the order in which help lists their options."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def options_of(
    settings_type: type,
    leave_out: Iterable[str] = (),
    variables: Mapping[str, list[str]] | None = None,
    **defaults: Any,
) -> Callable[[Command], Command]:
    """Add an option for each field: `--block-size` for `block_size`, `--insecure` and `--no-insecure` for a bool.

    `variables` has environment variables by field, in place of the command's own; the first one that is set counts.
    `defaults` has defaults by field, in place of the fields' own.
    """
    left_out, named = set(leave_out), variables or {}
    fields = [field for field in dataclasses.fields(settings_type) if field.name not in left_out]
    return together(
        *(_option(field, defaults.get(field.name, field.default), named.get(field.name)) for field in fields)
    )


def settings_from(settings_type: type[Settings], values: dict[str, Any]) -> Settings:
    """Make the settings from the values of its fields. Raises click.UsageError, naming the field."""
    names = {field.name for field in dataclasses.fields(settings_type)}  # type: ignore[arg-type]
    try:
        return settings_type(**{name: value for name, value in values.items() if name in names})
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error


def warn_of_unused_variables(*others: str, starts: Collection[str] = ()) -> None:
    """Print a warning for each environment variable that looks like a setting, but that the current command ignores.

    Those are variables with its own prefix that no option has, those with the prefix of `others`, which are commands
    with options of the same names, and all with the prefix of commands that it `starts` with its own settings. With a
    log in JSON, the warnings are its first lines.
    """
    context = click.get_current_context()
    found = list(unused_variables(context, os.environ, others, starts))
    if found and context.params.get("log_format") == "json":
        with logging_to_stderr(str(context.info_name), "json", "warning"):
            for warning in found:
                log.warning(warning)
        return
    # Lines of `quire serve` begin with the name of their service.
    label = "serve     | WARNING" if context.info_name == "serve" else "warning:"
    for warning in found:
        click.echo(f"{label} {warning}", err=True)


def unused_variables(
    context: click.Context, environ: Mapping[str, str], others: Iterable[str] = (), starts: Collection[str] = ()
) -> Iterator[str]:
    """Yield a sentence for each variable that `warn_of_unused_variables` reports."""
    prefix = f"{context.auto_envvar_prefix}_"
    named = [[option.envvar] if isinstance(option.envvar, str) else option.envvar for option in context.command.params]
    read = {f"{prefix}{option.name}".upper() for option in context.command.params}
    read.update(name for names in named for name in names or ())
    for name in sorted(environ):
        if name.startswith(prefix) and name not in read:
            yield f"{name} is ignored: `{context.command_path}` has no such option"
        for other in (*others, *starts):
            foreign = f"QUIRE_{other.upper()}_"
            if not name.startswith(foreign) or name in read:
                continue
            own = name.removeprefix(foreign)
            # The address of another service is not that of the command.
            if (right := prefix + own) in read and not own.endswith("LISTEN"):
                yield f"{name} is ignored: `{context.command_path}` reads {right}"
            elif other in starts and not _reads(context, other, name):
                yield f"{name} is ignored: `quire {other}` has no such option"
            elif other in starts:
                yield f"{name} is ignored: `{context.command_path}` has no such option; run `quire {other}` by itself"


def _reads(context: click.Context, command_name: str, variable: str) -> bool:
    """Return whether another command of the program has an option for a variable."""
    program = context.find_root().command
    command = program.get_command(context, command_name) if isinstance(program, click.Group) else None
    named = variable.removeprefix(f"QUIRE_{command_name.upper()}_").lower()
    return command is not None and any(option.name == named for option in command.params)


def arguments_of(settings: Any) -> list[str]:
    """Return the command-line arguments for these settings."""
    arguments = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        arguments += [_switch(field.name, on=value)] if isinstance(value, bool) else [_flag(field.name), str(value)]
    return arguments


def _option(field: "dataclasses.Field[Any]", default: Any, variables: list[str] | None) -> Callable[[Command], Command]:
    choices = field.metadata["choices"]
    if isinstance(field.default, bool):
        switches = "/".join(_switch(field.name, on=on) for on in (True, False))
        return click.option(switches, field.name, default=default, help=field.metadata["meaning"], envvar=variables)
    return click.option(
        _flag(field.name),
        field.name,
        type=click.Choice(choices) if choices else type(field.default),
        default=default,
        show_default=default != "",
        help=field.metadata["meaning"],
        envvar=variables,
    )


def _switch(name: str, *, on: bool) -> str:
    return _flag(name) if on else "--no-" + name.replace("_", "-")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
