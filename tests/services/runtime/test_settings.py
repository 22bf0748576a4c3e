"""Bounds of settings, their flags and environment variables, and the guards of addresses that others can reach."""

import ast
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.cli.main import cli
from services.cli.options import arguments_of, settings_from
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from services.runtime.exposure import is_local
from services.runtime.settings import InvalidSetting
from tests.running_quire import START_SECONDS, launch

SERVICES = Path(__file__).parents[3] / "services"
TYPES: dict[str, type[Any]] = {"kvmanager": KVManagerSettings, "engine": EngineSettings, "gateway": GatewaySettings}
FIELDS = [(label, field) for label, kind in TYPES.items() for field in dataclasses.fields(kind)]
FIELD_IDS = [f"{label}-{field.name}" for label, field in FIELDS]

# Functions that receive the name of the setting that permits an address, and read it.
ADDRESS_CHECKS = ("check_addresses", "exposure.check_addresses")

# A token budget below max_sequences is refused.
FITTING: dict[str, dict[str, Any]] = {
    "token_budget": {"max_sequences": 1},
    "max_sequences": {"token_budget": 1 << 17},
}
ADDRESSES = ("listen", "http_listen", "map_listen", "kvmanager", "engines")
VALUES = dict.fromkeys(ADDRESSES, "127.0.0.1:9") | {"otlp_endpoint": "http://127.0.0.1:9"}
VALUES |= {"kv_events_listen": "127.0.0.1:8", "kv_events_replay_listen": "127.0.0.1:9"}
VALUES |= {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3", "allowed_origins": "https://chat.example"}
# Settings that a setting of TLS requires.
NEEDED = {
    "tls_certificate": {"tls_key": "k"},
    "tls_key": {"tls_certificate": "c"},
    "tls_client_ca": {"tls_certificate": "c", "tls_key": "k"},
    "link_certificate": {"link_ca": "a", "link_key": "k"},
    "link_key": {"link_ca": "a", "link_certificate": "c"},
    "link_server_name": {"link_ca": "a"},
}


def out_of_bounds() -> Iterator[tuple[str, str, Any]]:
    for label, field in FIELDS:
        bounds = field.metadata
        if bounds["least"] is not None:
            yield label, field.name, bounds["least"] - 1
        if bounds["most"] is not None:
            yield label, field.name, bounds["most"] + 1
        if isinstance(field.default, float):
            yield from ((label, field.name, value) for value in (math.nan, math.inf))
        if bounds["choices"] or field.name.endswith(("_parser", "_origins")):
            yield label, field.name, "nonsense"
        elif isinstance(field.default, str) and field.default and not bounds["may_be_empty"]:
            yield label, field.name, ""


OUT_OF_BOUNDS = list(out_of_bounds())


@pytest.mark.parametrize(("label", "name", "value"), OUT_OF_BOUNDS)
def test_a_setting_out_of_bounds_is_refused_by_name(label: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{name} must "):
        TYPES[label](**{name: value}, **FITTING.get(name, {}))


@pytest.mark.parametrize(("label", "field"), FIELDS, ids=FIELD_IDS)
def test_a_setting_on_its_bound_is_accepted(label: str, field: "dataclasses.Field[Any]") -> None:
    bounds = [field.metadata[name] for name in ("least", "most") if field.metadata[name] is not None]
    for value in [*bounds, *field.metadata["choices"], field.default]:
        kind = type(field.default)
        beside = FITTING.get(field.name, {}) | required_by(field, TYPES[label])
        settings = TYPES[label](**{field.name: kind(value)}, **beside)
        assert getattr(settings, field.name) == value


def test_a_token_budget_below_the_sequences_is_refused_naming_both() -> None:
    with pytest.raises(InvalidSetting, match=r"token_budget must be at least max_sequences \(8\), not 7"):
        EngineSettings(token_budget=7, max_sequences=8)


def test_defaults_of_an_engine_follow_its_device_and_give_way_to_what_is_set() -> None:
    def of(settings: EngineSettings, *, on_gpu: bool) -> tuple[int, int, int]:
        found = settings.for_device(on_gpu=on_gpu)
        return found.token_budget, found.max_sequences, found.cache_mib

    assert of(EngineSettings(), on_gpu=False) == (512, 64, 1024)
    assert of(EngineSettings(), on_gpu=True) == (2048, 256, 0)
    assert of(EngineSettings(token_budget=100), on_gpu=True) == (100, 100, 0)
    assert of(EngineSettings(max_sequences=2048, cache_mib=5), on_gpu=False) == (2048, 2048, 5)
    assert of(EngineSettings(attention_backend="flex"), on_gpu=True) == (2048, 256, 1024)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"device_blocks": 9}, "device_blocks must be 0 GIVEN, not 9: give one of them"),
        ({"cache_mib": 9}, "cache_mib must be 0 GIVEN, not 9: give one of them"),
        ({"device": "cpu"}, "device must not be cpu GIVEN: the pool of a CPU has cache_mib"),
        ({"attention_backend": "flex"}, "attention_backend must not be flex GIVEN: its pool has cache_mib"),
    ],
)
def test_a_share_of_a_gpu_is_refused_beside_another_size_of_the_pool(others: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{reason.replace('GIVEN', 'with gpu_memory_utilization 0.8')}$"):
        EngineSettings(gpu_memory_utilization=0.8, **others)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_backend": "triton", "device": "cpu"}, "device must not be cpu with attention_backend triton"),
        ({"attention_backend": "cpu", "device": "cuda"}, "device must not be cuda with attention_backend cpu"),
        (
            {"attention_backend": "flex", "tensor_parallel": 3},
            "tensor_parallel must be at most 1 with attention_backend flex, not 3",
        ),
    ],
)
def test_an_attention_backend_that_cannot_run_is_refused_before_a_model_is_loaded(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidSetting, match=f"^{reason}$"):
        EngineSettings(**given)


def test_a_backend_for_gpus_is_refused_when_the_device_is_found_to_be_a_cpu() -> None:
    with pytest.raises(InvalidSetting, match=r"^device must not be cpu with attention_backend triton$"):
        EngineSettings(attention_backend="triton").for_device(on_gpu=False)


def test_a_share_of_a_gpu_is_refused_where_a_cpu_was_found() -> None:
    settings = EngineSettings(gpu_memory_utilization=0.8)
    with pytest.raises(InvalidSetting, match=r"^device must not be cpu with gpu_memory_utilization 0.8"):
        settings.for_device(on_gpu=False)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel must be at most 1 GIVEN, not 2: ranks verify no draft tokens"),
        ({"device": "cuda"}, "device must not be cuda GIVEN: steps of a GPU run ahead of their tokens"),
        (
            {"attention_backend": "triton"},
            "attention_backend must not be triton GIVEN: steps of a GPU run ahead of their tokens",
        ),
    ],
)
def test_proposals_are_refused_where_steps_do_not_wait_for_tokens(others: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{reason.replace('GIVEN', 'with speculate_ngram 8')}$"):
        EngineSettings(speculate_ngram=8, **others)


def test_proposals_are_refused_where_a_gpu_was_found() -> None:
    with pytest.raises(InvalidSetting, match=r"^device must not be cuda with speculate_ngram 8"):
        EngineSettings(speculate_ngram=8).for_device(on_gpu=True)
    assert EngineSettings(speculate_ngram=8).for_device(on_gpu=False).limits().proposed_tokens == 8


@pytest.mark.parametrize(
    "others", [{"tensor_parallel": 2}, {"device": "cuda"}, {"attention_backend": "triton"}], ids=str
)
def test_blocks_are_refused_to_be_kept_where_memory_ends_with_its_process(others: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=r"^[a-z_]+ must .* with keep_blocks /dev/shm"):
        EngineSettings(keep_blocks="/dev/shm", **others)
    assert EngineSettings(keep_blocks="off", **others)


@pytest.mark.parametrize("field", ["engine_id", "model_name", "model"])
@pytest.mark.parametrize("name", ["n" * 201, "a\nb", "\udcff"])
def test_a_name_that_the_kv_manager_would_refuse_is_refused(field: str, name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{field} must "):
        EngineSettings(**{field: name})


def test_the_served_name_defaults_to_the_last_part_of_the_model() -> None:
    assert EngineSettings(model="/models/tiny").served_name() == "tiny"
    assert EngineSettings(model="org/name").served_name() == "name"
    assert EngineSettings(model="/models/tiny", model_name="mine").served_name() == "mine"


# Flags and environment


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def another_value(field: "dataclasses.Field[Any]") -> Any:
    """Return a value within bounds that is not the default."""
    if field.metadata["choices"]:
        return next(choice for choice in reversed(field.metadata["choices"]) if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, str):
        return VALUES.get(field.name, "something else")
    most = field.metadata["most"]
    if most is None or field.default + 3 <= most:
        return field.default + 3
    return field.metadata["least"] if most == field.default else most


def required_by(field: "dataclasses.Field[Any]", kind: type[Any]) -> dict[str, Any]:
    """Return values of the settings whose default does not meet what a setting requires."""
    defaults = {one.name: one for one in dataclasses.fields(kind)}
    always = [one for one in field.metadata["requires"] if not one.where]
    others = [one.other for one in always if not one.holds(defaults[one.other].default)]
    theirs = [required_by(defaults[name], kind) for name in others]
    return {name: another_value(defaults[name]) for name in others} | {k: v for one in theirs for k, v in one.items()}


def parse(label: str, *arguments: str) -> Any:
    """Return the settings of a command line and the environment."""
    with cli.make_context("quire", [label, *arguments], auto_envvar_prefix="QUIRE") as group:
        command = cli.commands[label]
        with command.make_context(label, list(arguments), parent=group) as context:
            return settings_from(TYPES[label], context.params)


@pytest.mark.parametrize(("label", "field"), FIELDS, ids=FIELD_IDS)
def test_every_setting_has_a_flag_and_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch, label: str, field: "dataclasses.Field[Any]"
) -> None:
    value, needed = another_value(field), NEEDED.get(field.name, {}) | required_by(field, TYPES[label])
    expected = dataclasses.replace(TYPES[label](), **{field.name: value}, **needed)
    assert expected != TYPES[label]() == parse(label)
    flags = [word for name, one in needed.items() for word in (flag(name), str(one))]
    given = [flag(field.name)] if isinstance(value, bool) else [flag(field.name), str(value)]
    assert parse(label, *flags, *given) == expected
    monkeypatch.setenv(f"QUIRE_{label}_{field.name}".upper(), str(value))
    assert parse(label, *flags) == expected


def test_every_setting_is_read() -> None:
    code = [*ast.walk(ast.parse("".join(path.read_text() for path in SERVICES.rglob("*.py"))))]
    read = {node.attr for node in code if isinstance(node, ast.Attribute)}
    checks = (node for node in code if isinstance(node, ast.Call) and ast.unparse(node.func) in ADDRESS_CHECKS)
    read |= {one.value for check in checks for one in check.args if isinstance(one, ast.Constant)}
    assert {field.name for _, field in FIELDS} - read == set()


@pytest.mark.parametrize("label", TYPES)
def test_settings_reach_a_child_process_unchanged(label: str) -> None:
    fields = [field for field in dataclasses.fields(TYPES[label]) if not field.metadata["requires"]]
    settings = TYPES[label](**{field.name: another_value(field) for field in fields})
    assert parse(label, *arguments_of(settings)) == settings


def test_a_flag_overrides_the_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_GATEWAY_INSECURE", "true")
    assert parse("gateway").insecure
    assert not parse("gateway", *arguments_of(GatewaySettings())).insecure


def names_of(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", ["serve", "demo"])
def test_serve_and_demo_have_the_engines_settings(name: str) -> None:
    options = {parameter.name for parameter in cli.commands[name].params}
    inner = {"listen", "kvmanager", "engine", "model_name", "engine_id", "insecure", "metrics_compat"}
    assert options >= {one for one in names_of(EngineSettings) - inner if not one.startswith(("tls_", "link_"))}


def test_serve_has_settings_of_gateway_and_kv_manager_but_not_of_internal_links() -> None:
    options = {parameter.name or "" for parameter in cli.commands["serve"].params}
    of_manager = names_of(KVManagerSettings) - names_of(EngineSettings) - names_of(GatewaySettings)
    assert options & of_manager == {"map_listen", "kv_cache_metrics_sample", "record_folder", "record_megabytes"}
    assert options >= {"api_keys", "prefixes", "insecure", "tls_certificate", "tls_key", "tls_client_ca"}
    assert {name for name in options if name.startswith("link_")} <= {"link_timeout_seconds"}


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (("engine", "--block-size", "0"), {}, "block_size must be at least 1, not 0"),
        (("engine",), {"QUIRE_ENGINE_BLOCK_SIZE": "0"}, "block_size must be at least 1, not 0"),
        (("engine",), {"QUIRE_ENGINE_BLOCK_SIZE": "many"}, "'--block-size': 'many' is not a valid integer"),
        (
            ("serve", "--max-sequences", "64"),
            {"QUIRE_SERVE_TOKEN_BUDGET": "5"},
            "token_budget must be at least max_sequences (64), not 5",
        ),
        (
            ("gateway", "--pages", "chat", "--http-listen", ""),
            {},
            "http_listen must not be empty with pages chat: the HTTP API serves it",
        ),
        (("gateway", "--max-requests", "0"), {}, "max_requests must be at least 1, not 0"),
        (("kvmanager", "--grace-seconds", "-1"), {}, "grace_seconds must be at least 0, not -1.0"),
        (("kvmanager", "--listen", ""), {}, "listen must not be empty"),
        (("kvmanager", "--listen", "a:70000"), {}, "listen: the port must be between 0 and 65535, not 70000"),
        (("serve", "--http-listen", "unix:/x"), {}, "http_listen must be host:port, not 'unix:/x'"),
        (("engine", "--metrics-listen", "9152"), {}, "metrics_listen must be host:port, not '9152'"),
        (("engine", "--kvmanager", "host:116687"), {}, "kvmanager: the port must be between 1 and 65535, not 116687"),
        (("gateway", "--engines", "a:1,nonsense"), {}, "engines must be host:port or unix:/path, not 'nonsense'"),
        (("gateway", "--engines", "dns:a:70000"), {}, "engines: the port must be between 1 and 65535, not 70000"),
        (("gateway", "--otlp-endpoint", "http://a:70000"), {}, "otlp_endpoint: the port must be between 1 and 65535"),
        (
            ("generate", "a", "--address", "http://a:1"),
            {},
            "--address must be host:port or unix:/path, not 'http://a:1'",
        ),
        (("health", "127.0.0.1:116687"), {}, "ADDRESS: the port must be between 1 and 65535, not 116687"),
        (
            ("serve", "--kv-dtype", "int8", "--tensor-parallel", "2"),
            {},
            "tensor_parallel must be at most 1 with kv_dtype int8, not 2",
        ),
        (
            ("engine", "--attention-backend", "flex"),
            {"QUIRE_ENGINE_KV_DTYPE": "int8"},
            "attention_backend must be auto, torch or cpu with kv_dtype int8, not flex: the others read no such cache",
        ),
        (("engine", "--device", "abacus"), {}, "'abacus' is not one of 'auto', 'cpu', 'cuda'"),
        (("serve", "--listen", "[::]:0"), {}, "and no API key is needed: set api_keys, or insecure"),
        (("gateway", "--listen", "0.0.0.0:0"), {}, "and no API key is needed: set api_keys, or insecure"),
        (("kvmanager", "--map-listen", "0.0.0.0:0"), {}, "map_listen is 0.0.0.0:0, which other machines can"),
        (("serve", "--map-listen", "0.0.0.0:0"), {}, "map_listen is 0.0.0.0:0, which other machines can"),
        (("serve", "demo", "--model", "demo"), {}, "MODEL and --model cannot be given together"),
    ],
)
def test_the_command_refuses_a_bad_setting_by_name(
    arguments: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    result = CliRunner().invoke(cli, arguments, auto_envvar_prefix="QUIRE", env=environment)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_the_process_of_a_command_with_a_bad_setting_ends_without_a_traceback() -> None:
    process = launch("serve", QUIRE_SERVE_TOKEN_BUDGET="5", QUIRE_SERVE_MAX_SEQUENCES="64")
    output, _ = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 2
    assert "token_budget must be at least max_sequences (64), not 5" in " ".join(output.split())
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "environment", "pages"),
    [
        ((), {}, "chat"),
        (("--http-listen", "localhost:0"), {}, "chat"),
        (("--http-listen", ""), {}, "none"),
        (("--http-listen", "0.0.0.0:0", "--insecure"), {}, "none"),
        (("--http-listen", "0.0.0.0:0", "--insecure", "--pages", "chat"), {}, "chat"),
        (("--pages", "none"), {}, "none"),
        ((), {"QUIRE_SERVE_PAGES": "none"}, "none"),
    ],
)
def test_serve_has_the_chat_page_where_only_this_machine_reaches_it(
    arguments: tuple[str, ...], environment: dict[str, str], pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[GatewaySettings] = []

    def keep(_kvmanager: object, _engine: object, gateway: GatewaySettings, *_others: object) -> int:
        given.append(gateway)
        return 0

    monkeypatch.setattr("services.cli.commands.serve.serve", keep)
    result = CliRunner().invoke(cli, ("serve", *arguments), auto_envvar_prefix="QUIRE", env=environment)
    assert (result.exit_code, [one.pages for one in given]) == (0, [pages]), result.output
    assert GatewaySettings().pages == "none"


def test_serve_takes_the_model_as_an_argument_before_that_of_the_environment() -> None:
    process = launch("serve", "no-model", "--listen", "127.0.0.1:0", QUIRE_SERVE_MODEL="demo")
    output, _ = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    assert "no-model is not a model" in output


# Exposure.


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:50051", True),
        ("127.1.2.3:0", True),
        ("[::1]:50051", True),
        ("localhost:50051", True),
        ("unix:/tmp/x.sock", True),
        ("nonsense", True),
        ("no.such.host.invalid:50051", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("0:50051", False),
        (":50051", False),
        ("192.0.2.1:50051", False),
        ("[2001:db8::1]:50051", False),
        ("[::ffff:0.0.0.0]:50051", False),
        ("ipv4:0.0.0.0:50051", False),
        ("ipv4:127.0.0.1:50051", False),
        ("dns:///0.0.0.0:50051", False),
    ],
)
def test_is_local(address: str, local: bool) -> None:
    assert is_local(address) == local


@pytest.mark.parametrize("label", TYPES)
def test_no_service_is_exposed_without_its_guard_or_insecure(label: str) -> None:
    kind, everywhere = TYPES[label], "0.0.0.0:1"
    guard: dict[str, Any] = {"api_keys": "f"}
    if label != "gateway":
        guard = {"tls_client_ca": "a", "tls_certificate": "c", "tls_key": "k"}
    kind().check_exposure()
    kind(listen=everywhere, insecure=True).check_exposure()
    kind(listen=everywhere, **guard).check_exposure()
    with pytest.raises(InvalidSetting, match=r"^listen is 0\.0\.0\.0:1, which other machines can reach"):
        kind(listen=everywhere).check_exposure()


@pytest.mark.parametrize(
    ("service", "kind"),
    [(KVManagerService, KVManagerSettings), (EngineService, EngineSettings), (GatewayService, GatewaySettings)],
)
def test_a_service_without_its_command_is_not_exposed(service: Callable[[Any], Any], kind: type[Any]) -> None:
    with pytest.raises(InvalidSetting, match="which other machines can reach"):
        service(kind(listen="0.0.0.0:0"))


@pytest.mark.parametrize(
    ("label", "given", "fault"),
    [
        ("kvmanager", {"tls_certificate": "c"}, "tls_certificate is set, but tls_key is not"),
        ("engine", {"tls_key": "k"}, "tls_key is set, but tls_certificate is not"),
        ("gateway", {"tls_client_ca": "a"}, "tls_client_ca is set, but tls_certificate is not"),
        ("engine", {"link_ca": "a", "link_key": "k"}, "link_key is set, but link_certificate is not"),
        ("gateway", {"link_server_name": "n"}, "link_server_name is set, but link_ca is not"),
        ("engine", {"link_ca": "a", "kvmanager": "unix:/x"}, "link_ca must be empty if kvmanager is a Unix socket"),
        (
            "gateway",
            {"link_ca": "a", "engines": "unix:/x, unix:/y"},
            "link_ca must be empty if engines is a Unix socket",
        ),
        (
            "kvmanager",
            {"tls_certificate": "c", "tls_key": "k", "listen": "unix:/x", "map_listen": ""},
            "tls_certificate must be empty if listen is unix:/x",
        ),
    ],
)
def test_inconsistent_settings_of_tls_are_refused(label: str, given: dict[str, str], fault: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{fault}"):
        TYPES[label](**given)
