"""Settings refuse what cannot work, and come from flags and from the environment alike."""

import dataclasses
import math
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import pytest

from services.cli.main import cli
from services.cli.options import arguments_of, settings_from
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.settings import InvalidSetting
from tests.running_quire import START_SECONDS, launch

TYPES: dict[str, type[Any]] = {"kvmanager": KVManagerSettings, "engine": EngineSettings, "gateway": GatewaySettings}
FIELDS = [(label, field) for label, kind in TYPES.items() for field in dataclasses.fields(kind)]
FIELD_IDS = [f"{label}-{field.name}" for label, field in FIELDS]

# A token budget below the sequences is refused for that, whatever its own bounds.
FITTING = {"token_budget": {"max_sequences": 1}, "max_sequences": {"token_budget": 1_000_000}}


def out_of_bounds() -> Iterator[tuple[str, str, Any]]:
    for label, field in FIELDS:
        bounds = field.metadata
        if bounds["least"] is not None:
            yield label, field.name, bounds["least"] - 1
        if bounds["most"] is not None:
            yield label, field.name, bounds["most"] + 1
        if isinstance(field.default, float):
            yield from ((label, field.name, value) for value in (math.nan, math.inf))
        if bounds["choices"]:
            yield label, field.name, "nonsense"
        elif isinstance(field.default, str) and field.default and not bounds["may_be_empty"]:
            yield label, field.name, ""


OUT_OF_BOUNDS = list(out_of_bounds())


@pytest.mark.parametrize(("label", "name", "value"), OUT_OF_BOUNDS)
def test_a_setting_out_of_bounds_is_refused_by_name(label: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{name} is "):
        TYPES[label](**{name: value}, **FITTING.get(name, {}))


@pytest.mark.parametrize(("label", "field"), FIELDS, ids=FIELD_IDS)
def test_a_setting_on_its_bound_is_taken(label: str, field: "dataclasses.Field[Any]") -> None:
    bounds = [field.metadata[name] for name in ("least", "most") if field.metadata[name] is not None]
    for value in [*bounds, *field.metadata["choices"], field.default]:
        kind = type(field.default)
        settings = TYPES[label](**{field.name: kind(value)}, **FITTING.get(field.name, {}))
        assert getattr(settings, field.name) == value


def test_a_token_budget_below_the_sequences_is_refused_naming_both() -> None:
    with pytest.raises(InvalidSetting, match="token_budget is 7, it must be at least max_sequences, 8"):
        EngineSettings(token_budget=7, max_sequences=8)


def test_clients_ask_for_a_model_by_the_end_of_its_name_unless_told_otherwise() -> None:
    assert EngineSettings(model="/models/tiny").served_name() == "tiny"
    assert EngineSettings(model="org/name").served_name() == "name"
    assert EngineSettings(model="/models/tiny", model_name="mine").served_name() == "mine"


# Flags and environment


def another_value(field: "dataclasses.Field[Any]") -> Any:
    """Return a value that is not the default, within bounds."""
    if field.metadata["choices"]:
        return next(choice for choice in reversed(field.metadata["choices"]) if choice != field.default)
    if isinstance(field.default, str):
        return "something else"
    return field.metadata["most"] or field.default + 3


def parse(label: str, *arguments: str) -> Any:
    """Return the settings that a command line makes, the environment included."""
    with cli.make_context("quire", [label, *arguments], auto_envvar_prefix="QUIRE") as group:
        command = cli.commands[label]
        with command.make_context(label, list(arguments), parent=group) as context:
            return settings_from(TYPES[label], context.params)


@pytest.mark.parametrize(("label", "field"), FIELDS, ids=FIELD_IDS)
def test_every_setting_has_a_flag_and_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch, label: str, field: "dataclasses.Field[Any]"
) -> None:
    value = another_value(field)
    expected = dataclasses.replace(TYPES[label](), **{field.name: value})
    assert expected != TYPES[label]() == parse(label)
    assert parse(label, "--" + field.name.replace("_", "-"), str(value)) == expected
    monkeypatch.setenv(f"QUIRE_{label}_{field.name}".upper(), str(value))
    assert parse(label) == expected


@pytest.mark.parametrize("label", TYPES)
def test_settings_survive_the_way_to_a_child_process(label: str) -> None:
    fields = dataclasses.fields(TYPES[label])
    settings = TYPES[label](**{field.name: another_value(field) for field in fields})
    assert parse(label, *arguments_of(settings)) == settings


@pytest.mark.parametrize("name", ["serve", "demo"])
def test_serve_and_demo_take_the_engines_settings_too(name: str) -> None:
    options = {parameter.name for parameter in cli.commands[name].params if isinstance(parameter, click.Option)}
    inner = {"listen", "kvmanager", "engine", "model_name", "engine_id"}
    assert options >= {field.name for field in dataclasses.fields(EngineSettings)} - inner


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    process: subprocess.Popen[str] = launch(*arguments, **environment)
    output, _ = process.communicate(timeout=START_SECONDS)
    return process.returncode, output


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (("engine", "--block-size", "0"), {}, "block_size is 0, it must be at least 1"),
        (("engine",), {"QUIRE_ENGINE_BLOCK_SIZE": "0"}, "block_size is 0, it must be at least 1"),
        (("engine",), {"QUIRE_ENGINE_BLOCK_SIZE": "many"}, "'--block-size': 'many' is not a valid integer"),
        (("serve",), {"QUIRE_SERVE_TOKEN_BUDGET": "5"}, "token_budget is 5, it must be at least max_sequences, 64"),
        (("gateway", "--max-requests", "0"), {}, "max_requests is 0, it must be at least 1"),
        (("kvmanager", "--grace-seconds", "-1"), {}, "grace_seconds is -1.0, it must be at least 0"),
        (("kvmanager", "--listen", ""), {}, "listen is empty"),
        (("engine", "--device", "abacus"), {}, "'abacus' is not one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_the_command_refuses_a_bad_setting_at_once_naming_it(
    arguments: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    status, output = run(*arguments, **environment)
    assert status == 2
    assert reason in " ".join(output.split())
    assert "Traceback" not in output
