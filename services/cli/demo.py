"""`quire demo`: starts everything, streams a few answers that share a prefix, and shows what the block pool did."""

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire.v1 import decoding_pb2, gateway_pb2, kvmanager_pb2, kvmanager_pb2_grpc
from services import transport
from services.cli import client
from services.cli.supervisor import ServiceFailed, Supervisor
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.model_store import ModelUnavailable, default_cache, resolve
from services.stage_display import StageDisplay

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
    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    finished: gateway_pb2.Finished = field(default_factory=gateway_pb2.Finished)


async def demo(engine: EngineSettings, results: str | None) -> int:
    """Run the demonstration; return 0, or 1 after saying in one line what failed."""
    console = Console(highlight=False)
    begun = time.monotonic()
    try:
        with StageDisplay() as display:
            resolve(engine.model, default_cache(), display)
        with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
            gateway = GatewaySettings(listen=f"unix:{folder}/gateway.sock")
            lines: list[str] = []
            supervisor = Supervisor(engine, gateway, lambda label, line: lines.append(f"{label}: {line}"))
            try:
                await _start(supervisor, console)
                await _show(supervisor, console, begun, results)
            finally:
                await supervisor.stop()
    except (ModelUnavailable, ServiceFailed) as error:
        console.print(f"The demo cannot go on: {error}", style="red", markup=False)
        return 1
    except grpc.aio.AioRpcError as error:
        console.print(f"The demo cannot go on: {error.code().name}: {error.details()}", style="red", markup=False)
        return 1
    console.print("All three services have stopped.")
    return 0


async def _start(supervisor: Supervisor, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task("Starting KV manager, engine and gateway", total=None)
        await supervisor.start()


async def _show(supervisor: Supervisor, console: Console, begun: float, results: str | None) -> None:
    first_token_at: list[float] = []
    async with transport.channel(supervisor.address) as channel:
        console.print(f"[bold]{len(_TOGETHER)} requests together[/], all with the same long system prompt:")
        together = await _ask(channel, console, _TOGETHER, first_token_at)
        console.print(f"\n[bold]{len(_AFTER)} more, after them[/]: the system prompt is in the cache by now:")
        after = await _ask(channel, console, _AFTER, first_token_at)
    pool = await _pool(supervisor.kvmanager_address)
    figures = _figures([*together, *after], pool, min(first_token_at) - begun)
    console.print(_table(figures))
    if results:
        Path(results).write_text(json.dumps(figures, indent=2) + "\n")


async def _ask(
    channel: grpc.aio.Channel, console: Console, questions: tuple[str, ...], first_token_at: list[float]
) -> list[_Answer]:
    answers = [_Answer(question) for question in questions]
    if not console.is_interactive:
        await asyncio.gather(*(_stream(channel, answer, first_token_at) for answer in answers))
        for answer in answers:
            console.print(_paragraph(answer))
        return answers
    with Live(console=console, get_renderable=lambda: Group(*map(_paragraph, answers)), refresh_per_second=12):
        await asyncio.gather(*(_stream(channel, answer, first_token_at) for answer in answers))
    return answers


async def _stream(channel: grpc.aio.Channel, answer: _Answer, first_token_at: list[float]) -> None:
    async for response in client.generate(channel, _request(answer.question), _ANSWER_SECONDS):
        match response.WhichOneof("event"):
            case "started":
                answer.started = response.started
            case "delta":
                first_token_at.append(time.monotonic())
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
        counts = f"  {answer.started.prompt_tokens} prompt tokens, {answer.started.cached_tokens} from the cache"
        paragraph.append(counts, style="dim")
    paragraph.append(f"\n{answer.text}", style="not bold default")
    return paragraph


async def _pool(address: str) -> kvmanager_pb2.PoolInfo:
    """Return the pool once the last answers' blocks are given back, which is a moment after the clients have them."""
    async with transport.channel(address) as channel:
        stub = kvmanager_pb2_grpc.KVManagerStub(channel)
        for _ in range(_SETTLE_TRIES):
            pool = (await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=5)).pool
            if not pool.sequences:
                break
            await asyncio.sleep(_SETTLE_SECONDS)
        return pool


def _figures(answers: list[_Answer], pool: kvmanager_pb2.PoolInfo, start_seconds: float) -> dict[str, float]:
    """Return the figures that are shown, by their name."""
    timings = [answer.finished.timing for answer in answers]
    first = [timing.time_to_first_token.ToTimedelta().total_seconds() for timing in timings]
    rates = [
        (answer.finished.usage.generated_tokens - 1) / answer.finished.timing.decode.ToTimedelta().total_seconds()
        for answer in answers
    ]
    return {
        "blocks in the pool": pool.device_blocks,
        "tokens in a block": pool.block_size,
        "blocks held at the peak": pool.totals.peak_held_blocks,
        "blocks saved by sharing at the peak": pool.totals.peak_saved_blocks,
        "blocks cached now": pool.device.cached,
        "blocks held now": pool.device.held,
        "prompt tokens": pool.totals.prefix_query_tokens,
        "prompt tokens found in the prefix cache": pool.totals.prefix_hit_tokens,
        "preemptions": pool.totals.preemptions,
        "time to first token, median (s)": round(median(first), 3),
        "tokens per second of one stream, median": round(median(rates), 1),
        "from the command to the first token (s)": round(start_seconds, 2),
    }


def _table(figures: dict[str, float]) -> Table:
    table = Table("What the block pool did", "", title_justify="left")
    table.columns[1].justify = "right"
    for name, value in figures.items():
        table.add_row(name, f"{value:,}")
    return table
