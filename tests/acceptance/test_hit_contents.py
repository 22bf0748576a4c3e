"""What hits of real traces find in blocks of each kind is what their tokens give, computed again.

The model has Gemma-3's layers, five with a window for each that sees all, and few of them. Blocks of a trace have
random tokens, equal ones for equal ids.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kvmanager
from bench.loads.memory import DATA_VARIABLE, DataMissing, data_file
from blocks import Step
from engine.attention.cache import CacheGeometry
from engine.kinds.layer_kinds import places_of
from engine.native.cpu_backend import CpuBackend
from engine.run.runner import ModelRunner
from tests.acceptance.conftest import Record
from tests.cache_contents import TOLERANCE
from tests.engine.decoding import logits
from tests.engine.families import GROUPED, UNTIED, Family, write_checkpoint
from tests.engine.native_kernels import kernels
from tests.engine_in_process import ModelEngine, loaded_model

BLOCK = 16
# Two thousand conversations of the trace lie between two turns of one.
BLOCKS = 65_536
SEQUENCES = 512
CONTEXT = 16_384
CUT = 4096
WINDOW = 500
CHUNK = 512
ANSWER = 16
LIVE = 10  # requests at a time
SAMPLED = 500
GEMMA_3 = GROUPED | UNTIED | {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "sliding_window": WINDOW,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip


class Trace(NamedTuple):
    """A trace of prompts by the ids of their blocks of `size` tokens.

    Of hits of one block a share is checked, of longer ones all, up to `most`.
    """

    file: str
    ids: str
    size: int
    longest: int
    share: float = 1.0
    most: int = 10_000


SESSIONS = Trace("agent_sessions.jsonl", "block_ids", 16, CONTEXT - ANSWER)
MOONCAKE = Trace("mooncake_conversation.jsonl", "hash_ids", 512, CUT, 0.25, SAMPLED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    write_checkpoint(Family("gemma3_text", GEMMA_3), folder)
    return folder


def backend_of(geometry: CacheGeometry, blocks: int) -> CpuBackend:
    return CpuBackend(kernels(), geometry, BLOCK, blocks, threads=2)


class Recomputed:
    """Computes prefixes in one kind of blocks, and compares those that a hit has found. Equal beginnings stay."""

    def __init__(self, folder: Path) -> None:
        self._model = loaded_model(folder)
        self.backend = backend_of(self._model.geometry, CONTEXT // BLOCK)
        self._runner = ModelRunner(self._model, self.backend, BLOCK)
        self._tokens: tuple[int, ...] = ()

    def compute(self, tokens: tuple[int, ...]) -> None:
        equal = next(
            (place for place, pair in enumerate(zip(tokens, self._tokens, strict=False)) if pair[0] != pair[1]),
            min(len(tokens), len(self._tokens)),
        )
        for begin in range(equal // BLOCK * BLOCK, len(tokens), CHUNK):
            end = min(begin + CHUNK, len(tokens))
            logits(self._runner, (tokens[:end], begin, tuple(range(1, end // BLOCK + 1))))
        self._tokens = tokens

    def check(self, engine: "CheckedEngine", sequence: int, hit: int) -> int:
        """Compare the blocks of all layers that the first query behind a hit sees; return their number."""
        states = [kind.sequences[sequence] for kind in engine.blocks.pool.state.kinds]
        assert {one.committed_blocks for one in states} == {hit}
        count = 0
        for layer, (kind, index) in enumerate(places_of(engine.kinds)):
            first = states[kind].dropped
            assert first <= max(0, hit * BLOCK - engine.kinds[kind].tokens + 1) // BLOCK if kind else first == 0
            found = torch.tensor(states[kind].table[: hit - first])
            own = torch.arange(first + 1, hit + 1)
            for part in range(2):
                held = engine.backends[kind].layout.parts[index][part].of(engine.backends[kind].cache)[found]
                expected = self.backend.layout.parts[layer][part].of(self.backend.cache)[own]
                off = float((held - expected).abs().max() / expected.abs().max())
                assert off < TOLERANCE, f"layer {layer}, {'KV'[part]}: a block differs from its tokens by {off}"
            count += len(found)
        return count


class CheckedEngine(ModelEngine):
    """An engine that checks the blocks of hits when they are granted."""

    def __init__(self, folder: Path, trace: Trace) -> None:
        self.backends: dict[int, CpuBackend] = {}
        self._again = Recomputed(folder)
        self._draw = random.Random(1)
        self._trace = trace
        self.hits = self.checked = self.longer = self.checked_blocks = 0
        super().__init__(
            folder,
            block_size=BLOCK,
            device_blocks=BLOCKS,
            token_budget=CHUNK,
            max_sequences=SEQUENCES,
            observe=self._check_hits,
            kinds=True,
        )

    def make_backend(self, geometry: CacheGeometry, _size: int, device_blocks: int, _host_blocks: int) -> CpuBackend:
        backend = self.backends[len(self.backends)] = backend_of(geometry, device_blocks)
        return backend

    def _check_hits(self, step: Step, applied: kvmanager.AppliedStep) -> None:
        cached = {change.sequence: change.cached_tokens for change in applied.result.tables}
        for allocate in step.allocates:
            tokens = cached.get(allocate.sequence, 0)
            if not tokens:
                continue
            self.hits += 1
            chosen = tokens > self._trace.size or self._draw.random() < self._trace.share
            if not chosen or self.checked == self._trace.most:
                continue
            self._again.compute(tuple(allocate.token_ids[:tokens]))
            self.checked_blocks += self._again.check(self, allocate.sequence, tokens // BLOCK)
            self.checked += 1
            self.longer += tokens > self._trace.size


def prompts_of(trace: Trace) -> Iterator[list[int]]:
    """Yield the prompts of a trace, cut to its longest."""
    own = random.Random(2)
    for line in data_file(trace.file).read_text().splitlines():
        call: dict[str, Any] = json.loads(line)
        length = min(call["input_length"], trace.longest)
        tokens: list[int] = []
        for one in call[trace.ids][: -(-length // trace.size)]:
            draw = random.Random(one)
            tokens += [draw.randrange(3, 380) for _ in range(trace.size)]
        yield [*tokens[:length], *(own.randrange(3, 380) for _ in range(length - len(tokens)))]


@pytest.mark.parametrize("trace", [SESSIONS, MOONCAKE], ids=lambda trace: trace.file.split("_")[0])
def test_the_blocks_of_hits_are_those_of_their_tokens(folder: Path, trace: Trace, record: Record) -> None:
    try:
        prompts = prompts_of(trace)
        engine = CheckedEngine(folder, trace)
        for prompt in prompts:
            engine.turn_until(lambda: engine.scheduler.waiting + engine.scheduler.running < LIVE)
            engine.submit(prompt, ANSWER)
            if engine.checked == trace.most:
                break
        engine.run()
    except DataMissing:
        pytest.skip(f"{DATA_VARIABLE} names no folder")
    totals = engine.scheduler.totals
    record(
        hits=engine.hits,
        checked_hits=engine.checked,
        checked_hits_of_several_blocks=engine.longer,
        checked_blocks=engine.checked_blocks,
        cached_share=round(totals.cached_tokens / totals.prompt_tokens, 4),
    )
    assert engine.checked == (engine.hits if trace.share == 1 else trace.most)
    assert engine.longer > 80
