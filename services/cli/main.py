"""The command `quire` and its subcommands. Heavy imports wait until a subcommand needs them."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

# Logs of gRPC's C core do not help users of a command: calls and `bind` report failures. It is read at the import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click

from services.cli.batch.command import run_batch
from services.cli.commands.bench import bench
from services.cli.commands.issue_certificates import certificates
from services.cli.commands.keys import key
from services.cli.commands.plan import plan
from services.cli.commands.services import NOT_OF_SERVES_ENGINE, engine, engine_variables, gateway, kvmanager, serve
from services.cli.connection import address_option, connection_options, read_text
from services.cli.kv_events import kv_events
from services.cli.options import SECONDS, FiniteFloat, options_of, settings_from, together, warn_of_unused_variables
from services.cli.request_options import request_options, search_options
from services.engine.settings import EngineSettings
from services.runtime.logs.records import print_stacks_at_signal
from services.runtime.logs.relay import relay_child, service_with_json_log

if TYPE_CHECKING:
    from services.cli.connection import Connection

# Default of one answer: models that never generate the end-of-sequence token fill the whole context.
ANSWER_TOKENS = 256
_TOKENS = click.IntRange(0, 2**31 - 1)
# Exit status of a command that Ctrl-C ended, as shells have it.
_INTERRUPTED = 130


def main() -> None:
    """Run the command line; settings also come from the environment, such as QUIRE_ENGINE_BLOCK_SIZE."""
    print_stacks_at_signal()
    if os.getpid() == 1 and (service := service_with_json_log(sys.argv[1:], os.environ)):
        relay_child(service)
    cli.main(auto_envvar_prefix="QUIRE", prog_name="quire")


class _Commands(click.Group):
    def list_commands(self, _context: click.Context) -> list[str]:
        """Return the commands in the order of their definition."""
        return list(self.commands)

    def invoke(self, context: click.Context) -> Any:
        """Run the command; Ctrl-C ends it, or the imports that it needs, without a message."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            context.exit(_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="quire", message="%(prog)s %(version)s")
def cli() -> None:
    """Quire serves large language models from paged memory.

    `quire serve` starts all services; `quire generate` and `quire chat` call them. Each service can also be started
    alone, on one machine or on several.

    Every option is also an environment variable, named after its command: QUIRE_ENGINE_BLOCK_SIZE is --block-size of
    `quire engine`, QUIRE_SERVE_BLOCK_SIZE that of `quire serve`. `serve`, `demo` and `run-batch` also read the engine's
    variables, but their own come first.
    """


for command in (serve, kvmanager, engine, gateway):
    cli.add_command(command)


@cli.command()
@click.argument("prompt")
@address_option("gateway")
@click.option("--model", default="", help="Name of the model. Default: the only model.")
@click.option(
    "--max-tokens",
    type=_TOKENS,
    help="Maximum number of generated tokens; 0: the model's, else as many as fit. "
    f"Default: {ANSWER_TOKENS}, or fewer if fewer fit.",
)
@click.option(
    "--beams",
    type=click.IntRange(1, 2**31 - 1),
    help="Beam search of this width instead of sampling; prints the best answer.",
)
@request_options()
@click.option("--stop", multiple=True, help="Stop string; can be given several times.")
@click.option(
    "--json-schema", type=click.File(encoding="utf-8"), help="File with a JSON schema that the answer must follow."
)
@click.option("--regex", help="Regular expression that the whole answer must match.")
@click.option("--system", help="System message; makes the prompt a chat.")
@click.option("--chat", "as_chat", is_flag=True, help="Send the prompt as a user message, through the chat template.")
@click.option(
    "--timeout", type=SECONDS, default=300.0, show_default=True, help="Seconds that the whole answer may take."
)
@connection_options()
def generate(prompt: str, connection: "Connection", timeout: float, json_schema: TextIO | None, **options: Any) -> None:
    """Continue PROMPT, and stream the text to standard output.

    PROMPT "-" reads it from standard input. Token counts, times and the request id go to standard error.
    """
    from services.cli.commands.talk import generate as run

    if options["beams"] is None and (given := search_options(options)):
        raise click.UsageError(f"{' and '.join(given)} {'needs' if len(given) == 1 else 'need'} --beams")
    if json_schema and options["regex"] is not None:
        raise click.UsageError("--json-schema and --regex cannot be given together")
    options["limit_given"] = options["max_tokens"] is not None
    if not options["limit_given"]:
        options["max_tokens"] = max(ANSWER_TOKENS, options["min_tokens"] or 0)
    options["json_schema"] = json_schema and read_text("--json-schema", json_schema)
    text = read_text("standard input", sys.stdin) if prompt == "-" else prompt
    sys.exit(asyncio.run(run(connection, text, timeout, options)))


@cli.command()
@address_option("gateway")
@click.option("--model", default="", help="Name of the model. Default: the only model.")
@click.option("--system", help="System message.")
@click.option(
    "--max-tokens",
    type=_TOKENS,
    default=512,
    show_default=True,
    help="Maximum number of tokens of one answer; 0: the model's, else as many as fit.",
)
@click.option(
    "--temperature", type=FiniteFloat(), help="Sampling temperature; 0 is greedy. Default: the model's, else 1."
)
@click.option("--timeout", type=SECONDS, default=300.0, show_default=True, help="Seconds that one answer may take.")
@connection_options()
def chat(connection: "Connection", timeout: float, **options: Any) -> None:
    """Chat with a model, line by line.

    Type a line, read the answer; an empty line or Ctrl-D ends.
    """
    from services.cli.commands.talk import chat as run

    sys.exit(asyncio.run(run(connection, timeout, options)))


@cli.command()
@click.argument("at", metavar="[ADDRESS]", required=False)
@address_option("gateway")
@click.option(
    "--service",
    default="quire.v1.Gateway",
    show_default=True,
    help='Name of the service, for readiness; "" is liveness of the process.',
)
@click.option("--timeout", type=SECONDS, default=5.0, show_default=True, help="Deadline of the call, in seconds.")
@connection_options(api_key=False)
def health(connection: "Connection", service: str, timeout: float) -> None:
    """Print the health status of a service.

    ADDRESS, or --address, is the address of any service. The exit status is 0 if the health status is SERVING.
    """
    from services.cli.commands.talk import health as run

    sys.exit(asyncio.run(run(connection, service, timeout)))


_admin_options = together(
    address_option("gateway"),
    click.option("--model", default="", help="Name of the model. Default: the only model."),
    click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="Deadline of the call, in seconds."),
    connection_options(),
)


def _administer(**request: Any) -> None:
    from services.cli.commands.pins import administer

    sys.exit(asyncio.run(administer(**request)))


@cli.command()
@click.argument("name")
@click.argument("text", required=False)
@click.option("--file", type=click.File(encoding="utf-8"), help="Read the text from this file.")
@click.option("--system", is_flag=True, help="Pin the text as a system message, through the chat template.")
@click.option("--salt", default="", help="Only requests with this salt share the prefix.")
@click.option(
    "--tenant", default="", help="Tenant whose requests share the prefix. Not needed if all tenants share prefixes."
)
@_admin_options
def pin(text: str | None, file: TextIO | None, system: bool, name: str, salt: str, tenant: str, **options: Any) -> None:
    """Pin the prefix TEXT as NAME.

    The prefix is computed now, and its blocks are never evicted. TEXT "-" reads it from standard input.
    """
    if (text is None) == (file is None):
        raise click.UsageError("give one of TEXT and --file" + (", not both" if file else ""))
    content = read_text("--file", file) if file else read_text("standard input", sys.stdin) if text == "-" else text
    prompt = {"chat": {"messages": [{"role": "system", "content": content}]}} if system else {"text": content}
    _administer(pin_prefix={"name": name, "salt": salt, "tenant": tenant, "prompt": prompt}, **options)


@cli.command()
@click.argument("name")
@_admin_options
def unpin(name: str, **options: Any) -> None:
    """Remove the pin NAME.

    Its blocks stay cached until they are evicted.
    """
    _administer(unpin_prefix={"name": name}, **options)


@cli.command()
@_admin_options
def pins(**options: Any) -> None:
    """List the pinned prefixes."""
    _administer(list_pinned={}, **options)


@cli.command()
@_admin_options
def reset_cache(**options: Any) -> None:
    """Empty the prefix cache; pinned prefixes are recomputed."""
    _administer(reset_prefix_cache={}, **options)


@cli.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
def forget(path: Path) -> None:
    """Erase the blocks that engines left at PATH.

    PATH is the --keep-blocks of engines that have ended: a file, or a folder of such files. The blocks contain what was
    computed from the prompts of all tenants. The memory of a running engine is refused. For that one, `quire
    reset-cache` withdraws the blocks, and its end erases them unless it has --keep-at-stop.
    """
    from services.cli.commands.pins import forget as run

    run(path)


@cli.command()
@click.argument("request_id")
@address_option("kvmanager")
@click.option("--timeout", type=SECONDS, default=10.0, show_default=True, help="Deadline of the call, in seconds.")
@connection_options("kvmanager", api_key=False)
def explain(request_id: str, connection: "Connection", timeout: float) -> None:
    """Explain what happened to a request's blocks, and why.

    REQUEST_ID is the id that the client gave, or the one in the answer: `quire generate` prints it, over HTTP it is the
    answer's id. With API keys the tenant comes first: TENANT/REQUEST_ID. The explanation covers the events that the
    KV manager's ledger still holds. If --address lists several KV managers, or is dns:NAME:PORT, all are asked.
    """
    from services.cli.commands.talk import explain as run

    sys.exit(asyncio.run(run(connection, request_id, timeout)))


@cli.command()
def instances() -> None:
    """List your running `quire serve` instances on this machine.

    Other commands call the first in the list, unless they have an --address or an --instance.
    """
    from services.cli.local.instances import running

    found = running()
    for one in found:
        count = f"{len(one.engines)} engine{'s' * (len(one.engines) != 1)}"
        click.echo(f"{one.name}: process {one.pid}, gateway at {one.gateway}, {count}, KV manager at {one.kvmanager}")
    if not found:
        click.echo("no `quire serve` of this user runs on this machine", err=True)


cli.add_command(key)


@cli.command()
@click.argument("name", default="demo")
def model(name: str) -> None:
    """Fetch a model, and print its folder.

    NAME is a value of --model: demo, a local folder, a .gguf file, or a hub id.
    """
    from services.cli.local_model import fetch
    from services.models.model_store import ModelUnavailable

    if not name:
        raise click.UsageError("NAME must not be empty")
    try:
        click.echo(fetch(name))
    except ModelUnavailable as error:
        raise click.ClickException(str(error)) from error


@cli.command()
@click.option("--results", type=click.Path(dir_okay=False), help="JSON file for the measured figures.")
@options_of(
    EngineSettings,
    leave_out=(*NOT_OF_SERVES_ENGINE, "model_name", "engine_id", "metrics_compat"),
    variables=engine_variables("demo"),
)
def demo(results: str | None, **values: Any) -> None:
    """Start all services, and show the block pool at work.

    Streams answers that share a long system prompt, and prints how many of its tokens were cached.
    """
    from services.cli.commands.demo import demo as run

    warn_of_unused_variables("engine", "serve")
    sys.exit(run(settings_from(EngineSettings, values), results))


def _range_of(name: str, least: int | None = None) -> click.IntRange:
    """Return the range of an engine's setting, perhaps with another lower end."""
    bounds = EngineSettings.__dataclass_fields__[name].metadata
    return click.IntRange(bounds["least"] if least is None else least, bounds["most"])


@cli.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--device-blocks",
    type=_range_of("device_blocks", 1),
    help="Blocks of the device tier. Default: the recorded amount of memory.",
)
@click.option("--block-size", type=_range_of("block_size"), help="Tokens of a block. Default: as recorded.")
@click.option("--host-blocks", type=_range_of("host_blocks"), help="Blocks of the host tier. Default: as recorded.")
@click.option(
    "--preemption",
    type=click.Choice(("recompute", "swap", "auto")),
    help="How requests are preempted. Default: as recorded.",
)
@click.option("--no-prefix-cache", is_flag=True, help="Disable the prefix cache.")
@click.option(
    "--token-budget",
    type=_range_of("token_budget", 1),
    help="Maximum number of tokens of one step. Default: as recorded.",
)
@click.option(
    "--max-sequences",
    type=_range_of("max_sequences", 1),
    help="Maximum number of running sequences. Default: as recorded.",
)
@click.option(
    "--admission-watermark",
    type=FiniteFloat(0, 0.5),
    help="Fraction of blocks that admission leaves free while other requests run. Default: as recorded.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--print", "as_text", is_flag=True, help="Print the record, one line for each entry, instead of running it."
)
def replay(file: str, as_json: bool, as_text: bool, **options: Any) -> None:
    """Replay or print a record.

    A record of operations (`--record-folder`) is applied to the KV manager's core again. If that gives other block ids,
    the exit status is 1. A record of requests (`--record-requests`) runs through the engine's scheduler and the KV
    manager's core without a model, with the pool and limits given here; it prints hit rate, preemptions and waste. With
    --print the record is printed and nothing runs.
    """
    from services.cli.commands.replay import Options, print_record
    from services.cli.commands.replay import replay as run

    sys.exit(print_record(file) if as_text else run(file, Options(**options), as_json))


for command in (run_batch, plan, certificates, bench, kv_events):
    cli.add_command(command)


if __name__ == "__main__":
    main()
