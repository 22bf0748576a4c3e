"""A run of `quire run-batch`: its files, its signals, and its report."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import click

from engine.errors import ModelUnsupported
from kvmanager import Ledger, UnknownRequest
from services.cli.batch.answers import AnswerFile, UnusableFile
from services.cli.batch.display import Bar, summary, write_results
from services.cli.batch.endpoints import Endpoint, Unreachable
from services.cli.batch.input_file import input_file
from services.cli.batch.plan import BatchPlan, InvalidBatch
from services.cli.batch.run import Totals, Window, run
from services.cli.batch.sources import OwnEngine, Source
from services.kvmanager import renderer
from services.models.model_store import ModelUnavailable
from services.runtime.settings import InvalidSetting

_INTERRUPTED = 130
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def execute(requests: Path, answers: Path, source: Source, results: str | None, explained: Sequence[str] = ()) -> int:
    """Answer a file of requests, and explain some; return the exit status."""
    try:
        with input_file(requests) as given, closing(AnswerFile(answers)) as file:
            plan, totals = BatchPlan.of(given.path, file, given.name, explained), Totals()
            file.begin()
            interrupted = plan.kept < plan.lines and _interrupted(plan, source, totals)
            for text in explanations(source.ledger, file, explained) if isinstance(source, OwnEngine) else ():
                click.echo(text)
            click.echo(summary(plan, totals, interrupted=interrupted), err=True)
            if results:
                write_results(results, plan, totals)
            if interrupted:
                return _INTERRUPTED
            return 1 if totals.failures + file.failures else 0
    except (UnusableFile, InvalidBatch, InvalidSetting, ModelUnavailable, ModelUnsupported, Unreachable) as error:
        click.echo(f"run-batch: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("run-batch: interrupted before the first request", err=True)
        return _INTERRUPTED


def _interrupted(plan: BatchPlan, source: Source, totals: Totals) -> bool:
    """Answer the open lines; return True if a signal has ended the run before."""
    try:
        source.prepare()
    except KeyboardInterrupt:
        return True
    return asyncio.run(_answer_all(plan, source, totals))


async def _answer_all(plan: BatchPlan, source: Source, totals: Totals) -> bool:
    async def work(endpoint: Endpoint, window: Window) -> None:
        with Bar(plan) as bar:
            await run(plan.open_lines(), endpoint, plan.answers, window, totals, bar)

    task = asyncio.ensure_future(source.serve(work))
    for number in _STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def explanations(ledger: Ledger, answers: AnswerFile, custom_ids: Sequence[str]) -> Iterator[str]:
    """Yield a text for each id: the explanation of its request, or of each of its prompts. The engine has stopped."""
    request_ids = answers.request_ids(custom_ids)
    for custom_id in custom_ids:
        if request_id := request_ids.get(custom_id):
            yield from (f"{custom_id}: {text}" for text in _texts(ledger, request_id))
        else:
            yield f"{custom_id}: no request of this batch has been generated for it"


def _texts(ledger: Ledger, request_id: str) -> Iterator[str]:
    try:
        yield renderer.summary(ledger.explain(request_id))
    except UnknownRequest as error:
        parts = [*_of_prompts(ledger, request_id)]
        yield from parts or [str(error)]


def _of_prompts(ledger: Ledger, request_id: str) -> Iterator[str]:
    """Yield the explanations of the prompts of a completion, whose requests are numbered."""
    number = 0
    try:
        while True:
            yield f"prompt {number}: {renderer.summary(ledger.explain(f'{request_id}-{number}'))}"
            number += 1
    except UnknownRequest:
        return
