"""Families with windows in every way of serving and with every feature, each pair of these at least once.

In every cell the tokens are those of transformers' `generate`, except with K and V in 8 bits: there they are those of
the same model alone, whose layers keep everything. The checkpoints are those of `make models`.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from engine.schedule.limits import Preemption
from quire.v1 import gateway_pb2
from tests.acceptance.conftest import Record
from tests.engine_in_process import EightBitEngine, EngineInProcess, ModelEngine
from tests.faults import Streams, wait_until
from tests.load import slow_request
from tests.model_types.cases import case_named
from tests.model_types.checkpoints import write_checkpoint, write_served
from tests.model_types.judgement import BLOCK_SIZE, MAX_TOKENS, SMALL_POOL, random_prompts
from tests.model_types.sizes import CONTEXT
from tests.reference import near_ties
from tests.running_quire import START_SECONDS, RunningQuire, start_quire

FAMILIES = (
    "cohere2: windows in every other layer",
    "exaone4: windows in every other layer",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "llama4_text",
    "mimo_v2_flash",
    "ministral",
    "olmo3",
)
CHUNKED = ("llama4_text",)
WAYS = ("alone", "again", "together", "in chunks", "small pool")
FEATURES = ("four samples", "another engine", "swapped", "recomputed", "drafted", "in 8 bits", "killed")
IN_PROCESS = FEATURES[:-1]
FEW = 2  # near ties of a cell
BEFORE_THE_END = 9  # tokens of an answer when its engine is left

Answers = list[list[int]]


class Cell(NamedTuple):
    """A family, served in a way with a feature."""

    family: str
    way: str
    feature: str


def table() -> list[Cell]:
    """Return each family with each feature; the ways move by one from row to row and from column to column."""
    return [
        Cell(family, WAYS[(row + column) % len(WAYS)], feature)
        for (row, family), (column, feature) in product(enumerate(FAMILIES), enumerate(FEATURES))
    ]


def test_the_table_has_all_pairs() -> None:
    cells = table()
    assert {cell[:2] for cell in cells} == set(product(FAMILIES, WAYS))
    assert {cell[::2] for cell in cells} == set(product(FAMILIES, FEATURES))
    assert {cell[1:] for cell in cells} == set(product(WAYS, FEATURES))


# In one process


@cache
def _checkpoint(family: str, folder: Path) -> Path:
    write_checkpoint(case_named(family), folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("families")
    return lambda family: _checkpoint(family, base / str(FAMILIES.index(family)))


def engine_of(folder: Path, cell: Cell, kinds: bool = True) -> ModelEngine:
    """Return an engine with the settings of a cell."""
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "kinds": kinds}
    if cell.way == "in chunks":
        settings |= {"token_budget": 5, "max_sequences": 5}
    if cell.way == "small pool":
        pool = 2 * SMALL_POOL if cell.feature == "four samples" else SMALL_POOL
        settings |= {"device_blocks": pool, "token_budget": 16}
    if cell.feature in ("swapped", "recomputed"):
        settings["device_blocks"] = SMALL_POOL
    if cell.feature == "swapped":
        settings |= {"host_blocks": 128, "preemption": Preemption.SWAP}
    if cell.feature == "drafted":
        settings["proposed_tokens"] = 3
    return (EightBitEngine if cell.feature == "in 8 bits" else ModelEngine)(folder, **settings)


def prompts_of(cell: Cell) -> Answers:
    """Return three prompts; those of drafts leave room for answers that repeat themselves."""
    return [prompt[: CONTEXT - tokens_of(cell) - 2] for prompt in random_prompts()]


def tokens_of(cell: Cell) -> int:
    """Return the tokens of an answer."""
    return 4 * MAX_TOKENS if cell.feature == "drafted" else MAX_TOKENS


def submit(engine: EngineInProcess, cell: Cell, prompt: list[int]) -> str:
    return engine.submit(prompt, tokens_of(cell), samples=4 if cell.feature == "four samples" else 1)


def press(engine: EngineInProcess) -> None:
    """Let requests of higher priority grow into what a running one holds, once that decodes."""
    engine.turn_until(lambda: any(engine.tokens.values()))
    for number in range(2):
        engine.submit([13 + number, *range(20, 75)], 60, priority=-1)


def serve(engine: EngineInProcess, cell: Cell, prompts: Answers) -> list[Answers]:
    """Serve prompts in the way of a cell; return the samples of each."""
    rounds = [[prompt] for prompt in prompts] if cell.way in ("alone", "again") else [prompts]
    names: list[str] = []
    for one in rounds * 2 if cell.way == "again" else rounds:
        names += [submit(engine, cell, prompt) for prompt in one]
        if cell.feature in ("swapped", "recomputed"):
            press(engine)
        engine.run()
    return [engine.samples[name] for name in names]


def serve_on_two(folder: Path, cell: Cell, prompts: Answers) -> list[Answers]:
    """Leave an engine in the middle of its answers, and let another one continue them."""
    first, second = engine_of(folder, cell), engine_of(folder, cell)
    if cell.way == "again":
        serve(second, cell, prompts)
    names = [submit(first, cell, prompt) for prompt in prompts]
    first.turn_until(lambda: any(len(first.tokens[name]) >= BEFORE_THE_END for name in names))
    answers = []
    for prompt, name in zip(prompts, names, strict=True):
        begun = tuple(first.tokens[name])
        continued = second.submit(prompt, MAX_TOKENS, samples=(begun,))
        if cell.way in ("alone", "again"):
            second.run()
        answers.append((begun, continued))
    second.run()
    return [[[*begun, *second.tokens[continued]]] for begun, continued in answers]


def check_that_it_took_part(engine: ModelEngine, cell: Cell) -> None:
    """Check that the feature of a cell changed what the engine did."""
    totals = engine.scheduler.totals
    assert totals.preemptions or cell.feature not in ("swapped", "recomputed")
    assert bool(totals.swapped_tokens) == (cell.feature == "swapped")
    assert bool(totals.draft_tokens) == (cell.feature == "drafted")
    assert totals.cached_tokens or cell.way != "again"


@pytest.mark.parametrize("cell", [cell for cell in table() if cell.feature in IN_PROCESS], ids=" - ".join)
def test_the_tokens_are_those_of_transformers_or_of_the_model_alone(
    checkpoint: Callable[[str], Path], cell: Cell, record: Record
) -> None:
    folder, prompts = checkpoint(cell.family), prompts_of(cell)
    if cell.feature == "another engine":
        found = serve_on_two(folder, cell, prompts)
    else:
        engine = engine_of(folder, cell)
        assert len(engine.kinds) > 1
        found = serve(engine, cell, prompts)
        check_that_it_took_part(engine, cell)
    assert {len(samples) for samples in found} == {4 if cell.feature == "four samples" else 1}
    asked = prompts * (2 if cell.way == "again" and cell.feature != "another engine" else 1)
    if cell.feature == "in 8 bits":
        # Chunks need a kind of their own.
        alone = cell._replace(way="alone")
        assert found == serve(engine_of(folder, alone, kinds=cell.family in CHUNKED), alone, asked)
        return
    texts = [prompt for prompt, samples in zip(asked, found, strict=True) for _ in samples]
    ties = near_ties(folder, texts, [tokens for samples in found for tokens in samples], tokens_of(cell))
    record(near_ties=ties)
    assert ties <= FEW


# In processes


OPTIONS = {
    "alone": (),
    "again": (),
    "together": (),
    "in chunks": ("--token-budget", "8", "--max-sequences", "4"),
    "small pool": ("--device-blocks", str(SMALL_POOL), "--token-budget", "16"),
}
TOKENS = 40
SIZE = 4  # of a block


@pytest.fixture
def served(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path
) -> Iterator[tuple[Cell, Path, RunningQuire]]:
    cell: Cell = request.param
    folder = tmp_path / "model"
    write_served(case_named(cell.family), folder, tiny_model("llama"))
    pool = ("--block-size", str(SIZE), "--dtype", "float32", "--threads", "1", "--host-blocks", "0")
    sizes = () if cell.way == "small pool" else ("--device-blocks", "256")
    quire = start_quire("--model", str(folder), *pool, *sizes, *OPTIONS[cell.way], "--max-restarts", "100")
    yield cell, folder, quire
    assert quire.close() == 0


def requests(prompts: Answers) -> list[gateway_pb2.GenerateRequest]:
    made = [slow_request("", TOKENS) for _ in prompts]
    for request, prompt in zip(made, prompts, strict=True):
        request.prompt.token_ids.ids.extend(prompt)
    return made


def kill_engine(quire: RunningQuire) -> None:
    """Kill the engine, and wait for its successor."""
    seen = len(quire.output.lines)
    psutil.Process(quire.children()["engine"]).kill()
    for line in ("engine is ready", "serves "):
        quire.output.wait_for(line, START_SECONDS, seen)


def _decodes(streams: Streams) -> bool:
    return any(len(one.token_ids) >= 3 for one in streams.answers)


KILLED = [cell for cell in table() if cell.feature == "killed"]


@pytest.mark.parametrize("served", KILLED, ids=" - ".join, indirect=True)
def test_a_killed_engine_changes_no_token_and_its_successor_hits_what_it_had_computed(
    served: tuple[Cell, Path, RunningQuire], record: Record
) -> None:
    cell, folder, quire = served
    prompts = [prompt[: CONTEXT - TOKENS - 2] for prompt in random_prompts()]
    [kind] = quire.pool().kinds
    assert kind.kind.device_blocks > 0
    if cell.way == "again":
        assert Streams(quire.gateway, requests(prompts)).codes() == {}
    for group in [[prompt] for prompt in prompts] if cell.way in ("alone", "again") else [prompts]:
        streams = Streams(quire.gateway, requests(group))
        wait_until(partial(_decodes, streams), "a request decodes")
        kill_engine(quire)
        assert streams.codes() == {}
        answers = [list(one.token_ids) for one in streams.answers]
        assert near_ties(folder, group, answers, TOKENS) <= FEW
    # In a small pool the others may have evicted it.
    longest = prompts[-1]
    quire.generate(requests([longest])[0])
    kill_engine(quire)
    cached = quire.generate(requests([longest])[0]).started.cached_tokens
    record(cached_tokens=cached)
    assert cached == (len(longest) - 1) // SIZE * SIZE
    assert quire.settled_pool().sequences == 0
