"""The command `quire run-batch`. Heavy imports wait until it runs."""

import dataclasses
import os
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.commands.services import NOT_OF_SERVES_ENGINE, engine_variables
from services.cli.connection import Connection
from services.cli.options import options_of, settings_from, together, warn_of_unused_variables
from services.engine.events.settings import EventSettings
from services.engine.settings import EngineSettings

if TYPE_CHECKING:
    from services.cli.batch.sources import Source

# The engine always has enough requests to fill its batch while others are read, tokenized and written.
_WINDOW_OVER_SEQUENCES = 4
_WINDOW_OF_SERVER = 256
_MAX_WINDOW = 4096

_OF_EVENTS = tuple(field.name for field in dataclasses.fields(EventSettings))  # nobody follows the pool
_OF_LINKS = ("engine_id", "metrics_compat", "heartbeat_seconds", "seconds_without_kvmanager")
_LEFT_OUT = (*NOT_OF_SERVES_ENGINE, *_OF_LINKS, *_OF_EVENTS)
_ENGINE_SETTINGS = tuple(
    field.name
    for field in dataclasses.fields(EngineSettings)
    if field.name not in (*_LEFT_OUT, "log_format", "log_level")
)
_SERVER_OPTIONS = together(
    click.option("--base-url", help="URL of a running server, such as http://127.0.0.1:8000. No engine is started."),
    click.option("--api-key", default="", envvar="QUIRE_API_KEY", help="API key of the server."),
    click.option("--api-key-file", default="", envvar="QUIRE_API_KEY_FILE", help="File that holds the API key."),
    click.option(
        "--ca", default="", envvar="QUIRE_CA", help="PEM file of trusted certificate authorities of the server."
    ),
)


@click.command(name="run-batch")
@click.option(
    "-i",
    "--input-file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="File of requests in OpenAI's batch format, one JSON object a line. -: standard input.",
)
@click.option(
    "-o",
    "--output-file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of answers, one a line. Existing answers are kept, and their requests are not run again.",
)
@click.option(
    "--window",
    type=click.IntRange(1, _MAX_WINDOW),
    help=f"Maximum sequences in flight. Default: {_WINDOW_OVER_SEQUENCES} times --max-sequences, or "
    f"{_WINDOW_OF_SERVER} with --base-url.",
)
@click.option("--results", type=click.Path(dir_okay=False), help="JSON file for the figures of the run.")
@click.option(
    "--explain",
    multiple=True,
    metavar="CUSTOM_ID",
    help="Print what happened to the blocks of this request, and why, as `quire explain` does; can be given several "
    "times.",
)
@_SERVER_OPTIONS
@options_of(EngineSettings, leave_out=_LEFT_OUT, variables=engine_variables("run_batch"), log_level="warning")
def run_batch(**values: Any) -> None:
    """Answer a file of requests as fast as possible, then end.

    Each line of the input is a request to /v1/chat/completions, /v1/completions or /v1/responses, with a custom_id that
    is unique in the file. The engine runs in this process, with the options of `quire serve`; with --base-url a running
    server answers. Answers are written in order of completion. The same command after an interruption continues where
    it stopped. The exit status is 0 if all requests were answered, and 1 if some failed.
    """
    warn_of_unused_variables("engine", "serve")
    sys.exit(_run(values))


def _run(values: dict[str, Any]) -> int:
    from services.cli.batch.execution import execute

    requests, answers = values["input_file"], values["output_file"]
    if answers.exists() and requests.exists() and answers.samefile(requests):
        raise click.UsageError("--output-file must be another file than --input-file")
    if answers.exists() and not answers.is_file():
        raise click.UsageError(f"--output-file must be a regular file, not {str(answers)!r}")
    if not answers.absolute().parent.is_dir():
        raise click.UsageError(f"--output-file must be a file in an existing folder, not {str(answers)!r}")
    source = _server(values) if values["base_url"] else _engine(values)
    return execute(requests, answers, source, values["results"], values["explain"])


def _server(values: dict[str, Any]) -> "Source":
    """Return a running server. Raises click.UsageError."""
    from services.cli.batch.sources import RunningServer

    if given := [name for name in _ENGINE_SETTINGS if _is_given(name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags} cannot be given with --base-url: they are for an engine in this process")
    if values["explain"]:
        raise click.UsageError("--explain needs an engine in this process; for a server use `quire explain REQUEST_ID`")
    names = ("api_key", "api_key_file", "ca")
    options = dict.fromkeys(("certificate", "private_key", "server_name"), "") | {name: values[name] for name in names}
    try:
        context = ssl.create_default_context(cafile=values["ca"]) if values["ca"] else None
    except OSError as error:
        raise click.UsageError(f"--ca cannot be read: {error}") from error
    window = values["window"] or _WINDOW_OF_SERVER
    try:
        return RunningServer(values["base_url"], Connection.of("", options).api_key, context, window)
    except ValueError as error:
        raise click.UsageError(f"--base-url {error}") from error


def _is_given(name: str) -> bool:
    """Return whether an option is on the command line; variables may hold for other commands."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _engine(values: dict[str, Any]) -> "Source":
    """Return an engine of this process."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise click.UsageError("WORLD_SIZE is given, but quire run-batch starts its ranks itself")
    # As in `quire engine`, before torch is imported: threads that spin take cores from the thread of requests.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from services.cli.batch.sources import OwnEngine

    settings = settings_from(EngineSettings, values)
    return OwnEngine(
        settings, lambda sequences: values["window"] or min(_WINDOW_OVER_SEQUENCES * sequences, _MAX_WINDOW)
    )
