"""Assembles rank 0: the engine, whose steps are also computed by the processes of the other ranks."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.errors import RankFailed
from engine.gpu.device_watch import WatchedRunner, check_of
from engine.model.loaded import LoadedModel
from engine.parallel.leader import LeadingRunner
from engine.run.runner import ModelRunner
from engine.run.samplers import sampler_for
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Runner
from services.engine.ranks.meeting import accept_ranks, meet
from services.engine.ranks.other_rank import LocalRank
from services.engine.ranks.placement import LOOPBACK, Placement, placement
from services.engine.ranks.rank_group import RankGroup
from services.engine.ranks.rank_slice import SECONDS_TO_LOAD, RankSlice, SliceLoader
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import (
    log_formats,
    log_pool,
    log_text_part,
    seconds_per_swapped_block,
    source_of,
    with_end_tokens,
)
from services.engine.startup.device import device_name

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class ParallelParts:
    """Rank 0 with its slice of the model, and the processes of the other ranks."""

    loaded: LoadedModel
    scheduler: Scheduler
    runner: Runner
    device: str
    recording_faults: Mapping[str, str]
    ranks: RankGroup
    kept: None = None
    proof: None = None


def assemble_ranks(settings: EngineSettings) -> ParallelParts:
    """Start the other ranks and load the model's slices. Raises ModelUnsupported, InvalidSetting or RankFailed."""
    source = source_of(Path(settings.model))
    log.info("loading %s from %s on %d ranks", settings.served_name(), source, settings.tensor_parallel)
    log_text_part(settings)
    given = placement(settings.tensor_parallel, os.environ)
    # It refuses a model before others start.
    loader = SliceLoader(settings, given or Placement.local(0, settings.tensor_parallel, 0))
    store, group = _meet(settings, given) if given else _start(settings)
    settings = loader.settings
    try:
        mine = _connect(loader, group, store)
    except Exception as failure:
        # Of a failure that another rank has caused too, its own reason says more.
        reason = group.reason(failure) if isinstance(failure, RankFailed) else failure
        group.close()
        raise reason from failure
    group.waited = lambda: mine.ranks.waited
    costs = PreemptionCosts(seconds_per_swapped_block(mine.backend))
    loaded = mine.loaded
    limits = settings.max_sequences, loaded.vocabulary_size
    sampler = sampler_for(loaded.device, *limits, loaded.dtype, loader.kernels)
    counts_tokens = sampler.counts_tokens
    scheduler = Scheduler(mine.capacity, settings.limits(), costs, ahead=mine.ahead, counts_tokens=counts_tokens)
    runner = ModelRunner(
        mine.loaded,
        mine.backend,
        mine.capacity.block_size,
        decoder=mine.decoder,
        clock=time.monotonic,
        share=mine.ranks.broadcast if mine.ahead else (lambda tokens: tokens),
        sampler=sampler,
    )
    leading = LeadingRunner(runner, group.send_plan, ahead=mine.ahead)
    watched = WatchedRunner(leading, check_of(loader.device))
    device = f"{settings.tensor_parallel} x {device_name(loader.device, loader.kernels)}"
    log_pool(mine.capacity, [mine.backend], f"each of {device}")
    log_formats(settings, loaded)
    loaded = with_end_tokens(loaded, settings)
    return ParallelParts(loaded, scheduler, watched, device, mine.recording_faults, group)


def _start(settings: EngineSettings) -> tuple[Store, RankGroup]:
    """Start the other ranks on this machine."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS_TO_LOAD))
    ranks = [LocalRank(rank, settings, store.port) for rank in range(1, settings.tensor_parallel)]
    return store, RankGroup(ranks, settings.rank_seconds)


def _meet(settings: EngineSettings, place: Placement) -> tuple[Store, RankGroup]:
    """Connect to the other ranks, which torchrun has started."""
    store = meet(place)
    return store, RankGroup(accept_ranks(settings, place, store), settings.rank_seconds)


def _connect(loader: SliceLoader, group: RankGroup, store: Store) -> RankSlice:
    group.wait_until_ready(loader.identity)
    group.connect()
    mine = loader.connect(store)
    group.wait_until_ready()
    return mine
