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


def test_kv_events_of_each_engine_have_their_own_ports() -> None:
    whole = EngineSettings(kv_events_listen="127.0.0.1:5557", kv_events_replay_listen="127.0.0.1:5657")
    addresses = [(one.kv_events_listen, one.kv_events_replay_listen) for one in split_engine(whole, 3)]
    assert addresses == [(f"127.0.0.1:{5557 + one}", f"127.0.0.1:{5657 + one}") for one in range(3)]
    (first, second) = split_engine(EngineSettings(kv_events_listen="[::1]:0"), 2)
    assert first.kv_events_listen == second.kv_events_listen == "[::1]:0"


def test_one_engine_gets_all_memory_and_cores() -> None:
    whole = EngineSettings(cache_mib=1001, threads=0)
    assert split_engine(whole, 1) == [EngineSettings(cache_mib=1001, engine_id=platform.node())]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (EngineSettings(device_blocks=2), "device_blocks is 2, which 3 engines cannot share"),
        (EngineSettings(cache_mib=1), "cache_mib is 1, which 3 engines cannot share"),
        (EngineSettings(host_blocks=2), "host_blocks is 2, which 3 engines cannot share"),
        (
            EngineSettings(kv_events_listen="127.0.0.1:5557", kv_events_replay_listen="127.0.0.1:5559"),
            "kv_events_replay_listen must be at least 3 ports from kv_events_listen with 3 engines",
        ),
        (EngineSettings(kv_events_listen="127.0.0.1:65534"), "kv_events_listen: the port must be between 0 and 65535"),
        (EngineSettings(device="cuda"), "engines is 3, but all of them would share one GPU"),
    ],
)
def test_memory_that_cannot_be_divided_is_refused_by_name(settings: EngineSettings, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        split_engine(settings, 3)
