"""`quire demo`: starts all services, streams answers that share a prefix, and shows the block pool's work."""

import asyncio
import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from blocks import counted
from quire.v1 import decoding_pb2, gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from services.cli.local.settings import LocalSettings
from services.cli.local.supervisor import ServiceFailed, Supervisor, metrics_addresses
from services.cli.local_model import engine_with_folder
from services.cli.model_line import model_line
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.models.model_store import ModelUnavailable
from services.runtime import transport

_ANSWER_SECONDS = 300.0
_MAX_TOKENS = 48
_SETTLE_TRIES, _SETTLE_SECONDS = 20, 0.1

_SYSTEM = " ".join(
    (
        "You are the librarian of a small town. People come to your desk with all kinds of questions, and you answer",
        "them in two or three short sentences, kindly and plainly, as one would across a wooden counter. You never",
        "lecture. When you know a book that helps, you name it. When you do not know, you say so, and you say where",
        "one could look. You like examples from daily life: bread, bicycles, gardens, weather, letters. You do not",
        "use lists, headings or long words where short ones do. You remember that children come too, and that they",
        "deserve true answers. You do not talk about yourself unless you are asked. If a question has a number in it,",
        "you say how sure you are of it. If two answers are right, you give both. If a question is unclear, you",
        "answer the most likely meaning first, then ask. You close with nothing: no greeting, no wish, no signature.",
        "The library opens at nine and closes at six, on Saturdays at one, and it is closed on Sundays. Books can be",
        "kept for four weeks and renewed twice. Lost books are paid for at half their price. The reading room has",
        "twelve seats by the window, and the oldest book in the house is an atlas from 1771, which may be looked at",
        "on Fridays.",
    )
)

_TOGETHER = ("Why is the sky blue?", "How does bread rise?", "What is a black hole?")
_AFTER = ("When can I see the old atlas?", "Why is the sky blue?")


@dataclass
class _Answer:
    """One request on the screen."""

    question: str
    text: str = ""
    first_token_at: float = 0.0
    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    finished: gateway_pb2.Finished = field(default_factory=gateway_pb2.Finished)


def demo(engine: EngineSettings, results: str | None) -> int:
    """Run the demonstration; return 0, 1 after reporting a failure in one line, or 130 when interrupted."""
    if results and not Path(results).absolute().parent.is_dir():
        raise click.UsageError(f"--results must be a file in an existing folder, not {results!r}")
    console = Console(highlight=False)
    try:
        asyncio.run(_demonstrate(engine_with_folder(engine), console, results))
    except (ModelUnavailable, ServiceFailed) as error:
        console.print(f"The demo failed: {error}", style="red", markup=False)
        return 1
    except grpc.aio.AioRpcError as error:
        console.print(f"The demo failed: {error.code().name}: {error.details()}", style="red", markup=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("The demo was interrupted.")
        return 130
    console.print("All three services have stopped.")
    return 0


async def _demonstrate(engine: EngineSettings, console: Console, results: str | None) -> None:
    this = asyncio.current_task()
    assert this is not None, "a coroutine runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # or the services would outlive this
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        # Services are not restarted here: when the engine ends, so does the demo.
        gateway = GatewaySettings(listen=f"unix:{folder}/gateway.sock", http_listen="", failovers=0)
        kvmanager = KVManagerSettings(map_listen="")
        supervisor = Supervisor(kvmanager, engine, gateway, _silent, metrics_addresses(""), LocalSettings())
        try:
            await _start(supervisor, console)
            await _show(supervisor, console, results)
        finally:
            await supervisor.stop()


def _silent(_label: str, _line: str, _level: int = 0) -> None:
    """Discard a log line: ServiceFailed has the reason of a failed service."""


async def _start(supervisor: Supervisor, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task("Starting KV manager, engine and gateway", total=None)
        await supervisor.start()


async def _show(supervisor: Supervisor, console: Console, results: str | None) -> None:
    async with transport.channel(supervisor.address) as channel:
        console.print(await _described(channel), markup=False)
        console.print(f"[bold]{len(_TOGETHER)} requests together[/], all with the same long system prompt:")
        together = await _ask(channel, console, _TOGETHER)
        console.print(f"\n[bold]{len(_AFTER)} more, after them[/]: the system prompt is in the cache by now:")
        after = await _ask(channel, console, _AFTER)
    pool = await _pool(supervisor.kvmanager_address)
    figures = _figures([*together, *after], pool)
    console.print(_table(figures))
    if results:
        Path(results).write_text(json.dumps(figures, indent=2) + "\n")


async def _described(channel: grpc.aio.Channel) -> str:
    one = await gateway_pb2_grpc.GatewayStub(channel).GetModel(gateway_pb2.GetModelRequest())
    return model_line(one.model, one.dtype, one.weights, one.kv_dtypes, one.devices)


async def _ask(channel: grpc.aio.Channel, console: Console, questions: tuple[str, ...]) -> list[_Answer]:
    answers = [_Answer(question) for question in questions]
    if not console.is_interactive:
        await asyncio.gather(*(_stream(channel, answer) for answer in answers))
        for answer in answers:
            console.print(_paragraph(answer))
        return answers
    with Live(console=console, get_renderable=lambda: Group(*map(_paragraph, answers)), refresh_per_second=12):
        await asyncio.gather(*(_stream(channel, answer) for answer in answers))
    return answers


async def _stream(channel: grpc.aio.Channel, answer: _Answer) -> None:
    stub = gateway_pb2_grpc.GatewayStub(channel)
    async for response in stub.Generate(_request(answer.question), timeout=_ANSWER_SECONDS):
        match response.WhichOneof("event"):
            case "started":
                answer.started = response.started
            case "delta":
                answer.first_token_at = answer.first_token_at or time.time()
                answer.text += response.delta.text
            case "finished":
                answer.finished = response.finished


def _request(question: str) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(
        sampling=decoding_pb2.Sampling(temperature=0.0), stopping=decoding_pb2.Stopping(max_tokens=_MAX_TOKENS)
    )
    request.prompt.chat.messages.add(role="system", content=_SYSTEM)
    request.prompt.chat.messages.add(role="user", content=question)
    return request


def _paragraph(answer: _Answer) -> Text:
    paragraph = Text(f"\n{answer.question}", style="bold cyan")
    if answer.started.prompt_tokens:
        tokens = counted(answer.started.prompt_tokens, "prompt token")
        counts = f"  {tokens}, {answer.started.cached_tokens} from the cache"
        paragraph.append(counts, style="dim")
    paragraph.append(f"\n{answer.text}", style="not bold default")
    return paragraph


async def _pool(address: str) -> kvmanager_pb2.PoolInfo:
    """Return the pool once the blocks of the last answers are freed, shortly after the clients receive the ends."""
    async with transport.channel(address) as channel:
        stub = kvmanager_pb2_grpc.KVManagerStub(channel)
        for _ in range(_SETTLE_TRIES):
            pool = (await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=5)).pool
            if not pool.sequences:
                break
            await asyncio.sleep(_SETTLE_SECONDS)
        return pool


def _figures(answers: list[_Answer], pool: kvmanager_pb2.PoolInfo) -> dict[str, float]:
    ends = [answer.finished for answer in answers]
    rates = [(end.usage.generated_tokens - 1) / end.timing.decode.ToTimedelta().total_seconds() for end in ends]
    first_token_at = min(answer.first_token_at for answer in answers)
    return {
        "device_blocks": pool.device_blocks,
        "block_size": pool.block_size,
        "peak_held_blocks": pool.totals.peak_held_blocks,
        "peak_saved_blocks": pool.totals.peak_saved_blocks,
        "cached_blocks": pool.device.cached,
        "held_blocks": pool.device.held,
        "prompt_tokens": pool.totals.prefix_query_tokens,
        "prefix_hit_tokens": pool.totals.prefix_hit_tokens,
        "preemptions": pool.totals.preemptions,
        "time_to_first_token_seconds": round(
            median(end.timing.time_to_first_token.ToTimedelta().total_seconds() for end in ends), 3
        ),
        "stream_tokens_per_second": round(median(rates), 1),
        "first_token_seconds": round(first_token_at - _process_start(), 2),
        "first_token_at": first_token_at,
    }


_LABELS = {
    "device_blocks": "blocks in the pool",
    "block_size": "tokens in a block",
    "peak_held_blocks": "blocks used at the peak",
    "peak_saved_blocks": "blocks saved by sharing at the peak",
    "cached_blocks": "blocks cached now",
    "held_blocks": "blocks held now",
    "prompt_tokens": "prompt tokens",
    "prefix_hit_tokens": "prompt tokens found in the prefix cache",
    "preemptions": "preemptions",
    "time_to_first_token_seconds": "time to first token, median (s)",
    "stream_tokens_per_second": "tokens per second of one stream, median",
    "first_token_seconds": "from this command to its first token (s)",
}


def _table(figures: dict[str, float]) -> Table:
    table = Table("Work of the block pool", "")
    table.columns[1].justify = "right"
    for name, label in _LABELS.items():
        table.add_row(label, f"{figures[name]:,}")
    return table


def _process_start() -> float:
    """Return the start time of this process, in seconds since 1970: users wait for its imports too."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_seconds = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_seconds + ticks / int(os.sysconf("SC_CLK_TCK"))
