"""What each of several engines of one `quire serve` gets."""

import os
import platform

import pytest

from services.cli.local.engines import split_engine
from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting


def test_memory_and_cores_are_divided_and_ids_stay_the_same() -> None:
    whole = EngineSettings(cache_mib=1001, host_blocks=64, max_sequences=48)
    engines = split_engine(whole, 3)
    assert [one.engine_id for one in engines] == [f"{platform.node()}-{number}" for number in range(3)]
    assert {(one.cache_mib, one.device_blocks, one.host_blocks, one.max_sequences) for one in engines} == {
        (333, 0, 21, 48)
    }
    assert {one.threads for one in engines} == {max(1, len(os.sched_getaffinity(0)) // 3)}
    assert split_engine(whole, 3) == engines
    blocks = split_engine(EngineSettings(device_blocks=65, threads=5, engine_id="mine"), 2)
    assert [(one.device_blocks, one.threads, one.engine_id) for one in blocks] == [(32, 5, "mine-0"), (32, 5, "mine-1")]


def test_one_engine_gets_all_memory_and_cores() -> None:
    whole = EngineSettings(cache_mib=1001, threads=0)
    assert split_engine(whole, 1) == [EngineSettings(cache_mib=1001, engine_id=platform.node())]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (EngineSettings(device_blocks=2), "device_blocks is 2, which 3 engines cannot share"),
        (EngineSettings(cache_mib=1), "cache_mib is 1, which 3 engines cannot share"),
        (EngineSettings(host_blocks=2), "host_blocks is 2, which 3 engines cannot share"),
        (EngineSettings(device="cuda"), "engines is 3, but all of them would share one GPU"),
    ],
)
def test_memory_that_cannot_be_divided_is_refused_by_name(settings: EngineSettings, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        split_engine(settings, 3)
