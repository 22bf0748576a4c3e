"""The load of an engine, as smg polls it and as records in its stream of KV events."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from quire.v1 import engine_pb2
from services.engine.observer import EngineStats

_RATE_SECONDS = 1.0


class TokenRate:
    """Tokens generated per second, over at least a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without tokens. `clock` returns seconds."""
        self._clock = clock
        self._since, self._tokens = clock(), 0
        self._rate = 0.0

    def update(self, tokens: int) -> float:
        """Take the number of tokens generated since the start, and return the rate."""
        now = self._clock()
        if (seconds := now - self._since) >= _RATE_SECONDS:
            self._rate = max(0, tokens - self._tokens) / seconds
            self._since, self._tokens = now, tokens
        return self._rate


class Load(NamedTuple):
    """Load of an engine. Token counts are those of blocks; `usage` is the share of the pool that requests hold."""

    running: int
    waiting: int
    uncomputed_tokens: int
    used_tokens: int
    pool_tokens: int
    usage: float
    tokens_per_second: float
    hit_rate: float
    max_running: int
    silence_ms: int | None

    @property
    def routed(self) -> tuple[int, int, int, int]:
        """What a router needs at once if it changes."""
        return self.running, self.waiting, self.uncomputed_tokens, self.used_tokens


class Loads:
    """Reads the load of an engine."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        engine: engine_pb2.GetEngineResponse,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stats` are the engine's, `engine` describes it; `clock` returns seconds."""
        self._stats = stats
        self._engine = engine
        self._rate = TokenRate(clock)

    def load(self) -> Load:
        """Return the load as of the last step."""
        stats, engine = self._stats(), self._engine
        totals, used = stats.totals, max(0, engine.device_blocks - stats.available_blocks)
        live = stats.running + stats.waiting > 0
        return Load(
            running=stats.running,
            waiting=stats.waiting,
            uncomputed_tokens=stats.uncomputed_tokens,
            used_tokens=used * engine.block_size,
            pool_tokens=engine.device_blocks * engine.block_size,
            usage=used / max(1, engine.device_blocks),
            tokens_per_second=self._rate.update(totals.generated_tokens),
            hit_rate=totals.cached_tokens / max(1, totals.prompt_tokens),
            max_running=engine.max_sequences,
            silence_ms=int(stats.seconds_without_step * 1000) if live else None,
        )

    def answer(self, version: str) -> smg_pb.GetLoadsResponse:
        """Return the answer to a poll."""
        load = self.load()
        one = smg_pb.SchedulerLoad(
            dp_rank=0,
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.used_tokens,
            max_total_num_tokens=load.pool_tokens,
            token_usage=load.usage,
            gen_throughput=load.tokens_per_second,
            cache_hit_rate=load.hit_rate,
            utilization=load.running / max(1, load.max_running),
            max_running_requests=load.max_running,
            num_waiting_uncached_tokens=load.uncomputed_tokens,
        )
        now = datetime.now(UTC).isoformat()
        return smg_pb.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[one])


def record_of(load: Load, sample: int, *, alone: bool) -> common_pb2.EngineLoad:
    """Return a record for a stream; `alone` without events, with all that smg shows but does not route by."""
    record = common_pb2.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.uncomputed_tokens,
        token_usage=load.usage,
        active_token_usage=load.usage,
        gen_throughput=load.tokens_per_second,
        max_running_requests=load.max_running,
        sample=sample,
        load_only=alone,
        engine_silence_ms=load.silence_ms,
        engine_reports_steps=True,
        prefill_pending_tokens=load.uncomputed_tokens,
    )
    if alone:
        record.cache_hit_rate = load.hit_rate
        record.num_used_tokens = load.used_tokens
        record.max_total_num_tokens = load.pool_tokens
    return record
