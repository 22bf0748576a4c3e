"""Settings of KV events that are refused."""

import sys
from typing import Any

import pytest

from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting

LOCAL, OPEN = "127.0.0.1:5557", "0.0.0.0:5557"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"kv_events_replay_listen": LOCAL}, "kv_events_listen must not be empty with kv_events_replay_listen"),
        ({"kv_events_listen": LOCAL, "kv_events_replay_listen": LOCAL}, "kv_events_replay_listen must differ from"),
        ({"kv_events_listen": "no port"}, "kv_events_listen must be host:port"),
        ({"kv_events_listen": "127.0.0.1:70000"}, "kv_events_listen: the port must be between 0 and 65535"),
        ({"kv_events_listen": LOCAL, "kv_events_form": "tuple"}, "kv_events_form must be one of map, array"),
        ({"kv_events_listen": LOCAL, "kv_events_numbers": "one"}, "kv_events_numbers must be one of start, zero"),
        ({"kv_events_numbers": "zero", "smg": True}, "smg must be false with kv_events_numbers"),
        ({"kv_events_listen": LOCAL, "kv_events_topic": "a\nb"}, "kv_events_topic must be printable text"),
        ({"kv_events_listen": LOCAL, "kv_events_history": 10}, "kv_events_history must be at least 64"),
        ({"kv_events_listen": LOCAL, "kv_events_queue": 0}, "kv_events_queue must be at least 1"),
        ({"kv_events_curve_key": "file"}, "kv_events_listen must not be empty with kv_events_curve_key"),
        (
            {"kv_events_listen": LOCAL, "kv_events_curve_clients": "file"},
            "kv_events_curve_key must not be empty with kv_events_curve_clients",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidSetting, match=fault):
        EngineSettings(**values)


@pytest.mark.parametrize("name", ["kv_events_listen", "kv_events_replay_listen"])
@pytest.mark.parametrize("address", [OPEN, ":5557", "[::]:5557"])
def test_addresses_that_other_machines_reach_need_keys_of_clients(name: str, address: str) -> None:
    values: dict[str, Any] = {"kv_events_listen": "127.0.0.1:5558", name: address}
    fault = f"{name} is .*, which other machines can reach, and whoever connects reads the token ids of prompts: "
    with pytest.raises(InvalidSetting, match=fault + "set kv_events_curve_clients, or kv_events_insecure"):
        EngineSettings(**values).check_exposure()
    with pytest.raises(InvalidSetting, match=fault):
        EngineSettings(**values, insecure=True).check_exposure()
    with pytest.raises(InvalidSetting, match=fault):
        EngineSettings(**values, kv_events_curve_key="file").check_exposure()
    EngineSettings(**values, kv_events_insecure=True).check_exposure()
    EngineSettings(**values, kv_events_curve_key="file", kv_events_curve_clients="file").check_exposure()


def test_smg_needs_clients_with_certificates_where_other_machines_reach_the_engine() -> None:
    open_engine = {"listen": "0.0.0.0:1", "insecure": True}
    EngineSettings(**open_engine).check_exposure()  # type: ignore[arg-type]
    fault = (
        r"^listen is 0\.0\.0\.0:1, .* whoever connects reads the token ids of prompts: set tls_client_ca, or kv_events_"
    )
    with pytest.raises(InvalidSetting, match=fault):
        EngineSettings(**open_engine, smg=True).check_exposure()  # type: ignore[arg-type]
    EngineSettings(**open_engine, smg=True, kv_events_insecure=True).check_exposure()  # type: ignore[arg-type]
    files = {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}
    EngineSettings(listen="0.0.0.0:1", smg=True, **files).check_exposure()  # type: ignore[arg-type]


def test_kv_events_do_not_open_the_engine() -> None:
    with pytest.raises(InvalidSetting, match=r"^listen is 0\.0\.0\.0:1, which other machines can reach"):
        EngineSettings(listen="0.0.0.0:1", kv_events_listen=LOCAL, kv_events_insecure=True).check_exposure()


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for module in [name for name in sys.modules if name.startswith("services.engine.events.")]:
        if module.rpartition(".")[2] in ("publisher", "replay", "sockets", "curve", "vllm_format"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidSetting, match=rf"kv_events_listen needs pyzmq and msgspec: .*`routers`.*{package}"):
        EngineService(EngineSettings(kv_events_listen="127.0.0.1:0"))
