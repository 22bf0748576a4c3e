"""The simulator: the same seed is the same story, what it found stays mended, and planted faults are found."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from engine.schedule import limits as limits_module
from kvmanager import KVManager
from simulation import scenario as scenario_module
from simulation.__main__ import main
from simulation.campaign import fails
from simulation.invariants.violation import Violation
from simulation.scenario import PlannedFault, Scenario, drawn
from simulation.shrinking import shrunk
from simulation.simulation import Simulation, violation_of
from simulation.source import source_of
from simulation.story import shortened, story_of
from tests.simulation.found_scenarios import FOUND
from tests.simulation.planted_faults import PLANTED, ROOT

# Chosen in conftest.py of all tests, which prints it.
SEED = int(os.environ.get("QUIRE_SIMULATION_SEED", "1"))
NEW_SEEDS_SECONDS = 45


def test_new_seeds_violate_no_invariant() -> None:
    command = [sys.executable, "-m", "simulation", "--seconds", str(NEW_SEEDS_SECONDS), "--seed", str(SEED)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert f"first seed: {SEED}" in run.stdout
    assert ", 0 events" not in run.stdout


@pytest.mark.parametrize("name", FOUND)
def test_what_the_simulator_found_stays_mended(name: str, folder: Path) -> None:
    assert violation_of(Simulation(FOUND[name], folder)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_is_the_same_story_each_time(seed: int, folder: Path) -> None:
    first, second = story_of(drawn(seed), folder), story_of(drawn(seed), folder)
    assert first == second
    assert len(first) > 10


def test_two_orders_of_one_scenario_are_two_stories(folder: Path) -> None:
    scenario = drawn(2)
    other = Scenario(**{**vars(scenario), "order": scenario.order + 1})
    assert story_of(scenario, folder) != story_of(other, folder)


def test_a_violation_is_made_small_and_told_as_a_story(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager.manager._check_not_older", lambda *_: None)  # an older incarnation may attach
    monkeypatch.setattr(KVManager, "check_latest", lambda *_: None)
    needed = (PlannedFault(1.0, "start a second engine", 0, 1.0), PlannedFault(2.0, "cut an engine", 0, 1.0))
    failing = replace(FOUND[next(iter(FOUND))], faults=needed)

    assert fails(failing, folder)
    smallest = shrunk(failing, lambda scenario: fails(scenario, folder))
    assert smallest.requests == ()
    story = story_of(smallest, folder)
    assert "violation   kvmanager: e0: incarnation" in story[-1]
    assert "which is newer" in story[-1]
    assert any("Attach: register" in line for line in story)


def test_violations_that_differ_in_names_and_numbers_are_of_one_kind(folder: Path) -> None:
    kinds = {Violation(text).kind for text in ("e0 waits for r12 since 1.5", "e1 waits for r3 since 20", "e1 waits")}
    assert len(kinds) == 2
    failing = FOUND[next(iter(FOUND))]
    assert not fails(failing, folder, "another kind")


def test_a_story_has_the_messages_that_are_lost(folder: Path) -> None:
    stories = [story_of(drawn(seed), folder) for seed in range(3)]
    assert any("lost: " in line for story in stories for line in story)


@pytest.mark.parametrize("seed", range(20))
def test_a_scenario_is_printed_as_source_that_makes_it_again(seed: int) -> None:
    names = {**vars(scenario_module), **vars(limits_module)}
    assert eval(source_of(drawn(seed)), names) == drawn(seed)


def test_a_message_is_shortened_without_the_names_of_its_verbs() -> None:
    repeated, salt = " ".join(f"token_ids: {token}" for token in (1, 2, 3)), '"aaaaaaaaaaaaaaaaaaaa"'
    text = f"step {{ allocates {{ {repeated} salt: {salt} }} frees {{ sequence: 4 }} }}"
    assert shortened(text) == 'step { allocates { token_ids: 1 2 3 salt: "aaaaaaaa.." } frees { sequence: 4 } }'


@pytest.mark.parametrize("options", [["--seconds", "0"], ["--seconds", "-5"], ["--count", "0"], ["--seed", "-1"]])
def test_options_that_would_simulate_nothing_are_refused(options: list[str]) -> None:
    refused = CliRunner().invoke(main, options)
    assert refused.exit_code == 2
    assert options[0] in refused.output


def test_a_scenario_is_made_small_without_what_does_not_matter() -> None:
    scenario = drawn(3)
    random = Random(4)
    needed = (random.choice(scenario.requests), random.choice(scenario.faults))

    def needs_both(smaller: Scenario) -> bool:
        names = [one.name for one in smaller.requests]
        return needed[0].name in names and needed[1] in smaller.faults

    smallest = shrunk(scenario, needs_both)
    assert (smallest.requests, smallest.faults) == ((needed[0]._replace(gateway=0),), (needed[1],))
    assert (smallest.steps, len(smallest.engines), len(smallest.gateways)) == ((), 1, 1)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_still_fits_the_product(name: str, tmp_path: Path) -> None:
    for edit in PLANTED[name]:
        file = tmp_path / edit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((ROOT / edit.path).read_text())
        edit.apply(tmp_path)
        compile(file.read_text(), edit.path, "exec")


def test_the_simulator_has_no_product_code_of_its_own() -> None:
    product = [file for room in ("blocks", "engine", "kvmanager", "services") for file in (ROOT / room).rglob("*.py")]
    assert [str(file) for file in product if "simulat" in file.read_text() and "bench" not in file.parts] == []
