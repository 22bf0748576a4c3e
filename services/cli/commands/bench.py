"""`quire bench`: measures servers from outside, Quire's own and others."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.connection import address_option, connection_options
from services.cli.options import FiniteFloat, together
from services.runtime.addresses import check_url
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.cli.connection import Connection

_DEFAULT_REQUESTS = 100
_DEFAULT_CONCURRENCY = 8
_AT_LEAST_1 = click.IntRange(min=1)
_ABOVE_0 = FiniteFloat(above=0)
_FILE = click.Path(dir_okay=False, path_type=Path)

_SELECTION = ("mean_input", "mean_output", "cap_input", "cap_output", "max_input", "max_output")

Values = dict[str, Any]


class _Rates(click.ParamType[list[float]]):
    name = "RATE,RATE,..."

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            rates = [float(text) for text in value.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 < rate < math.inf for rate in rates):
            self.fail(f"must be rates above 0, such as 1,2,4,8, not {value!r}", parameter, context)
        return rates


class _Rate(FiniteFloat):
    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        return math.inf if value == "inf" else super().convert(value, parameter, context)


_target_options = together(
    address_option("gateway"),
    click.option("--url", help="URL of an OpenAI-compatible server, such as http://127.0.0.1:8000, instead of gRPC."),
    click.option(
        "--endpoint",
        type=click.Choice(("completions", "chat")),
        default="completions",
        show_default=True,
        help="With --url: completions get prompts of token ids, chats get about one word for each token.",
    ),
    click.option("--model", default="", help="Name of the model. Empty: the only one, or the first."),
    click.option(
        "--vocabulary",
        type=click.IntRange(min=8),
        help="Upper bound of prompt token ids. Default: the server's vocabulary, or 32000.",
    ),
    click.option("--extra-body", default="{}", help="With --url: JSON object whose fields are added to each request."),
    click.option(
        "--temperature", type=FiniteFloat(), default=0.0, show_default=True, help="Sampling temperature; 0 is greedy."
    ),
    click.option("--stop-at-eos", is_flag=True, help="Let answers end before their requested length."),
    click.option("--timeout", type=_ABOVE_0, default=600.0, show_default=True, help="Seconds for one request."),
)

_workload_options = together(
    click.option(
        "--input",
        "input_",
        metavar="LENGTHS",
        help="Tokens of prompts: 128, 64-256 (uniform), or lognormal:MEAN:SIGMA. [default: 128]",
    ),
    click.option("--output", metavar="LENGTHS", help="Tokens of answers, in the same way. [default: 64]"),
    click.option(
        "--prefix-tokens",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Tokens of a prefix that prompts share, in front of --input.",
    ),
    click.option(
        "--prefixes",
        type=_AT_LEAST_1,
        default=1,
        show_default=True,
        help="Number of different prefixes; each prompt has one of them.",
    ),
    click.option(
        "--file",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Take lengths from a CSV file instead, or a trace with shared blocks from a JSON Lines file.",
    ),
    click.option("--limit", type=_AT_LEAST_1, help="Number of rows to take from the file."),
    click.option("--mean-input", type=_ABOVE_0, help="Scale the file's prompts to this mean."),
    click.option("--mean-output", type=_ABOVE_0, help="Scale the file's answers to this mean."),
    click.option("--cap-input", type=_AT_LEAST_1, help="Cut longer prompts to this number of tokens."),
    click.option("--cap-output", type=_AT_LEAST_1, help="Cut longer answers to this number of tokens."),
    click.option("--max-input", type=_AT_LEAST_1, help="Skip rows with longer prompts."),
    click.option("--max-output", type=_AT_LEAST_1, help="Skip rows with longer answers."),
    click.option(
        "--copies",
        type=_AT_LEAST_1,
        default=1,
        show_default=True,
        help="Repetitions of each session of the file, each with a different first block.",
    ),
)

_arrival_options = together(
    click.option(
        "--concurrency",
        type=_AT_LEAST_1,
        help=f"Alone: a closed loop with this many concurrent requests. [default: {_DEFAULT_CONCURRENCY}] With "
        "arrivals: maximum of concurrent requests.",
    ),
    click.option("--rate", type=_Rate(above=0), help="Poisson arrivals with this rate per second; inf: all at once."),
    click.option(
        "--burstiness",
        type=_ABOVE_0,
        default=1.0,
        show_default=True,
        help="With a rate: shape of the gamma distribution between arrivals; below 1 arrivals are bursty.",
    ),
    click.option("--sweep-rate", type=_Rates(), help="Run several rates, one after the other, and compare them."),
    click.option("--trace-times", is_flag=True, help="Start requests at the times of the file."),
    click.option(
        "--speedup", type=_ABOVE_0, default=1.0, show_default=True, help="Factor by which the file's times pass faster."
    ),
    click.option(
        "--requests",
        type=_AT_LEAST_1,
        help=f"Number of counted requests. [default: those of the file, or {_DEFAULT_REQUESTS}]",
    ),
    click.option(
        "--duration", type=_ABOVE_0, help="Send for this many seconds instead, then wait for running requests."
    ),
    click.option(
        "--warmup",
        type=FiniteFloat(least=0),
        default=0.0,
        show_default=True,
        help="Requests that are sent before the counted ones; with --duration, seconds.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of lengths and arrivals."
    ),
    click.option(
        "--prompt-seed",
        type=click.IntRange(min=0),
        help="Seed of the prompts' tokens. Default: random, so that no run hits an earlier run's prompts in the cache.",
    ),
    click.option("--processes", type=_AT_LEAST_1, default=1, show_default=True, help="Processes that share the load."),
)

_result_options = together(
    click.option("--slo-ttft", type=_ABOVE_0, help="Goodput: maximum seconds to the first token."),
    click.option("--slo-itl", type=_ABOVE_0, help="Goodput: maximum seconds between any two tokens."),
    click.option("--slo-tpot", type=_ABOVE_0, help="Goodput: maximum average seconds between tokens."),
    click.option("--slo-e2e", type=_ABOVE_0, help="Goodput: maximum seconds to the last token."),
    click.option("--json", "json_file", type=_FILE, help="Write all figures to this file."),
    click.option("--records", type=_FILE, help="Write a line of JSON for each request to this file."),
    click.option("--plot", type=_FILE, help="Draw the figures to this file: .png, .svg or .pdf. Needs matplotlib."),
)


@click.group()
def bench() -> None:
    """Measure servers from outside."""


@bench.command()
@_target_options
@connection_options()
@_workload_options
@_arrival_options
@_result_options
def serve(connection: "Connection", **values: Any) -> None:
    """Put a server under load, and report throughput and latencies.

    By default 100 requests of 128 random tokens in and 64 out, eight at a time, to the gateway on this machine. The
    exit status is 1 if no request was completed, and 130 after Ctrl-C, which ends a run early.
    """
    from services.cli.commands.bench_run import run

    values["address"] = connection.address
    if not _arrivals_given(values):
        values["concurrency"] = values["concurrency"] or _DEFAULT_CONCURRENCY
    if not (values["requests"] or values["duration"] or values["file"]):
        values["requests"] = _DEFAULT_REQUESTS
    _check(values)
    sys.exit(run(connection, values))


def _arrivals_given(values: Values) -> list[str]:
    return [name for name in ("rate", "sweep_rate", "trace_times") if values[name]]


def _check(values: Values) -> None:
    """Check combinations of options. Raises click.UsageError."""
    given = _arrivals_given(values)
    if len(given) > 1:
        raise click.UsageError("--rate, --sweep-rate and --trace-times cannot be given together")
    if values["address"] and values["url"]:
        raise click.UsageError("--address and --url cannot be given together")
    if values["requests"] and values["duration"]:
        raise click.UsageError("--requests and --duration cannot be given together")
    if values["file"] and (values["input_"] or values["output"] or values["prefix_tokens"]):
        raise click.UsageError("--file has its own lengths: it excludes --input, --output and --prefix-tokens")
    if not values["file"] and any(values[name] for name in ("limit", *_SELECTION)):
        raise click.UsageError("--limit, --mean-, --cap- and --max-input and -output are for a --file")
    if not given and values["concurrency"] < values["processes"]:
        raise click.UsageError("--processes cannot be more than --concurrency")
    _check_target_and_files(values)


def _check_target_and_files(values: Values) -> None:
    """Check before the run what would fail in it or after it."""
    for option, name in (("--json", "json_file"), ("--records", "records"), ("--plot", "plot")):
        if values[name] and not values[name].parent.is_dir():
            raise click.UsageError(f"{option} must be in an existing folder, not {str(values[name])!r}")
    if values["url"] is not None:
        _check_url(values["url"])
        _need("aiohttp", "--url")
    if values["plot"]:
        if values["plot"].suffix not in (".png", ".svg", ".pdf"):
            raise click.UsageError(f"--plot must end with .png, .svg or .pdf, not {str(values['plot'])!r}")
        _need("matplotlib", "--plot")


def _check_url(url: str) -> None:
    try:
        check_url("--url", url)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error


def _need(package: str, option: str) -> None:
    if find_spec(package) is None:
        raise click.UsageError(f"{option} needs {package}: pip install 'quire[bench]'")
