"""The command `quire` and its subcommands. Heavy imports wait until a subcommand needs them."""

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

# What gRPC's C core logs is of no use to users of a command: calls and `bind` say what failed. It reads this when it is
# imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click

from services.cli.commands.bench import bench
from services.cli.commands.issue_certificates import certificates
from services.cli.commands.keys import key
from services.cli.commands.plan import plan
from services.cli.commands.services import NOT_OF_SERVES_ENGINE, engine, gateway, kvmanager, serve
from services.cli.connection import address_option, connection_options
from services.cli.options import options_of, settings_from, together
from services.engine.settings import EngineSettings

if TYPE_CHECKING:
    from services.cli.connection import Connection

# Of one answer, unless asked otherwise. Models that never end their answer fill the whole context.
ANSWER_TOKENS = 256
_AT_LEAST_1 = click.IntRange(min=1)


def main() -> None:
    """Run the command line; settings also come from the environment, such as QUIRE_ENGINE_BLOCK_SIZE."""
    cli.main(auto_envvar_prefix="QUIRE", prog_name="quire")


class _InOrderOfDefinition(click.Group):
    def list_commands(self, _context: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrderOfDefinition, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="quire", message="%(prog)s %(version)s")
def cli() -> None:
    """Quire serves large language models from paged memory.

    `quire serve` starts everything; `quire generate` and `quire chat` talk to it. The services can also be started
    one by one, on one machine or on several.

    Every option can also be set in the environment, under the name of its command: QUIRE_ENGINE_BLOCK_SIZE is the
    --block-size of `quire engine`, QUIRE_SERVE_BLOCK_SIZE that of `quire serve`.
    """


for command in (serve, kvmanager, engine, gateway):
    cli.add_command(command)


@cli.command()
@click.argument("prompt")
@address_option("gateway")
@click.option("--model", default="", help="Name of the model. Empty: the only one.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
    help=f"Tokens to generate at most; 0: as many as fit. Absent: {ANSWER_TOKENS}, or what fits if that is less.",
)
@click.option("--temperature", type=float, help="0 takes the most likely token. Absent: 1.")
@click.option("--top-k", type=int, help="Keep the k most likely tokens.")
@click.option("--top-p", type=float, help="Keep the most likely tokens up to this probability.")
@click.option("--min-p", type=float, help="Keep the tokens at least this fraction as likely as the most likely one.")
@click.option("--seed", type=int, help="Same seed, same answer.")
@click.option(
    "--beams", type=_AT_LEAST_1, help="Search with so many beams instead of sampling; the best answer is told."
)
@click.option("--length-penalty", type=float, help="With --beams: above 0 favours long answers. Absent: 1.")
@click.option("--early-stopping", is_flag=True, help="With --beams: take the first answers.")
@click.option("--repetition-penalty", type=float, help="Above 1: what was said, in prompt or answer, is less likely.")
@click.option("--presence-penalty", type=float, help="Above 0: what the answer has already is less likely.")
@click.option("--frequency-penalty", type=float, help="Above 0: the more often the answer has it, the less likely.")
@click.option("--min-tokens", type=int, help="Tokens to generate at least.")
@click.option("--stop", multiple=True, help="End where this text appears. Can be given several times.")
@click.option("--json-schema", type=click.File(encoding="utf-8"), help="Answer with JSON of the schema in this file.")
@click.option("--regex", help="Answer with a text that this regular expression matches as a whole.")
@click.option("--system", help="A system message; makes the prompt a chat.")
@click.option("--chat", "as_chat", is_flag=True, help="Give the prompt as a user's message, through the chat template.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds to wait for the whole answer.")
@connection_options()
def generate(prompt: str, connection: "Connection", timeout: float, json_schema: TextIO | None, **options: Any) -> None:
    """Continue PROMPT, and print the text as it comes.

    "-" as PROMPT reads it from standard input. What the answer took, and its id, goes to standard error.
    """
    from services.cli.commands.talk import generate as run

    if options["beams"] is None and (options["length_penalty"] is not None or options["early_stopping"]):
        raise click.UsageError("--length-penalty and --early-stopping are for a search: give --beams")
    if json_schema and options["regex"] is not None:
        raise click.UsageError("--json-schema and --regex cannot be given together")
    options["limit_given"] = options["max_tokens"] is not None
    if not options["limit_given"]:
        options["max_tokens"] = max(ANSWER_TOKENS, options["min_tokens"] or 0)
    options["json_schema"] = json_schema and json_schema.read()
    text = sys.stdin.read() if prompt == "-" else prompt
    sys.exit(asyncio.run(run(connection, text, timeout, options)))


@cli.command()
@address_option("gateway")
@click.option("--model", default="", help="Name of the model. Empty: the only one.")
@click.option("--system", help="A system message to begin with.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Tokens of one answer at most; 0: as many as fit.",
)
@click.option("--temperature", type=float, help="0 takes the most likely token. Absent: 1.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds to wait for one answer.")
@connection_options()
def chat(connection: "Connection", timeout: float, **options: Any) -> None:
    """Chat with a model, line by line.

    Type a line, read the answer; an empty line or Ctrl-D ends.
    """
    from services.cli.commands.talk import chat as run

    sys.exit(asyncio.run(run(connection, timeout, options)))


@cli.command()
@click.argument("address", required=False)
@click.option(
    "--service",
    default="quire.v1.Gateway",
    show_default=True,
    help='Name of the service; "" asks whether the process lives.',
)
@click.option("--timeout", default=5.0, show_default=True, help="Seconds to wait for the answer.")
@connection_options(api_key=False)
def health(connection: "Connection", service: str, timeout: float) -> None:
    """Say whether a service is ready.

    Asks at ADDRESS. Absent: the gateway of the newest `quire serve` here, else 127.0.0.1:50051. The exit status is 0
    when the answer is SERVING.
    """
    from services.cli.commands.talk import health as run

    sys.exit(asyncio.run(run(connection, service, timeout)))


_admin_options = together(
    address_option("gateway"),
    click.option("--model", default="", help="Name of the model. Empty: the only one."),
    click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait until it is done."),
    connection_options(),
)


def _administer(**request: Any) -> None:
    from services.cli.commands.pins import administer

    sys.exit(asyncio.run(administer(**request)))


@cli.command()
@click.argument("name")
@click.argument("text", required=False)
@click.option("--file", type=click.File(), help="Read the text from this file.")
@click.option("--system", is_flag=True, help="Give the text as a system message, through the chat template.")
@click.option("--salt", default="", help="Only requests of this salt share it.")
@click.option("--tenant", default="", help="Whose requests share it, where tenants do not share prefixes.")
@_admin_options
def pin(text: str | None, file: TextIO | None, system: bool, name: str, salt: str, tenant: str, **options: Any) -> None:
    """Pin the prefix TEXT as NAME.

    It is computed now, and its blocks stay whoever else needs space. "-" as TEXT reads it from standard input.
    """
    if (text is None) == (file is None):
        raise click.UsageError("give TEXT or --file")
    source = sys.stdin if text == "-" else file
    content = source.read() if source else text
    prompt = {"chat": {"messages": [{"role": "system", "content": content}]}} if system else {"text": content}
    _administer(pin_prefix={"name": name, "salt": salt, "tenant": tenant, "prompt": prompt}, **options)


@cli.command()
@click.argument("name")
@_admin_options
def unpin(name: str, **options: Any) -> None:
    """Remove the pin NAME.

    Its blocks stay cached until their space is needed.
    """
    _administer(unpin_prefix={"name": name}, **options)


@cli.command()
@_admin_options
def pins(**options: Any) -> None:
    """List what is pinned."""
    _administer(list_pinned={}, **options)


@cli.command()
@_admin_options
def reset_cache(**options: Any) -> None:
    """Forget the prefix cache; what is pinned is computed anew."""
    _administer(reset_prefix_cache={}, **options)


@cli.command()
@click.argument("request_id")
@address_option("kvmanager")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the answer.")
@connection_options("kvmanager", api_key=False)
def explain(request_id: str, connection: "Connection", timeout: float) -> None:
    """Tell what happened to a request's blocks, and why.

    REQUEST_ID is the one that the client gave, or that its answer names: `quire generate` prints it, over HTTP it is in
    the header x-request-id. Where API keys are asked for, the tenant comes before it: TENANT/REQUEST_ID. The KV manager
    keeps it for as long as its ledger reaches back.
    """
    from services.cli.commands.talk import explain as run

    sys.exit(asyncio.run(run(connection, request_id, timeout)))


@cli.command()
def instances() -> None:
    """List each `quire serve` of yours on this machine.

    Other commands call the one that comes first, unless they are given an --address or an --instance.
    """
    from services.cli.local.instances import running

    found = running()
    for one in found:
        count = f"{len(one.engines)} engine{'s' * (len(one.engines) != 1)}"
        click.echo(f"{one.name}: process {one.pid}, gateway at {one.gateway}, {count}, KV manager at {one.kvmanager}")
    if not found:
        click.echo("no `quire serve` of yours runs here", err=True)


cli.add_command(key)


@cli.command()
@click.argument("name", default="demo")
def model(name: str) -> None:
    """Fetch a model, and print its folder.

    NAME is as for --model: demo, a local folder, a .gguf file, or a hub id.
    """
    from services.cli.local_model import fetch
    from services.models.model_store import ModelUnavailable

    try:
        click.echo(fetch(name))
    except ModelUnavailable as error:
        raise click.ClickException(str(error)) from error


@cli.command()
@click.option("--results", type=click.Path(dir_okay=False), help="Also write the measured figures to this JSON file.")
@options_of(EngineSettings, leave_out=(*NOT_OF_SERVES_ENGINE, "model_name", "engine_id", "metrics_compat"))
def demo(results: str | None, **values: Any) -> None:
    """Start everything, and show what the block pool does.

    It streams a few answers that share a long system prompt, and counts how often that was found in the cache.
    """
    from services.cli.commands.demo import demo as run

    sys.exit(run(settings_from(EngineSettings, values), results))


@cli.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--device-blocks", type=_AT_LEAST_1, help="Blocks of the pool. Absent: as much memory as was recorded.")
@click.option("--block-size", type=_AT_LEAST_1, help="Tokens that one block holds. Absent: as recorded.")
@click.option("--host-blocks", type=click.IntRange(min=0), help="Blocks of the host tier. Absent: none.")
@click.option(
    "--preemption",
    type=click.Choice(("recompute", "swap", "auto")),
    help="How a request gives way to another. This version recomputes.",
)
@click.option("--no-prefix-cache", is_flag=True, help="Share no blocks between requests.")
@click.option("--token-budget", type=_AT_LEAST_1, help="Tokens fed in one step at most. Absent: as recorded.")
@click.option(
    "--max-sequences",
    type=_AT_LEAST_1,
    help="Sequences that hold blocks at the same time at most. Absent: as recorded.",
)
@click.option(
    "--admission-watermark",
    type=click.FloatRange(0, 0.5),
    help="Fraction of the blocks that a request leaves free when it begins while others run. Absent: as recorded.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--print", "as_text", is_flag=True, help="Run nothing, but print the record, a line for each entry.")
def replay(file: str, as_json: bool, as_text: bool, **options: Any) -> None:
    """Run a record again.

    A record of operations is applied to the KV manager's core once more, and must come to the same block ids; the exit
    status is 1 where it does not. A record of requests is run through the engine's scheduler and the KV manager's core,
    with the pool and the limits given here, without a model: what would have come of it.
    """
    from services.cli.commands.replay import Options, print_record
    from services.cli.commands.replay import replay as run

    sys.exit(print_record(file) if as_text else run(file, Options(**options), as_json))


for command in (plan, certificates, bench):
    cli.add_command(command)


if __name__ == "__main__":
    main()
