"""`quire replay` of records of an engine in this process, and of invalid files."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.run.record import RequestsRecord
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from quire.v1 import records_pb2
from services.cli.main import cli
from services.wire.records.requests import header_entry, request_entry
from simulation.runner import DigestRunner
from tests.engine_in_process import GREEDY, EngineInProcess, Sampling
from tests.services.wire.records.recorded import a_record, content, content_without_digests, end

SIZE, VOCABULARY = 4, 50


class RecordedEngine(EngineInProcess):
    """An engine with a fake runner, and a record of its requests."""

    def __init__(self, device_blocks: int, limits: Limits) -> None:
        capacity = Capacity(10_000, VOCABULARY, SIZE, device_blocks)
        super().__init__(DigestRunner(capacity), capacity, limits)
        self._record = RequestsRecord(self.scheduler, b"secret")
        self._arrivals: dict[str, int] = {}
        self.entries = [header_entry(self._record.settings, "engine")]

    def submit(self, *arguments: Any, **options: Any) -> str:
        request_id = super().submit(*arguments, **options)
        self._arrivals[request_id] = self.scheduler.totals.steps
        return request_id

    def turn(self) -> Any:
        known = set(self.finished)
        turn = super().turn()
        for request_id in self.finished.keys() - known:
            steps = self.scheduler.totals.steps
            ended = self._record.describe(self.finished[request_id], self._arrivals[request_id], steps)
            self.entries += map(request_entry, ended)
        return turn

    def run_steps(self, number: int) -> None:
        """Run `number` more steps, or until no request is live. Steps are the clock of a record."""
        until = self.scheduler.totals.steps + number
        while self.scheduler.totals.steps < until and not self.scheduler.empty:
            self.turn()

    def save(self, folder: Path) -> Path:
        path = folder / "requests.quire"
        path.write_bytes(content([*self.entries, end("the engine stopped")]))
        return path


def busy_engine(seed: int, device_blocks: int = 16, watermark: float = 0.0) -> RecordedEngine:
    """An engine after random requests with common prefixes, in a pool that is too small for all."""
    draw = random.Random(seed)
    engine = RecordedEngine(device_blocks, Limits(token_budget=16, max_sequences=6, admission_watermark=watermark))
    openings = [[draw.randrange(1, VOCABULARY) for _ in range(draw.randint(4, 20))] for _ in range(3)]
    for _ in range(30):
        prompt = draw.choice(openings) + [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 9))]
        sampling = Sampling(seed=draw.randrange(100)) if draw.random() < 0.5 else GREEDY
        engine.submit(prompt, draw.randint(1, 20), sampling=sampling, priority=draw.randint(0, 1), stop=[7])
        engine.run_steps(draw.choice((0, 0, 1, 2, 5, 30)))
    engine.run()
    return engine


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)])


def figures(*arguments: object) -> dict[str, Any]:
    result = replay(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_with_the_recorded_settings_gives_the_recorded_figures(seed: int, tmp_path: Path) -> None:
    engine = busy_engine(seed, watermark=0.2 * (seed % 2))
    totals, pool = engine.scheduler.totals, engine.blocks.session.totals
    replayed = figures(engine.save(tmp_path))
    assert replayed["hit_tokens"] == totals.cached_tokens > 0
    assert replayed["prompt_tokens"] == totals.prompt_tokens
    assert replayed["output_tokens"] == totals.generated_tokens
    assert replayed["preemptions"] == totals.preemptions
    assert replayed["recomputed_tokens"] == totals.recomputed_tokens
    assert replayed["peak_held_blocks"] == pool.peak_held_blocks
    assert replayed["steps"] == totals.steps
    assert replayed["requests"] == len(engine.finished)
    assert 0 < replayed["waste"] < 1
    assert replayed["completion_steps_p50"] <= replayed["completion_steps_p99"] <= replayed["steps"]


def test_requests_can_be_run_with_other_settings(tmp_path: Path) -> None:
    engine = busy_engine(1)
    path = engine.save(tmp_path)
    same = figures(path)
    roomy = figures(path, "--device-blocks", 1000)
    assert same["preemptions"] > 0 == roomy["preemptions"] == roomy["recomputed_tokens"]
    alone = figures(path, "--no-prefix-cache")
    assert alone["hit_tokens"] == 0 < same["hit_tokens"]
    assert alone["output_tokens"] == same["output_tokens"]
    coarse = figures(path, "--block-size", 2 * SIZE, "--device-blocks", 1000)
    assert coarse["settings"]["block_size"] == 2 * SIZE
    assert 0 < coarse["hit_tokens"] <= roomy["hit_tokens"]
    assert coarse["waste"] > roomy["waste"]
    fine = figures(path, "--block-size", 1)
    assert fine["settings"]["device_blocks"] == 16 * SIZE
    with_host = figures(path, "--host-blocks", 100)
    assert with_host["hit_tokens"] >= same["hit_tokens"]
    one_by_one = figures(path, "--max-sequences", 1, "--token-budget", 8)
    assert one_by_one["steps"] > same["steps"]
    cautious = figures(path, "--admission-watermark", 0.5)
    assert cautious["preemptions"] < same["preemptions"]
    tiny = figures(path, "--device-blocks", 6)
    assert tiny["refused"] > 0
    assert tiny["refused"] + tiny["requests"] == same["requests"]


def test_without_preemption_a_finer_block_size_keeps_the_hits_of_recorded_blocks(tmp_path: Path) -> None:
    engine = busy_engine(2, device_blocks=500)
    path = engine.save(tmp_path)
    assert figures(path, "--block-size", SIZE // 2)["hit_tokens"] == figures(path)["hit_tokens"]


def test_the_figures_are_shown_as_a_table(tmp_path: Path) -> None:
    shown = replay(busy_engine(1).save(tmp_path)).stdout
    for row in ("requests", "prompt tokens", "hit rate", "preemptions", "granted slots that held no token", "median"):
        assert row in shown
    assert "16 blocks of 4 tokens" in shown


@pytest.mark.parametrize("seed", range(6))
def test_a_request_with_several_samples_is_one(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    engine = RecordedEngine(40, Limits(token_budget=32, max_sequences=12))
    for _ in range(20):
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(3, 20))]
        sampling = Sampling(temperature=1.0, seed=draw.randrange(100))
        engine.submit(prompt, draw.randint(1, 12), sampling=sampling, samples=((),) * draw.randint(1, 4), stop=[7])
        engine.run_steps(draw.choice((0, 1, 3)))
    engine.run()
    totals, pool = engine.scheduler.totals, engine.blocks.session.totals
    replayed = figures(path := engine.save(tmp_path))
    assert len(engine.entries) - 1 > len(engine.finished) == replayed["requests"] == 20
    assert replayed["prompt_tokens"] == totals.prompt_tokens
    assert replayed["output_tokens"] == totals.generated_tokens
    assert replayed["steps"] == totals.steps
    assert replayed["peak_held_blocks"] == pool.peak_held_blocks
    path.write_bytes(content_without_digests([*engine.entries, end()]))
    assert figures(path)["requests"] == len(engine.entries) - 1  # version 2 does not say which belong together


def test_a_request_without_a_token_is_left_out(tmp_path: Path) -> None:
    engine = RecordedEngine(24, Limits(16, 4))
    engine.submit([1, 2, 3], 5)
    cancelled = engine.submit([1, 2, 3], 5)
    engine.scheduler.requests.cancel(cancelled)
    engine.run()
    replayed = figures(engine.save(tmp_path))
    assert (replayed["requests"], replayed["left_out"]) == (1, 1)


def test_preemption_by_swapping_recomputes_no_token(tmp_path: Path) -> None:
    path = busy_engine(1).save(tmp_path)
    recomputed = figures(path, "--preemption", "recompute")
    swapped = figures(path, "--preemption", "swap", "--host-blocks", "64")
    assert recomputed["recomputed_tokens"] > 0 == recomputed["swapped_tokens"]
    assert swapped["swapped_tokens"] > 0 == swapped["recomputed_tokens"]
    without_host_blocks = figures(path, "--preemption", "swap")
    assert without_host_blocks | {"settings": None} == recomputed | {"settings": None}


def test_limits_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    refused = replay(busy_engine(1).save(tmp_path), "--token-budget", 2)
    assert refused.exit_code == 2
    assert "token_budget must be at least max_sequences (6), not 2" in refused.stderr
    for option, value, range_ in (
        ("--block-size", 99999999, "1<=x<=4096"),
        ("--admission-watermark", "nan", "at most 0.5"),
    ):
        refused = replay(tmp_path / "requests.quire", option, value)
        assert (refused.exit_code, f"'{option}': " in refused.stderr, range_ in refused.stderr) == (2, True, True)


# Operations


def saved(entries: list[records_pb2.RecordEntry], folder: Path) -> Path:
    path = folder / "operations.quire"
    path.write_bytes(content(entries))
    return path


def test_operations_with_the_same_checksum_are_reported_as_right(tmp_path: Path) -> None:
    path = saved(a_record(1, steps_before=5)[0], tmp_path)
    result = replay(path)
    assert result.exit_code == 0
    assert "The checksum is right: 25 steps" in result.stdout
    assert figures(path)["right"] is True


def test_a_mismatch_of_operations_is_reported_with_its_step_and_exit_status_1(tmp_path: Path) -> None:
    entries, _ = a_record(1)
    next(entry for entry in entries if entry.step.step.step == 110).step.step.allocates[0].group += 1
    path = saved(entries, tmp_path)
    result = replay(path)
    assert result.exit_code == 1
    assert "The replay differs after 10 steps: step 110 differs from the record" in result.stdout
    as_json = replay(path, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["parted_at"] == 110


def test_a_record_of_a_killed_writer_is_replayed_and_printed_up_to_its_end(tmp_path: Path) -> None:
    path = saved(a_record(1)[0], tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    result = replay(path)
    assert result.exit_code == 0
    assert "24 steps" in result.stdout
    assert "interrupted in entry" in result.stdout
    *_, last = replay(path, "--print").stdout.splitlines()
    assert last.startswith("The record ends: its writer was interrupted in entry ")


def test_options_of_the_other_kind_are_refused_by_name(tmp_path: Path) -> None:
    refused = replay(saved(a_record(1)[0], tmp_path), "--block-size", 8)
    assert refused.exit_code == 2
    assert "--block-size is for a record of requests" in refused.stderr


@pytest.mark.parametrize(
    ("options", "written", "reason"),
    [
        ((), b"", "not a record of Quire"),
        ((), b"nothing\n", "not a record of Quire"),
        ((), b'{"format":"quire-requests","version":1}\n', "it is a record of version 1 (JSON Lines)"),
        (("--print",), b'{"format":"quire-operations","version":1}\n', "it is a record of version 1 (JSON Lines)"),
        (
            (),
            content([records_pb2.RecordEntry(header=records_pb2.RecordHeader(format="other"))]),
            "its format is 'other'",
        ),
        ((), content(a_record(1)[0][:1]), "before the snapshot of the pool is complete"),
    ],
)
def test_a_file_that_is_no_record_is_reported_in_one_line(
    options: tuple[str, ...], written: bytes, reason: str, tmp_path: Path
) -> None:
    (path := tmp_path / "file").write_bytes(written)
    result = replay(path, *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


# Printing


@pytest.mark.parametrize("command", [("replay", "--print"), ("replay",), ("certificates", "create")], ids=" ".join)
def test_a_closed_output_is_not_reported_as_an_error_of_a_file(command: tuple[str, ...], tmp_path: Path) -> None:
    path = saved(a_record(1)[0], tmp_path) if command[0] == "replay" else tmp_path / "certificates"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "services.cli.main", *command, path],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_record_is_printed_by_line_with_tokens_as_counts(tmp_path: Path) -> None:
    entries, _ = a_record(1, steps_before=5)
    result = replay(saved(entries, tmp_path), "--print")
    assert result.exit_code == 0
    header, *others, last = result.stdout.splitlines()
    assert "format='quire-operations' version=3" in header
    assert len(others) + 2 == len(entries)
    assert [line.split()[:2] for line in others[-2:]] == [
        [str(len(entries) - 2), "step"],
        [str(len(entries) - 1), "step"],
    ]
    assert all(
        f"checksum={entry.checksum.hex()}" in line for entry, line in zip(entries[-3:-1], others[-2:], strict=True)
    )
    step = next(entry.step.step for entry in entries if len(entry.step.step.allocates) == 1)
    (line,) = [line for line in others if f"{{step={step.step} " in line]
    (allocate,) = step.allocates
    assert f"request_id='{allocate.request_id}'" in line
    assert f"token_ids=({len(allocate.token_ids)} in all)" in line
    assert last == "The record ends: the session ended."
