"""The commands of `make papers` as processes, on traces of our own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from bench.loads.memory import DATA_VARIABLE
from bench.papers.__main__ import main
from bench.papers.case import Case
from bench.papers.execution import run_cases
from bench.papers.figures import all_figures
from bench.papers.page import large_deviations, name_of, table
from bench.papers.results import publish, read
from bench.papers.rows import Kind, paper_row, stated
from bench.papers.simulation.run import simulate
from bench.papers.store import Store, code_digest
from bench.report.targets import ROOT, targets
from bench.report.terms import Terms, UnequalTerms
from tests.bench.papers.papers_data import write_traces
from tests.faults import wait_until

SCENARIO = {
    "system": "paged",
    "model": "opt-13b",
    "device": "a100-40g",
    "blocks": 300,
    "workload": "sharegpt",
    "rate": 2.0,
    "seconds": 5.0,
}


def papers(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, DATA_VARIABLE: str(data), "COLUMNS": "160"}
    command = [sys.executable, "-m", "bench.papers", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def in_process(data: Path, *arguments: str) -> Result:
    """The same command without the seconds that a process needs to import it."""
    return CliRunner().invoke(main, arguments, env={DATA_VARIABLE: str(data), "COLUMNS": "160"})


def options(**scenario: Any) -> list[str]:
    pairs = {**SCENARIO, **scenario}.items()
    return [text for name, value in pairs for text in (f"--{name.replace('_', '-')}", str(value))]


def test_a_quick_figure_is_computed_once_and_drawn(tmp_path: Path) -> None:
    data, output = write_traces(tmp_path), tmp_path / "output"
    arguments = ("figures", "--quick", "--only", "figure_2", "--only", "table_1", "--output", str(output))
    first = papers(data, *arguments)
    assert first.returncode == 0, first.stderr
    result = json.loads((output / "papers.json").read_text())
    rows = {row["metric"]: row for row in result["rows"]}
    assert result["computed_cases"] == 5
    orca = [rows[f"figure_2_max_{kind}_share"]["value"] for kind in ("tokens", "reserved", "internal", "external")]
    assert sum(orca) == pytest.approx(1.0, abs=1e-3)
    assert orca[3] == pytest.approx(0.0885, abs=0.02)  # seven slabs of 2,048 of 15,728 slots, nearly always all
    assert rows["figure_2_paged_tokens_share"]["kind"] == "simulated"
    assert rows["table_1_opt_13b_slots_thousands"]["deviation"] == 0
    assert [rows[f"table_1_largest_deviation_of_{one}"]["value"] for one in ("slots", "gibibytes")] == [0, 0]
    assert rows["figure_2_paged_tokens_share"]["terms"]["simulated"]["work"] == "figure_2"
    assert "engine/schedule" in rows["figure_2_paged_tokens_share"]["code"]
    assert (output / "papers-figure_2.png").stat().st_size > 10_000
    assert {row["figure"] for row in result["rows"] if row["target"] is not None} == {"table_1"}, (
        "which is no quick run"
    )
    assert papers(data, *arguments).returncode == 0
    assert json.loads((output / "papers.json").read_text())["computed_cases"] == 0


def test_missing_files_are_named_before_anything_is_computed(tmp_path: Path) -> None:
    data = write_traces(tmp_path)
    (data / "newstest2014_en.txt").unlink()
    (data / "sharegpt_8k_lengths.csv").unlink()
    done = in_process(data, "figures", "--quick", "--output", str(tmp_path / "output"))
    assert done.exit_code == 2
    lacking = f"{data} has no newstest2014_en.txt, sharegpt_8k_lengths.csv"
    assert lacking in " ".join(done.stderr.replace("wikitext2_valid.txt", "").split()).replace("│", "").strip(" ,")
    assert not list((tmp_path / "output").rglob("*.json"))


def test_a_quick_capacity_is_marked_as_too_high_and_has_no_verdict(tmp_path: Path) -> None:
    data, output = write_traces(tmp_path), tmp_path / "output"
    done = in_process(data, "figures", "--quick", "--only", "figure_16", "--output", str(output), "--workers", "2")
    assert done.exit_code == 0, done.output
    rows = {row["metric"]: row for row in json.loads((output / "papers.json").read_text())["rows"]}
    assert rows["figure_16_five_shot_paged_capacity_too_high"]["value"] > 0
    assert "figure_16_five_shot_distance_of_short_traces" in rows
    assert all(row["target"] is row["met"] is None for row in rows.values())
    assert "True" not in done.stdout
    assert "False" not in done.stdout


def test_an_update_needs_results_to_keep(tmp_path: Path) -> None:
    done = in_process(tmp_path, "figures", "--only", "table_1", "--update", "--output", str(tmp_path))
    assert done.exit_code == 2
    assert "has no papers.json" in " ".join(done.stderr.split())


def test_a_figure_that_is_named_twice_has_its_rows_once(tmp_path: Path) -> None:
    done = in_process(tmp_path, "figures", *("--only", "table_1") * 2, "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    metrics = [row["metric"] for row in json.loads((tmp_path / "papers.json").read_text())["rows"]]
    assert len(set(metrics)) == len(metrics)


def test_a_case_that_cannot_be_kept_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    data, output = write_traces(tmp_path), tmp_path / "output"
    (output / "quick" / "figure_18b_sharegpt_16.json").mkdir(parents=True)
    done = in_process(data, "figures", "--quick", "--only", "figure_18b", "--output", str(output))
    assert done.exit_code == 1
    assert "figure_18b_sharegpt_16: IsADirectoryError" in done.stdout
    assert (output / "quick" / "figure_18b_alpaca_16.json").is_file()


def test_an_update_needs_whole_traces(tmp_path: Path) -> None:
    done = in_process(tmp_path, "figures", "--quick", "--update")
    assert done.exit_code == 2
    assert "short traces update no results" in " ".join(done.stderr.split())


def test_a_scenario_is_simulated_by_its_options(tmp_path: Path) -> None:
    done = papers(write_traces(tmp_path), "simulate", *options(latency_limit=1e6))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["results"]["finished"] == found["results"]["requests"] > 0
    assert found["scenario"]["rate"] == SCENARIO["rate"]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ({"device": "tpu"}, "no devices entry 'tpu'"),
        ({"model": "opt-66b"}, "weights take 132.0 GB"),
        ({"workload": "none"}, "no workload 'none'"),
        ({"system": "none"}, "'none' is not one of"),
        ({"rate": 0}, "rate and seconds must be finite and above 0"),
        ({"ranks": 7, "cost": "middle"}, "ranks must be a divisor"),
    ],
)
def test_a_wrong_scenario_is_refused_by_name(tmp_path: Path, scenario: dict[str, Any], message: str) -> None:
    done = in_process(write_traces(tmp_path), "simulate", *options(**scenario))
    assert done.exit_code == 2, done.exception
    assert message in " ".join(done.stderr.split())


def test_an_unknown_figure_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = in_process(tmp_path, "figures", "--only", "figure_99")
    assert done.exit_code == 2
    assert "no figure 'figure_99': there are table_1, figure_2" in " ".join(done.stderr.split())


@pytest.mark.parametrize("output", ["file", "file/folder", "/proc/none"])
def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("")
    done = in_process(tmp_path, "figures", "--quick", "--only", "figure_12", "--output", str(tmp_path / output))
    assert done.exit_code == 2
    assert "--output: " in done.stderr
    assert "cannot be written" in " ".join(done.stderr.split())


def test_a_case_without_its_trace_fails_by_name_and_the_others_are_kept(tmp_path: Path) -> None:
    data, output = write_traces(tmp_path), tmp_path / "output"
    (data / "alpaca_lengths.csv").write_text("prompt_tokens,output_tokens\n1,x\n")
    done = papers(data, "figures", "--quick", "--only", "figure_18b", "--output", str(output))
    assert done.returncode == 1
    assert "figure_18b_alpaca_16: InvalidTrace" in done.stdout
    assert "line 2" in done.stdout
    assert not (output / "papers.json").exists()
    assert (output / "quick" / "figure_18b_sharegpt_16.json").exists()


# Parts.


def double(number: int) -> dict[str, int]:
    return {"pid": os.getpid(), "twice": 2 * number}


def fail(number: int) -> dict[str, int]:
    raise ValueError(f"no {number}")


def test_cases_run_in_processes_of_their_own_and_timed_ones_last() -> None:
    ended: list[tuple[str, Any]] = []
    cases = [
        Case("timed", double, {"number": 1}, timed=True),
        Case("a", double, {"number": 2}),
        Case("b", fail, {"number": 3}),
    ]
    run_cases(cases, 2, lambda case, found: ended.append((case.name, found)))
    assert ended[-1][0] == "timed"
    found = dict(ended)
    assert (found["timed"]["twice"], found["a"]["twice"]) == (2, 4)
    assert os.getpid() != found["a"]["pid"] != found["timed"]["pid"]
    assert str(found["b"]) == "no 3"


def endless() -> dict[str, int]:
    while True:
        time.sleep(1)


def test_an_interrupt_of_the_process_alone_ends_it_and_its_cases() -> None:
    program = "from bench.papers.case import Case; from bench.papers.execution import run_cases; "
    program += "from tests.bench.papers.test_papers_command import endless; "
    program += "run_cases([Case(str(one), endless, {}) for one in range(9)], 2, print)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        children = psutil.Process(process.pid).children
        wait_until(lambda: len(children()) >= 2, "two cases run")
        cases = children()
        process.send_signal(signal.SIGINT)
        try:
            assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert psutil.wait_procs(cases, timeout=30)[1] == []


def test_values_are_kept_for_the_same_arguments_and_traces_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, case = Store(tmp_path / "store"), Case("one", simulate, {"rate": 1.0})
    store.put(case, {"steps": 3})
    assert Store(tmp_path / "store").find(case) == {"steps": 3}
    assert store.find(case._replace(arguments={"rate": 2.0})) is None
    assert store.find(case._replace(name="other")) is None
    monkeypatch.setenv(DATA_VARIABLE, str(write_traces(tmp_path)))
    assert store.find(case) is None


def test_a_broken_file_of_values_is_computed_again(tmp_path: Path) -> None:
    store, case = Store(tmp_path), Case("one", simulate, {})
    store.put(case, {"steps": 3})
    whole = (tmp_path / "one.json").read_text()
    for text in ("", "{", "[]", "{}", "[" * 100_000, whole.replace('{"steps": 3}', '"x"')):
        (tmp_path / "one.json").write_text(text)
        assert store.find(case) is None


def test_comments_and_docstrings_do_not_change_the_digest_of_code(tmp_path: Path) -> None:
    sources = {
        "plain": "def f():\n    return 1\n",
        "documented": '"""Module."""\n\n\ndef f():\n    """Return 1."""\n    return 1  # as it is\n',
        "other": "def f():\n    return 2\n",
    }
    digests = {}
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(source)
        digests[name] = code_digest(tmp_path / name)
    assert digests["plain"] == digests["documented"] != digests["other"]


# Figures and rows.


def test_names_of_figures_and_cases_are_unique() -> None:
    figures = all_figures()
    assert len({figure.name for figure in figures}) == len(figures)
    for quick in (False, True):
        cases = [case for figure in figures for case in figure.cases(quick)]
        assert len({case.name for case in cases}) == len({(case.name, json.dumps(case.arguments)) for case in cases})


def test_every_target_of_the_papers_is_the_row_of_a_figure() -> None:
    names = tuple(f"{figure.name}_" for figure in all_figures())
    assert [metric for metric in targets()["papers"] if metric != "title" and not metric.startswith(names)] == []


def test_a_row_has_the_papers_value_its_deviation_and_its_target() -> None:
    row = paper_row("figure_13", "sharegpt_paged_requests", 33.462, "requests", Kind.SIMULATED)
    assert (row.paper, row.deviation, row.peer) == (30.42, 0.1, "paper")
    missed = paper_row("figure_13", "sharegpt_largest_distance", 0.2, "ratio", Kind.SIMULATED)
    assert (missed.target, missed.met, missed.paper, missed.deviation) == (0.03, False, None, None)
    absent = paper_row("figure_13", "sharegpt_paged_requests", None, "requests", Kind.SIMULATED)
    assert absent.deviation is None


TERMS = asdict(Terms(weights="bfloat16", work="a token"))


def test_a_measured_row_has_the_terms_of_its_own_case_or_of_all_that_differ() -> None:
    values = {"flex_figure_3_cpu": {"terms": TERMS}, "flex_figure_3_flex": {"terms": {**TERMS, "weights": "float32"}}}
    own, whole = (
        paper_row("flex_figure_3", metric, 1.0, "ms", Kind.MEASURED) for metric in ("flex_cached_128_ms", "growth")
    )
    assert {name: terms.weights for name, terms in stated(own, values).terms.items()} == {
        "flex_figure_3_flex": "float32"
    }
    with pytest.raises(UnequalTerms, match="flex_figure_3_growth: weights is"):
        stated(whole, values)


def test_an_update_keeps_other_figures_with_their_origin(tmp_path: Path) -> None:
    order = ["table_1", "figure_2", "figure_13"]

    def publish_one(figure: str, value: float, *, update: bool) -> list[dict[str, Any]]:
        row = paper_row(figure, "metric", value, "1", Kind.ARITHMETIC)
        publish([row], tmp_path, order, update=update)
        rows: list[dict[str, Any]] = read(tmp_path)["rows"]
        return rows

    publish_one("figure_13", 1.0, update=False)
    publish_one("table_1", 2.0, update=True)
    rows = publish_one("table_1", 3.0, update=True)
    assert [(row["figure"], row["value"], "day" in row) for row in rows] == [
        ("table_1", 3.0, False),
        ("figure_13", 1.0, True),
    ]


def test_the_table_of_the_page_shows_large_deviations_in_bold(tmp_path: Path) -> None:
    assert "make papers" in table(tmp_path)
    rows = [
        {"figure": "figure_13", "metric": f"figure_13_{name}", "value": value, "unit": "1", "paper": 10.0,
         "deviation": value / 10 - 1, "kind": "simulated"}
        for name, value in (("near", 10.5), ("far", 12.0))
    ]  # fmt: skip
    hardware = {"cores": 2, "cpu": "Some CPU", "device": "amx"}
    found = {"rows": rows, "hardware": hardware, "commit": "abc", "started": "2026-01-01T00:00:00"}
    (tmp_path / "papers.json").write_text(json.dumps(found))
    line = table(tmp_path).splitlines()[-1]
    assert line == "| 13 | near 10.5 / 10 (+5.0%); far **12 / 10 (+20.0%)** | simulated |"
    assert large_deviations(rows) == {"figure_13": ["figure_13_far"]}
    assert [name_of(name) for name in ("figure_18b_kernels", "flex_figure_3", "table_1")] == [
        "18b kernels",
        "Flex 3",
        "Table 1",
    ]


def test_the_page_explains_every_figure_that_deviates_by_more_than_ten_per_cent() -> None:
    page = (ROOT / "docs" / "deviations.md").read_text()
    headings = {name for bold in re.findall(r"^\* \*\*(.+?)\*\*", page, re.MULTILINE) for name in bold.split(", ")}
    deviating = {name_of(figure).split()[0] for figure in large_deviations(read()["rows"])}
    assert deviating - {heading.split()[0] for heading in headings} == set()
