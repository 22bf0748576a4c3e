"""The run of `quire bench serve`: builds a load from its options, runs it, and reports."""

import json
import secrets
import sys
from dataclasses import fields, replace
from typing import Any

import click
from rich.console import Console

from services.cli.connection import Connection
from services.loadgen.clients.target import Server, Target, Unreachable
from services.loadgen.processes import ProcessDied
from services.loadgen.report import report
from services.loadgen.report.display import Bar
from services.loadgen.report.plots import draw
from services.loadgen.report.report import Conditions
from services.loadgen.run import Run, completed_by, describe, measure
from services.loadgen.statistics import Objectives
from services.loadgen.workload.arrivals import Arrivals, ClosedLoop, Random, TraceTimes
from services.loadgen.workload.lengths import InvalidLengths, parse
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.rows import InvalidFile
from services.loadgen.workload.selection import InvalidSelection, Selection
from services.loadgen.workload.workloads import RandomLengths, Recorded, Workload

_SEED_BITS = 48

Values = dict[str, Any]


def run(connection: Connection, values: Values) -> int:
    """Measure a server and report; return the exit status. Raises click.UsageError and click.ClickException."""
    try:
        return _run(connection, values)
    except (InvalidFile, InvalidSelection) as error:
        raise click.UsageError(str(error)) from error
    except (Unreachable, ProcessDied) as error:
        raise click.ClickException(str(error)) from error


def _run(connection: Connection, values: Values) -> int:
    target = _target(connection, values)
    server = describe(target)
    target = completed_by(target, server)
    workload = _workload(values, server.context_tokens)
    loads = [_load(values, workload, rate) for rate in values["sweep_rate"] or [values["rate"]]]
    conditions, runs = _measured(values, target, server, loads)
    _report(values, conditions, runs)
    if any(run.interrupted for run in runs):
        return 130
    return 0 if any(run.summary.completed for run in runs) else 1


def _target(connection: Connection, values: Values) -> Target:
    try:
        extra_body = json.loads(values["extra_body"])
        json.dumps(extra_body, allow_nan=False)
    except ValueError:
        extra_body = None
    if not isinstance(extra_body, dict):
        raise click.UsageError(f"--extra-body must be a JSON object, not {values['extra_body']!r}")
    seed = values["prompt_seed"]
    return Target(
        kind=values["endpoint"] if values["url"] else "grpc",
        address=values["url"] or values["address"],
        model=values["model"],
        api_key=connection.api_key,
        tls=connection.tls.files if connection.tls else None,
        server_name=connection.tls.server_name if connection.tls else "",
        vocabulary_size=values["vocabulary"],
        prompt_seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        ignore_eos=not values["stop_at_eos"],
        temperature=values["temperature"],
        timeout_seconds=values["timeout"],
        extra_body=extra_body,
    )


def _workload(values: Values, context_tokens: int | None) -> Workload:
    if values["file"]:
        chosen = {field.name: values[field.name] for field in fields(Selection) if field.name in values}
        return Recorded(values["file"], Selection(**chosen, max_total=context_tokens), values["copies"])
    try:
        lengths = parse(values["input_"] or "128"), parse(values["output"] or "64")
    except InvalidLengths as error:
        raise click.UsageError(str(error)) from error
    return RandomLengths(*lengths, values["seed"], values["prefix_tokens"], values["prefixes"])


def _load(values: Values, workload: Workload, rate: float | None) -> Load:
    bounds = Bounds(values["requests"], values["duration"], values["warmup"])
    return Load(workload, _arrivals(values, workload, rate), bounds)


def _arrivals(values: Values, workload: Workload, rate: float | None) -> Arrivals:
    concurrency, speedup = values["concurrency"], values["speedup"]
    if values["trace_times"]:
        if not workload.has_times:
            raise click.UsageError("--trace-times needs a --file that has times")
        return TraceTimes(speedup, concurrency)
    if rate is not None:
        return Random(rate, values["burstiness"], values["seed"], concurrency, speedup=speedup)
    return ClosedLoop(concurrency)


def _measured(values: Values, target: Target, server: Server, loads: list[Load]) -> tuple[Conditions, list[Run]]:
    objectives = Objectives(*(values[f"slo_{name}"] for name in ("ttft", "itl", "tpot", "e2e")))
    conditions = Conditions(_command(target.api_key), values["seed"], target, server, loads[0])
    runs: list[Run] = []
    for number, load in enumerate(loads):
        # Runs of a sweep have different prompts: otherwise all but the first would hit the cache.
        own = replace(target, prompt_seed=target.prompt_seed + number)
        title = f"{load.arrivals.as_json().get('rate')}/s" if len(loads) > 1 else "quire bench serve"
        with Bar(title, load) as bar:
            runs.append(measure(own, load, values["processes"], objectives, bar))
        if runs[-1].interrupted:
            break
    return conditions, runs


def _report(values: Values, conditions: Conditions, runs: list[Run]) -> None:
    report.show(Console(highlight=False), conditions, runs)
    if values["json_file"]:
        report.write_json(values["json_file"], conditions, runs)
    if values["records"]:
        report.write_records(values["records"], runs)
    if values["plot"]:
        draw(values["plot"], f"{conditions.server.model} at {conditions.target.address}", runs)


def _command(key: str) -> list[str]:
    """Return the command line as it was given, without the key."""
    return ["quire", *(argument.replace(key, "***") if key else argument for argument in sys.argv[1:])]
