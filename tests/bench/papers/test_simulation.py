"""Simulations: the virtual clock, the product's scheduler and core, and the averages."""

from pathlib import Path
from typing import Any

import pytest

from bench.loads.memory import DATA_VARIABLE, Lengths
from bench.papers.simulation.averages import Averages, Latencies
from bench.papers.simulation.beam_trace import NotRecorded, RecordedSearches, recorded
from bench.papers.simulation.capacity import bracket
from bench.papers.simulation.cost_model import InvalidCostModel, StepLoad, fit_of
from bench.papers.simulation.run import Simulation, simulate
from bench.papers.simulation.scenario import SYSTEMS, InvalidScenario, Scenario
from bench.papers.simulation.simulated_runner import FIRST_NODE, SimulatedRunner, VirtualClock, load_of
from bench.papers.simulation.traces import Arrival
from blocks import Copy
from engine.schedule.beams import Beams
from engine.schedule.request import BeamSearch, Sampling, Stopping
from engine.schedule.step_plan import Copies, StepPlan, Work
from tests.bench.papers.papers_data import write_traces

BASE: dict[str, Any] = {"model": "opt-13b", "device": "a100-40g", "blocks": 300, "workload": "sharegpt"}


@pytest.fixture(autouse=True)
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(write_traces(tmp_path)))


class OneSecond:
    """A cost model: one second a step."""

    def seconds(self, load: StepLoad) -> float:
        return 1.0


def work(sequence: int, tokens: int, start: int, **more: Any) -> Work:
    return Work(sequence, (0,) * tokens, start, (1,), True, Sampling(), **more)


# The runner.


def test_the_clock_stands_at_the_end_of_a_step_once_its_result_is_taken() -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(clock, OneSecond())
    first, second = runner.launch(StepPlan(1, (), ())), runner.launch(StepPlan(2, (), ()))
    assert clock() == 0.0
    first.result()
    assert clock() == 1.0
    second.result()
    assert clock() == 2.0


def test_a_step_after_a_pause_begins_at_its_launch() -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(clock, OneSecond())
    runner.launch(StepPlan(1, (), ())).result()
    clock.advance_to(5.0)
    runner.launch(StepPlan(2, (), ())).result()
    assert clock() == 6.0


def test_a_step_has_the_load_of_its_work_and_copies() -> None:
    copies = Copies((Copy(1, 2),), (Copy(3, 4), Copy(5, 6)), (Copy(7, 8),))
    plan = StepPlan(1, (copies,), (work(1, 1, 99), work(2, 1, 49), work(3, 20, 10)))
    assert load_of(plan) == StepLoad(2, 150, 20, 30**2 - 10**2, 1, 3)


def test_the_samples_of_a_request_differ() -> None:
    runner = SimulatedRunner(VirtualClock(), OneSecond())
    first, second = runner.launch(StepPlan(1, (), (work(1, 1, 5, sample_indices=(0, 1)),))).result()
    assert (first.token_id, second.token_id) == (0, 1)


def test_the_seconds_of_prompts_are_those_that_they_add_to_steps() -> None:
    runner = SimulatedRunner(VirtualClock(), fit_of("opt-13b", "a100-40g"))
    runner.launch(StepPlan(1, (), (work(1, 1, 99),)))
    assert runner.prompt_seconds == 0.0
    runner.launch(StepPlan(2, (), (work(1, 1, 99), work(2, 200, 0))))
    assert runner.prompt_seconds == pytest.approx(1e-3 * (0.1405 * 200 + 8.08e-6 * 200**2))


# Recorded searches: two of two beams and three steps. In the first, beam 1 is pruned and beam 0 goes on twice.
PARENTS = ("00" + "00" + "10", "00" + "01" + "01")


def test_a_beam_is_continued_by_those_that_continued_it_when_recorded() -> None:
    searches = RecordedSearches(2, PARENTS)
    assert searches.first(2) == searches.first(0) == [0, 1]
    assert [list(searches.children(node)) for node in (0, 1, 2, 3)] == [[2, 3], [], [5], [4]]


def test_a_search_longer_than_the_recorded_ones_goes_on_in_the_next() -> None:
    searches = RecordedSearches(2, PARENTS)
    assert [list(searches.children(node)) for node in (4, 5)] == [[10], [11]]
    assert [list(searches.children(node)) for node in (10, 11)] == [[5], [4]]


def test_the_engine_keeps_the_beams_of_the_recorded_search() -> None:
    """Nothing is recorded at random here: the tokens of the beams that the engine keeps are the nodes' own."""
    searches = RecordedSearches(2, PARENTS)
    runner = SimulatedRunner(VirtualClock(), OneSecond(), searches)
    beams = Beams(BeamSearch(2), Stopping(9))
    texts: list[tuple[int, ...]] = [()]
    kept = []
    for step in range(5):
        works = [work(1, 1, 5 + step, candidates=4)._replace(token_ids=(text[-1:] or (0,))) for text in texts]
        found = [one.top for one in runner.launch(StepPlan(step + 1, (), tuple(works))).result()]
        going_on = beams.advance(texts, found)
        texts = [(*texts[one.parent], one.token_id) for one in going_on]
        kept.append(sorted(text[-1] - FIRST_NODE for text in texts))
    assert kept[0] in ([0, 1], [6, 7])
    if kept[0] == [0, 1]:
        assert kept[1:] == [[2, 3], [4, 5], [10, 11], [4, 5]]


@pytest.mark.parametrize("width", [2, 4, 6])
def test_each_recorded_step_keeps_as_many_beams_as_the_width(width: int) -> None:
    searches = recorded(width)
    living = searches.first(3)
    for _ in range(1_000):
        living = [child for node in living for child in searches.children(node)]
        assert len(set(living)) == width


def test_a_width_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(NotRecorded, match="no searches of 3 beams were recorded, but of 2, 4, 6"):
        recorded(3)


# Averages.


def test_the_normalized_latency_is_the_mean_of_seconds_per_output_token() -> None:
    latencies = Latencies([Arrival(1.0, Lengths(5, 10)), Arrival(2.0, Lengths(5, 4)), Arrival(9.0, Lengths(1, 1))])
    latencies.end(0, 6.0)
    # The second has waited for 4 s, and the third has not arrived: a lower bound.
    assert latencies.mean(2, 6.0) == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    latencies.end(1, 8.0)
    latencies.end(2, 10.0)
    assert latencies.mean(3, 10.0) == pytest.approx((0.5 + 1.5 + 1.0) / 3)


def test_a_static_batch_ends_with_its_longest_request() -> None:
    latencies = Latencies([Arrival(0.0, Lengths(1, 2)), Arrival(0.0, Lengths(1, 4))])
    latencies.end(0, 2.0)
    latencies.end(1, 4.0)
    latencies.end_together([0, 1])
    assert latencies.mean(2, 4.0) == pytest.approx((2.0 + 1.0) / 2)


def test_batched_requests_are_weighed_by_the_duration_of_the_step() -> None:
    averages = Averages(10.0, 20.0)
    averages.add_step(2, 3.0)
    averages.add_step(8, 1.0)
    assert averages.batched == pytest.approx(3.5)
    assert [averages.open(time) for time in (9.9, 10.0, 20.0, 20.1)] == [False, True, True, False]


def test_shares_of_the_memory_count_the_same_for_each_step() -> None:
    averages = Averages(0.0, 1.0)
    averages.add_shares({"tokens": 0.2})
    averages.add_shares({"tokens": 0.6})
    assert averages.shares == pytest.approx({"tokens": 0.4})


# Runs.


@pytest.mark.parametrize("orca", ["oracle", "pow2"])
def test_with_little_load_orca_and_the_product_have_the_same_latencies(orca: str) -> None:
    """Memory never lacks, and the scheduler is the same."""
    scenario = {**BASE, "blocks": 40_000, "rate": 8.0, "seconds": 6.0, "latency_limit": 1e6}
    latencies = [simulate(system=system, **scenario)["normalized_latency"] for system in ("paged", orca)]
    assert latencies[0] == pytest.approx(latencies[1], rel=1e-9)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_request_of_a_drained_run_ends(system: str) -> None:
    result = simulate(system=system, rate=1.0, seconds=20.0, latency_limit=1e6, **BASE)
    assert result["finished"] == result["requests"] > 0
    assert not result["cut"]
    assert result["normalized_latency"] > 0.026  # no step is shorter


def test_a_run_without_a_limit_ends_with_the_last_arrival() -> None:
    result = simulate(system="max", rate=3.0, seconds=20.0, **BASE)
    assert result["normalized_latency"] is None
    assert result["finished"] < result["requests"]
    assert result["simulated_seconds"] < 21


def test_a_run_is_cut_when_its_latency_is_surely_above_the_limit() -> None:
    scenario = {"system": "max", "rate": 4.0, "seconds": 12.0, **BASE}
    cut, whole = (simulate(**scenario, latency_limit=limit) for limit in (0.1, 1e6))
    assert cut["cut"]
    assert 0.1 < cut["normalized_latency"] < whole["normalized_latency"]
    assert cut["simulated_seconds"] < whole["simulated_seconds"]


def test_the_same_scenario_has_the_same_result() -> None:
    first, second = (simulate(system="paged", rate=2.0, seconds=20.0, **BASE) for _ in range(2))
    assert {**first, "cpu_seconds": 0} == {**second, "cpu_seconds": 0}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_full_pool_preempts_and_loses_no_request(preemption: str) -> None:
    """The longest prompt and output take 125 blocks, so that a pool of 130 holds few of them."""
    scenario = {**BASE, "blocks": 130, "preemption": preemption}
    result = simulate(system="paged", rate=4.0, seconds=10.0, latency_limit=1e6, **scenario)
    assert result["preemptions"] > 0
    assert result["finished"] == result["requests"]


def test_shares_of_contiguous_memory_add_up_to_all_slots() -> None:
    result = simulate(system="pow2", rate=3.0, seconds=20.0, **BASE)
    assert sum(result["shares"].values()) == pytest.approx(1.0)
    assert min(result["shares"].values()) > 0


def test_the_papers_admission_holds_more_tokens_than_quires_own() -> None:
    """Requests wait at all times; Quire leaves a block free for each running sequence."""
    scenario = {**BASE, "blocks": 400, "rate": 6.0, "seconds": 60.0, "warm_up": 1 / 3}
    shares = [simulate(system="paged", growth_reserve=own, **scenario)["shares"] for own in (False, True)]
    assert shares[0]["tokens"] > shares[1]["tokens"] > 0.7


def test_a_common_prefix_is_shared_by_the_core_and_by_no_baseline() -> None:
    scenario = {**BASE, "workload": "translation", "prefix_tokens": 160, "seconds": 5.0, "rate": 8.0}
    shares = simulate(system="paged", **scenario)["shares"]
    assert shares["saved"] > 0.3 * shares["unshared"]
    assert "saved" not in simulate(system="oracle", **scenario)["shares"]


@pytest.mark.parametrize("kind", ["samples", "beams"])
@pytest.mark.parametrize("system", ["paged", "oracle"])
def test_requests_of_several_sequences_end_on_every_system(system: str, kind: str) -> None:
    scenario = {**BASE, kind: 4, "preemption": "swap", "blocks": 800}
    result = simulate(system=system, rate=0.5, seconds=8.0, latency_limit=1e6, **scenario)
    assert result["finished"] == result["requests"] > 0


def test_prompts_are_equal_in_their_prefix_only() -> None:
    scenario = Scenario(system="paged", rate=1.0, prefix_tokens=4, **BASE)
    prompts = [scenario.request(number, Arrival(0.0, Lengths(9, 1))).prompt for number in (0, 1, 49_999, 50_000)]
    assert {prompt[:4] for prompt in prompts} == {(0, 0, 0, 0)}
    assert len(set(prompts)) == 4
    assert all(len(prompt) == 9 for prompt in prompts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system": "orca"}, "system must be one of paged, oracle, pow2, max, fastertransformer, not 'orca'"),
        ({"preemption": "drop"}, "preemption must be one of recompute, swap, auto, not 'drop'"),
        ({"blocks": 0}, "blocks must be between 1 and"),
        ({"block_size": 4096}, "block_size must be between 1 and 2048, not 4096"),
        ({"samples": 0}, "samples must be between 1 and 64, not 0"),
        ({"beams": -1}, "beams must be between 0 and 6, not -1"),
        ({"beams": 7}, "beams must be between 0 and 6, not 7"),
        ({"beams": 3}, "beams must be one of 0, 2, 4, 6, not 3"),
        ({"beams": 2, "samples": 2}, "samples must be 1 with beams, not 2"),
        ({"cost": "best"}, "cost must be one of fit, low, middle, high, not 'best'"),
        ({"latency_limit": 0.0}, "latency_limit must be above 0, not 0.0"),
        ({"latency_limit": float("nan")}, "latency_limit must be above 0, not nan"),
        ({"prefix_tokens": -1}, "prefix_tokens must be between 0 and 2048, not -1"),
    ],
)
def test_an_impossible_scenario_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidScenario, match=message):
        Scenario(**{"system": "paged", "rate": 1.0, **BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"system": "max", "blocks": 100},
            "blocks: 100 blocks cannot hold the 1 slabs that max reserves for request r",
        ),
        ({"system": "fastertransformer", "blocks": 127}, "127 blocks cannot hold"),
        ({"system": "oracle", "samples": 64}, "300 blocks cannot hold the 64 slabs that oracle reserves"),
        ({"system": "paged", "blocks": 9}, r"request r\d+ of the trace does not fit: prompt .* the pool has 9"),
        ({"system": "paged", "samples": 64}, "of the trace does not fit"),
    ],
)
def test_a_memory_that_cannot_hold_a_request_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidScenario, match=message):
        simulate(**{"rate": 4.0, "seconds": 20.0, **BASE, **fields})


def test_a_request_is_in_the_batch_until_the_end_of_its_last_step(tmp_path: Path) -> None:
    """Requests of one step each, one at a time."""
    (tmp_path / "sharegpt_opt_lengths.csv").write_text("prompt_tokens,output_tokens\n2047,1\n")
    result = simulate(system="paged", rate=0.01, seconds=2000.0, latency_limit=1e6, **BASE)
    assert result["steps"] == result["finished"] > 0
    assert result["batched"] == 1.0


def test_an_unknown_device_of_a_scenario_is_refused() -> None:
    with pytest.raises(InvalidCostModel, match="no devices entry 'tpu'"):
        Simulation(Scenario(**{"system": "paged", "rate": 1.0, **BASE, "device": "tpu"}))


# Capacities.


@pytest.mark.parametrize("start", [1.0, 5.0, 30.0])
def test_the_bracket_of_a_capacity_encloses_it(start: float) -> None:
    low, high = bracket(start, lambda rate: (0.0 if rate < 7.0 else 9.0, False))
    assert low < 7.0 <= high
    assert high / low == pytest.approx(1.3)


def test_a_rate_of_which_only_a_lower_bound_is_known_is_not_sustained() -> None:
    assert bracket(1.0, lambda rate: (0.1, rate > 2.0))[1] > 2.0


def test_a_system_that_sustains_every_rate_has_no_capacity() -> None:
    with pytest.raises(ArithmeticError, match=r"every rate from 1 to 13\.\d+ a second is sustained"):
        bracket(1.0, lambda _: (0.1, False))
