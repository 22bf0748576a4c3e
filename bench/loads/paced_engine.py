"""A real engine of a tiny model at the pace of a large one, which records when it sent tokens.

`python -m bench.loads.paced_engine STEP_SECONDS SENT_FILE ARGUMENTS...` runs `quire engine ARGUMENTS...`. A step
computes, then waits until STEP_SECONDS have passed since the previous one, like a busy accelerator. At its end it
writes a line to SENT_FILE for each message with tokens to the gateway: nanoseconds of the machine's monotonic clock,
and the tokens of each request.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import atexit
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.report.targets import ROOT
from engine.schedule.step_plan import Launched, Runner, Sampled, StepPlan
from quire.v1 import engine_pb2
from tests.running_quire import ANY_METRICS_PORT, EXACT, Output, RunningService, metrics_url, open_channel


@dataclass(frozen=True)
class _Held:
    """A finished step with its result and the time of its release."""

    launched: Launched
    until: float

    def result(self) -> list[Sampled]:
        found = self.launched.result()
        time.sleep(max(0.0, self.until - time.monotonic()))
        return found

    def sample_seconds(self) -> float:
        return self.launched.sample_seconds()


class PacedRunner:
    """Starts steps no earlier than the pace allows; it does not catch up after late steps."""

    def __init__(self, runner: Runner, step_seconds: float) -> None:
        self._runner = runner
        self._step_seconds = step_seconds
        self._until = 0.0

    def launch(self, plan: StepPlan) -> Launched:
        now = time.monotonic()
        on_time = self._until + self._step_seconds
        self._until = on_time if on_time > now else now + self._step_seconds
        return _Held(self._runner.launch(plan), self._until)


class PacedEngine(RunningService):
    """A paced engine as a process."""

    def __init__(self, step_seconds: float, sent_file: Path, *arguments: str) -> None:
        self.label = "engine"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.loads.paced_engine", str(step_seconds), str(sent_file), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **ANY_METRICS_PORT, **EXACT},
        )
        self.output = Output(self.process)
        self.address = self.output.wait_for("listens on").split("listens on ")[1]
        self.metrics_url = metrics_url(self.output, "engine")
        self.channel = open_channel(self.address)


def main(step_seconds: float, sent_file: Path, arguments: list[str]) -> None:
    """Patch pacing and recording into the engine's parts, and run the command."""
    from services.cli.main import cli
    from services.engine import servicer
    from services.engine.gateway_link import GatewayLink
    from services.engine.startup import assembly

    assemble = assembly.assemble
    sent: list[tuple[int, list[tuple[str, int]]]] = []

    def paced(settings: Any) -> Any:
        parts = assemble(settings)
        return replace(parts, runner=PacedRunner(parts.runner, step_seconds))

    class NotingLink(GatewayLink):
        async def get(self) -> engine_pb2.StepOutput | None:
            output = await super().get()
            if output is not None and output.tokens:
                sent.append((time.monotonic_ns(), [(one.request_id, len(one.token_ids)) for one in output.tokens]))
            return output

    assembly.assemble = paced
    servicer.GatewayLink = NotingLink  # type: ignore[attr-defined]
    atexit.register(lambda: sent_file.write_text("".join(f"{json.dumps(one)}\n" for one in sent)))
    cli(["engine", *arguments], auto_envvar_prefix="QUIRE")


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
