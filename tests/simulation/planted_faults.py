"""Faults that the product once had, and others that an invariant is there for: the simulator shows that it finds them.

`python -m tests.simulation.planted_faults` plants each in a copy of the tree and simulates it until it is found.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.simulation.edit import Edit
from tests.simulation.planted_faults_of_checksums import OF_CHECKSUMS

ROOT = Path(__file__).parents[2]
PACKAGES = ("blocks", "kvmanager", "engine", "services", "simulation", "protos")
_GRACE_SECONDS = 120.0


PLANTED: dict[str, tuple[Edit, ...]] = {
    "the engine sleeps after a fork without children": (
        Edit(
            "engine/run/loop.py",
            "None if progressed else self._idle_reason())",
            "None if progressed else IdleReason.ANSWER)",
        ),
    ),
    "an older incarnation registers during a newer one's handshake": (
        Edit("kvmanager/manager.py", '_check_not_older(spec, attaching.spec, "attaching")', "pass"),
    ),
    "the lease ends during a handshake": (
        Edit(
            "services/kvmanager/leases.py",
            "if self._is_attaching(session):",
            "if False:",
        ),
    ),
    "a pool with more sequences than blocks is not adopted": (
        Edit(
            "kvmanager/adoption.py",
            "    if not blocks or report.prompt_tokens < 0:\n",
            "    if len(state.sequences) >= state.spec.blocks or report.prompt_tokens < 0:\n",
        ),
    ),
    "a commit of one block makes a withheld block findable": (
        Edit(
            "kvmanager/tier/key_index.py",
            "        if not (self._marks.marked_count and self._marks.by_block[block]) and (\n"
            "            self._shards[key[0]].setdefault(key, block) is not block\n"
            "        ):\n",
            "        if self._shards[key[0]].setdefault(key, block) is not block:\n",
        ),
    ),
    "a host block's key outlives a swap that did not happen": (
        Edit("services/engine/replica.py", "replace(step, swap_outs=(), swap_ins=(), ", "replace(step, "),
    ),
    "a copy of a block that no key leads to is findable": (
        Edit(
            "kvmanager/verbs/swapping.py",
            "        if not source.marks.is_indexable(block):\n            target.marks.unindex(moved)\n",
            "",
        ),
    ),
    "a sequence is freed twice": (
        Edit(
            "engine/schedule/pool/releases.py",
            "if sequence.table and not sequence.release_pending:",
            "if sequence.table:",
        ),
    ),
    "the source of a copy is granted before the copy has run": (
        Edit(
            "kvmanager/verbs/growth.py",
            "        state.release_after_step((source,))\n",
            "        state.device.release((source,))\n",
        ),
    ),
    "requests wait behind one that a withheld block ended": (
        Edit("engine/schedule/pool/admission.py", "refused is None or refused.group is not group", "refused is None"),
    ),
    "tokens do not clear the count of lost engines": (
        Edit(
            "services/gateway/fleet/lost_engines.py",
            "        self.engine_ids.clear()\n        self._runs_isolated = False",
            "        pass",
        ),
    ),
    "a request fails when its engine is lost": (
        Edit(
            "services/gateway/attempts.py",
            "        if reason is FailoverReason.LOST:\n",
            "        if reason is FailoverReason.LOST and self._fingerprint:\n"
            '            raise __import__("services.runtime.errors").runtime.errors.GenerationFailed("no luck")\n'
            "        if reason is FailoverReason.LOST:\n",
        ),
    ),
    "a failover before the first token does not wait": (
        Edit(
            "services/gateway/attempts.py",
            "if self._retry_until is None:",
            "if self._retry_until is None or not self._request.progress.started:",
        ),
    ),
    "a request that all engines refuse is placed in haste": (
        Edit("services/gateway/fleet/fleet.py", "if state != listed:", "if state:"),
    ),
    "a deadline is early": (
        Edit("services/gateway/deadlines.py", "else start + timeout, clock", "else start + timeout / 2, clock"),
    ),
    "a lease does not end": (
        Edit(
            "services/kvmanager/servicer.py",
            "return self._manager.is_live(session) and self._manager.is_attaching(session)",
            "return self._manager.is_live(session)",
        ),
    ),
    "a handshake waits for a silent engine": (
        Edit(
            "services/kvmanager/attach_handshake.py",
            "max(0.0, min(limits.silence, limits.wait - self._waited))",
            "36000.0",
        ),
    ),
    "a gateway keeps a silent link": (
        Edit(
            "services/gateway/fleet/engine_link.py",
            "async with asyncio.timeout(self._timeout_seconds):",
            "async with asyncio.timeout(None):",
        ),
    ),
    "an engine waits for ever to be attached": (
        Edit(
            "services/engine/block_client.py",
            "async with asyncio.timeout(_REGISTER_SECONDS):",
            "async with asyncio.timeout(None):",
        ),
    ),
    "a client that leaves does not cancel at the engine": (
        Edit(
            "services/gateway/generation.py",
            "self._attempts.release(None if self._finished else ",
            "self._attempts.release(None if True else ",
        ),
    ),
    "finish reasons, stop strings and counts are wrong": (
        Edit(
            "services/gateway/sample_output.py",
            "reason=decoding_pb2.FINISH_REASON_STOP, stop_string=self.stop",
            'reason=decoding_pb2.FINISH_REASON_LENGTH, stop_string="?"',
        ),
        Edit("services/gateway/generation.py", "generated_tokens=progress.generated_tokens,", "generated_tokens=7,"),
    ),
    "the last token of an answer is missing": (
        Edit(
            "services/gateway/generation.py",
            "return _delta_response(index, text, counted, tokens",
            "return _delta_response(index, text, counted if end is None else counted[:-1], tokens",
        ),
    ),
    "salts share blocks": (
        Edit(
            "kvmanager/pool_state.py",
            "return root_key(self.spec.model_fingerprint, salt, self.resets)",
            'return root_key(self.spec.model_fingerprint, b"", self.resets)',
        ),
        Edit(
            "kvmanager/adoption.py",
            "root_key(state.spec.model_fingerprint, report.salt, report.resets)",
            'root_key(state.spec.model_fingerprint, b"", report.resets)',
        ),
    ),
    "a reset changes nothing": (
        Edit(
            "kvmanager/verbs/pinning.py",
            "    yield from state.device.resetting_keys()\n    yield from state.host.resetting_keys()\n",
            "    yield from ()\n",
        ),
        Edit("kvmanager/pool_state.py", "salt, self.resets)", "salt, 0)"),
        Edit("kvmanager/adoption.py", "salt, report.resets)", "salt, 0)"),
    ),
    "an adopted sequence has the resets of its pool": (
        Edit("kvmanager/adoption.py", "report.salt, report.resets)", "report.salt, state.resets)"),
    ),
    "an engine does not withhold host blocks": (
        Edit(
            "services/engine/replica.py",
            "self.pool.withhold(one.withheld_blocks, one.host_withheld_blocks, kind)\n",
            "self.pool.withhold(one.withheld_blocks, (), kind)\n",
        ),
    ),
    "released blocks are granted before the copies of their Step have run": (
        Edit(
            "kvmanager/pool_state.py", "        self._device_releases += blocks", "        self.device.release(blocks)"
        ),
    ),
    "a block leaves the window while a query still sees it": (
        Edit(
            "engine/schedule/pool/pool_view.py",
            "        position = sequence.computed\n",
            "        position = sequence.computed + self.block_size\n",
        ),
    ),
    "a prefix is hit where a window kind lacks a block": (
        Edit(
            "kvmanager/verbs/boundaries.py",
            "            blocks, lacked = yield from _searching(window, hits, blocks)\n",
            "            shorter, lacked = yield from _searching(window, hits, blocks)\n"
            "            blocks = blocks if shorter else 0\n",
        ),
    ),
    "a block that left the window stays granted in the engine's view": (
        Edit(
            "engine/schedule/pool/window_view.py",
            "        self._release([block for block in table[:last] if block])\n",
            "",
        ),
    ),
    "a seal is not broken when its block is granted": (
        Edit("engine/kept/seal_writer.py", "            seals.open(one.opened)\n", ""),
    ),
    "the destination of a copy is sealed before the copy is made": (
        Edit(
            "engine/kept/seal_writer.py",
            "            pending.update(carried)\n",
            "            for block, sealing in carried.items():\n                seals.seal(block, sealing)\n",
        ),
    ),
    "the destination of a copy keeps its seal": (
        Edit("services/engine/kept/step_changes.py", "TierChanges([*opened, *copied], ", "TierChanges(opened, "),
    ),
    "seals are written after an answer is used": (
        Edit(
            "services/engine/block_client.py",
            "                    self._write_seals(changes)\n                    return result\n",
            "                    self._write_seals(self._late)\n                    self._late = changes\n"
            "                    return result\n",
        ),
        Edit(
            "services/engine/block_client.py",
            "        self._sessions = 0\n",
            "        self._sessions = 0\n        self._late: Sequence[SealChanges] = ()\n",
        ),
    ),
    "a commit is sealed before its step has ended": (
        Edit(
            "engine/schedule/pool/block_planner.py",
            "self._commit_blocks(step, member, member.computed // size)",
            "self._commit_blocks(step, member, min(len(member.tokens), member.room) // size)",
        ),
    ),
    "a reset leaves the seals": (
        Edit("engine/kept/seal_writer.py", "        counters.resets = changes.resets  #", "        #"),
    ),
    "withheld blocks come back": (
        Edit("engine/kept/seal_writer.py", "            seals.withhold(one.withheld)\n", ""),
    ),
    "the seals of unanswered Steps are lost": (
        Edit(
            "services/engine/block_client.py",
            "                case _NewStream(outgoing, reattached, changes, missing):\n"
            "                    self._write_seals(changes)\n",
            "                case _NewStream(outgoing, reattached, changes, missing):\n",
        ),
    ),
    "two processes write one memory": (
        Edit(
            "simulation/universe.py",
            "return None if id(shared.owner) in map(id, self.processes) else shared",
            "return shared",
        ),
        Edit("engine/kept/seal_writer.py", "if self._memory.counters.generation != self._generation:", "if False:"),
    ),
    "the first request is preempted first": (
        Edit("engine/schedule/pool/preemption.py", "victim = queue.running[-1]", "victim = queue.running[0]"),
    ),
    **OF_CHECKSUMS,
}


def copied_tree(folder: Path) -> Path:
    """Copy what the simulator needs into a folder, and return it."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt", "build")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return folder


class Found(NamedTuple):
    """How a fault was found: after how many seconds, and by which violation."""

    seconds: float
    violation: str


def found(edits: Iterable[Edit], tree: Path, seconds: float, seed: int = 0) -> Found | None:
    """Plant a fault in a copy of the tree, and simulate for so many seconds; None if it is not found."""
    kept = {edit.path: (tree / edit.path).read_text() for edit in edits}
    for edit in edits:
        edit.apply(tree)
    begun = time.monotonic()
    try:
        violation = violation_in(tree, seconds, seed)
        return violation and Found(time.monotonic() - begun, violation)
    finally:
        for path, source in kept.items():
            (tree / path).write_text(source)


def violation_in(tree: Path, seconds: float, seed: int) -> str | None:
    """Simulate a tree; return its violation, or how the run ended before its time."""
    command = [sys.executable, "-m", "simulation", "--seconds", str(seconds), "--seed", str(seed), "--no-story"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{tree / 'protos'}",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds + _GRACE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "a scenario does not end"
    if not run.returncode:
        return None
    return next((line for line in run.stdout.splitlines() if "violates" in line), f"exit: {run.stderr[-200:]}")


@click.command()
@click.option("--seconds", default=300.0, show_default=True, help="Seconds for each fault.")
@click.option("--only", default="", help="Part of the names of the faults to plant.")
def main(seconds: float, only: str) -> None:
    """Plant each fault, and print after how many seconds the simulator finds it."""
    table = Table("fault", "found after", "violation")
    with tempfile.TemporaryDirectory() as folder:
        tree = copied_tree(Path(folder) / "tree")
        chosen = {name: edits for name, edits in PLANTED.items() if only in name}
        for name, edits in track(chosen.items(), console=Console(stderr=True), transient=True):
            row = found(edits, tree, seconds)
            table.add_row(name, *((f"{row.seconds:.0f} s", row.violation) if row else ("not found", "")))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
