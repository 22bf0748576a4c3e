"""Blocks that outlive their engine: what a killed engine's successor finds, and what it refuses by name."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.loads.http_server import free_address
from quire.v1 import gateway_pb2, kvmanager_pb2
from tests.faults import wait_until
from tests.load import slow_request
from tests.running_quire import CALL_SECONDS, START_SECONDS, RunningQuire, RunningService, launch, start_quire
from tests.scrape import Scrape

PROMPT = list(range(5, 205))  # 12 whole blocks of 16, and 8 tokens
WHOLE = 192


def request(tokens: list[int] = PROMPT) -> gateway_pb2.GenerateRequest:
    made = gateway_pb2.GenerateRequest(sampling={"temperature": 0.0}, stopping={"max_tokens": 12})  # type: ignore[arg-type]
    made.prompt.token_ids.ids.extend(tokens)
    return made


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    pool = ("--device-blocks", "64", "--host-blocks", "32", "--dtype", "float32")
    one = start_quire("--model", str(tiny_model("llama")), *pool)
    yield one
    assert one.close() == 0


def kill_engine(served: RunningQuire) -> None:
    """Kill the engine with all that it holds, and wait for its successor."""
    seen = len(served.output.lines)
    psutil.Process(served.children()["engine"]).kill()
    served.output.wait_for("engine is ready", START_SECONDS, seen)
    served.output.wait_for("serves tiny-llama", START_SECONDS, seen)


def engine_metrics(served: RunningQuire) -> str:
    """Return the URL of the running engine's metrics: each process has another port."""
    return [line for line in served.output.lines if "engine shows its metrics at " in line][-1].split(" at ")[-1]


def test_a_successor_of_a_killed_engine_has_its_cached_blocks(served: RunningQuire) -> None:
    first = served.generate(request())
    assert first.started.cached_tokens == 0
    kill_engine(served)
    again = served.generate(request())
    assert again.started.cached_tokens == WHOLE
    assert again.token_ids == first.token_ids
    asked = kvmanager_pb2.ExplainRequest(request_id=again.started.request_id)
    explained = served.kvmanager.Explain(asked, timeout=CALL_SECONDS).summary
    assert f"{WHOLE} of its 200 tokens were cached, 12 blocks of them from before the engine's last start." in explained
    shown = served.kvmanager.GetBlockMap(kvmanager_pb2.GetBlockMapRequest(), timeout=CALL_SECONDS)
    adopted = Scrape.of(engine_metrics(served)).values("quire_kept_blocks_adopted", "tier")
    assert len(shown.outlived_blocks) == adopted["device"] >= 12


def test_blocks_outlive_engine_and_kv_manager_together(served: RunningQuire) -> None:
    first = served.generate(request([*PROMPT[:40], *PROMPT]))
    seen = len(served.output.lines)
    for name in ("kvmanager", "engine"):
        psutil.Process(served.children()[name]).kill()
    for line in ("kvmanager is ready", "engine is ready", "serves tiny-llama"):
        served.output.wait_for(line, START_SECONDS, seen)
    again = served.generate(request([*PROMPT[:40], *PROMPT]))
    assert again.started.cached_tokens == 224  # at least one token is computed
    assert again.token_ids == first.token_ids


def test_nothing_is_held_after_a_kill_under_load(served: RunningQuire) -> None:
    engine = served.children()["engine"]
    seen = len(served.output.lines)
    with ThreadPoolExecutor(6) as clients:
        answers = [clients.submit(served.generate, slow_request(f"{one} blocks of keys", 40)) for one in range(6)]
        wait_until(lambda: served.pool().sequences == 6, "all requests run")
        psutil.Process(engine).kill()
        assert all(len(answer.result().token_ids) == 40 for answer in answers)
    served.output.wait_for("engine is ready", START_SECONDS, seen)
    assert served.settled_pool().sequences == 0


# KV events.


Announced = dict[tuple[object, str | None], tuple[object, list[int]]]


def announced(address: str) -> Announced:
    """Return the hash and medium of each block in the snapshot of an engine, with its parent's hash and its tokens."""
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    from services.engine.events.zeromq.vllm_format import BlockStored, decode

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, CALL_SECONDS * 1000
        socket.connect(f"tcp://{address}")
        socket.send_multipart([b"", bytes(8), b"snapshot"])
        socket.recv_multipart()  # its description
        found: Announced = {}
        while (frames := socket.recv_multipart())[-1]:
            for event in decode(frames[-1]):
                if isinstance(event, BlockStored):
                    parents = [event.parent_block_hash, *event.block_hashes]
                    for at, (parent, block) in enumerate(pairwise(parents)):
                        tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                        found[block, event.medium] = parent, tokens
        return found


def chain(blocks: Announced) -> list[int]:
    """Return the tokens of the chain of PROMPT's blocks."""
    tokens: list[int] = []
    parent: object = None
    children = {(before, tuple(own)): block for (block, _), (before, own) in blocks.items()}
    for start in range(0, WHOLE, 16):
        own = tuple(PROMPT[start : start + 16])
        parent = children[parent, own]
        tokens += own
    return tokens


def test_a_successor_of_a_killed_engine_announces_the_blocks_that_it_adopted(
    tiny_model: Callable[[str], Path],
) -> None:
    replay = free_address()
    events = ("--kv-events-listen", free_address(), "--kv-events-replay-listen", replay)
    pool = ("--device-blocks", "64", "--host-blocks", "32", "--dtype", "float32")
    served = start_quire("--model", str(tiny_model("llama")), *pool, *events)
    served.generate(request())
    # The last block, with the first 8 tokens of the answer, is announced after the answer's end.
    wait_until(lambda: len(announced(replay)) == WHOLE // 16 + 1, "13 blocks are announced")
    before = announced(replay)
    assert chain(before) == PROMPT[:WHOLE]
    kill_engine(served)
    assert announced(replay) == before
    shown = Scrape.of(engine_metrics(served))
    assert sum(shown.values("quire_kept_blocks_adopted", "tier").values()) >= len(before)
    assert shown.value("quire_kept_blocks_unannounced") == 0
    assert served.generate(request()).started.cached_tokens == WHOLE
    assert served.close() == 0


# One engine without a supervisor.


class Keeping:
    """A KV manager, and engines that keep their blocks in one file."""

    def __init__(self, folder: Path, model: Path, service: Callable[..., RunningService]) -> None:
        self.path = Path(tempfile.mkdtemp(dir="/dev/shm")) / "kept"
        self._folder, self._model, self._service = folder, model, service
        service("kvmanager", "--listen", f"unix:{folder}/kvmanager.sock")

    def start(self, **settings: Any) -> RunningService:
        kept = ("--keep-at-stop",) if settings.pop("keep_at_stop", False) else ()
        given = {"model": self._model, "device_blocks": 32, "dtype": "float32", "engine_id": "e", **settings}
        options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        links = ("--listen", f"unix:{self._folder}/engine.sock", "--kvmanager", f"unix:{self._folder}/kvmanager.sock")
        engine = self._service("engine", *links, "--keep-blocks", str(self.path), *kept, *options)
        engine.output.wait_for("engine is ready", START_SECONDS)
        return engine


@pytest.fixture
def keeping(
    tmp_path: Path, tiny_model: Callable[[str], Path], service: Callable[..., RunningService]
) -> Iterator[Keeping]:
    keeping = Keeping(tmp_path, tiny_model("llama"), service)
    yield keeping
    shutil.rmtree(keeping.path.parent)


def test_an_engine_takes_what_a_killed_one_left_and_a_planned_end_erases_it_unless_it_is_to_be_kept(
    keeping: Keeping,
) -> None:
    keeping.start().kill()
    engine = keeping.start(keep_at_stop=True)
    assert any("have outlived their engine" in line for line in engine.output.lines)
    assert engine.close() == 0
    other = keeping.start(device_blocks=33)
    refusal = "the kept blocks differ in device_blocks: they are erased"
    assert any(refusal in line for line in other.output.lines)
    assert Scrape.of(other.metrics_url).values("quire_kept_memory_refused", "difference") == {"device_blocks": 1}
    assert other.close() == 0
    assert keeping.path.stat().st_blocks == 0


def test_a_second_engine_does_not_take_the_memory_of_a_live_one(keeping: Keeping, tmp_path: Path) -> None:
    keeping.start()
    links = ("--listen", f"unix:{tmp_path}/other.sock", "--kvmanager", f"unix:{tmp_path}/kvmanager.sock")
    other = launch("engine", *links, "--model", str(keeping._model), "--keep-blocks", str(keeping.path))
    output, _ = other.communicate(timeout=START_SECONDS)
    assert other.returncode == 1
    assert "which is used by another process" in output
