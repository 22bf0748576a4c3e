"""An engine without a model: the real server, scheduler and pool, and a runner that returns set tokens.

For benchmarks of other parts, such as routing: it starts in a second or two, and takes a set time for each token and
step, so that its load is realistic. It always generates the same token or, with scripts, the answer that the seed of a
request selects.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from engine.attention.cache import CacheGeometry, CacheLayout
from engine.kept.header import KeptIdentity, KeptKind
from engine.schedule.capacity import Capacity
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Runner, Sampled, StepPlan, Work
from services.cli.options import options_of, settings_from
from services.engine.kept.boot_id import boot_id
from services.engine.kept.keeping import Keeping, SealingRunner, keep, kept_file
from services.engine.kept.places import kept_path
from services.engine.metrics import EngineMetrics
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.runtime.metrics.page import Exposition
from services.runtime.run_service import run_service

# Maximum time by which later sleeps are shortened after a sleep that was too long.
_MAX_CREDIT_SECONDS = 0.01


@dataclass(frozen=True)
class Nothing:
    """The description of the missing model."""

    fingerprint: str
    vocabulary_size: int
    eos_token_ids: frozenset[int] = frozenset()
    dtype: str = "none"
    weight_format: str = "none"
    cache_dtype: str = "none"


class NullRunner:
    """Executes plans by waiting a number of seconds for each token of a step, and for the step."""

    def __init__(self, token_id: int, seconds_per_token: float, seconds_per_step: float = 0.0) -> None:
        self._token = Sampled(token_id)
        self._seconds_per_token = seconds_per_token
        self._seconds_per_step = seconds_per_step
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> Done:
        """Return the same token for each sample; beams continue with it and the next ids."""
        self._wait(sum(len(work.token_ids) for work in plan.work))
        return Done([one for work in plan.work for one in self._brought(work)])

    def _wait(self, tokens: int) -> None:
        now = time.monotonic()
        seconds = self._seconds_per_step + tokens * self._seconds_per_token
        self._free_at = max(self._free_at, now - _MAX_CREDIT_SECONDS) + seconds
        if self._free_at > now:
            time.sleep(self._free_at - now)

    def _brought(self, work: Work) -> list[Sampled]:
        first = self._token.token_id
        scored = [Sampled(token, 0.0) for token in work.to_score.token_ids] if work.to_score else []
        if work.samples and work.candidates:
            return [*scored, Sampled(first, top=tuple((first + rank, -float(rank)) for rank in range(work.candidates)))]
        own = self._token if work.logprobs is None else Sampled(first, 0.0)
        return [*scored, *[own] * (len(work.sample_indices) if work.samples else 0)]


class ScriptedRunner(NullRunner):
    """Returns the tokens of a script in turn: of that at the number that is the seed of the request.

    Requests have one sample, and at most as many tokens as their script; none is preempted.
    """

    def __init__(self, scripts: Sequence[Sequence[int]], seconds_per_token: float, seconds_per_step: float) -> None:
        super().__init__(0, seconds_per_token, seconds_per_step)
        self._scripts = scripts
        self._counts: dict[int, int] = {}  # tokens so far, by sequence

    def _brought(self, work: Work) -> list[Sampled]:
        if not work.samples:
            return []
        script, count = self._scripts[work.sampling.seed], self._counts.pop(work.sequence, 0)
        if count + 1 < len(script):
            self._counts[work.sequence] = count + 1
        return [Sampled(script[count])]


class NullBackend:
    """The cache of an engine without a model: blocks of a byte."""

    cache = torch.empty(0)
    layout = CacheLayout.of(CacheGeometry.uniform(1, 1, 1), lambda _heads, _size: (1,))

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Take another cache, which nobody writes to."""
        del host_cache
        self.cache = cache


@dataclass(frozen=True)
class NullParts:
    """A services.engine.startup.parts.Parts."""

    loaded: Nothing
    scheduler: Scheduler
    runner: Runner
    device: str = "none"
    recording_faults: Mapping[str, str] = field(default_factory=dict)
    ranks: None = None
    kept: Keeping | None = None
    proof: None = None


@dataclass(frozen=True)
class NullOptions:
    """The simulated model: context and vocabulary in tokens, the returned token or file of scripts, and their time."""

    context_tokens: int
    vocabulary_size: int
    token_id: int
    microseconds_per_token: float
    fingerprint: str = "nothing"  # before the digest of the tokenizer
    microseconds_per_step: float = 0.0
    scripts: str = ""

    def runner(self) -> Runner:
        """Return what generates the tokens."""
        seconds = self.microseconds_per_token / 1e6, self.microseconds_per_step / 1e6
        if self.scripts:
            return ScriptedRunner(json.loads(Path(self.scripts).read_text()), *seconds)
        return NullRunner(self.token_id, *seconds)


def assemble(options: NullOptions, settings: EngineSettings) -> NullParts:
    """Build an engine from a folder with a tokenizer."""
    fingerprint = f"{options.fingerprint}-{TokenizerFiles(Path(settings.model)).digest().hex()[:16]}"
    capacity = Capacity(
        options.context_tokens,
        options.vocabulary_size,
        settings.block_size,
        settings.device_blocks,
        settings.host_blocks,
    )
    runner = options.runner()
    kept = None
    if path := kept_path(settings, "cpu"):
        kept = keep(kept_file(path), _identity(fingerprint, capacity), [NullBackend()])
        runner = SealingRunner(runner, kept.seals)
    return NullParts(
        Nothing(fingerprint, options.vocabulary_size),
        Scheduler(capacity, settings.limits(), withheld=kept.report.withheld if kept else ((),)),
        runner,
        kept=kept,
    )


def _identity(fingerprint: str, capacity: Capacity) -> KeptIdentity:
    layout = NullBackend.layout
    sizes = capacity.device_blocks, capacity.host_blocks
    return KeptIdentity(
        fingerprint=fingerprint,
        boot_id=boot_id(),
        backend="none",
        dtype="uint8",
        block_size=capacity.block_size,
        kinds=(KeptKind("all", layout.description(), layout.elements, *sizes),),
    )


@click.command()
@options_of(
    EngineSettings,
    leave_out=(
        *("device", "dtype", "attention_backend", "kernels_folder"),
        *("cache_mib", "gpu_memory_utilization", "threads"),
    ),
    device_blocks=8192,
    token_budget=8192,
)
@click.option("--context-tokens", default=131072 + 8192, show_default=True, help="Tokens of prompt and output.")
@click.option("--vocabulary-size", default=1 << 20, show_default=True, help="Token ids are smaller than this.")
@click.option("--token-id", default=100, show_default=True, help="The token that is always generated.")
@click.option("--microseconds-per-token", default=0.0, show_default=True, help="Time that each computed token takes.")
@click.option("--microseconds-per-step", default=0.0, show_default=True, help="Time that each step takes besides.")
@click.option("--scripts", default="", help="File with lists of tokens; the seed of a request selects its answer.")
@click.option("--fingerprint", default="nothing", show_default=True, help="Without the digest of the tokenizer.")
@click.option("--metrics-listen", default="127.0.0.1:0", show_default=True, help="Address of the metrics.")
def main(metrics_listen: str, **values: Any) -> None:
    """Start an engine without a model. --model is a folder with a tokenizer."""
    settings = settings_from(EngineSettings, values)
    options = NullOptions(**{name: values[name] for name in NullOptions.__dataclass_fields__})
    metrics = EngineMetrics()

    def make() -> EngineService:
        return EngineService(settings, metrics, partial(assemble, options))

    exposition = Exposition(metrics.registry, metrics_listen, compat=settings.metrics_compat)
    sys.exit(run_service("engine", settings, exposition, lambda: make))


if __name__ == "__main__":
    main()
