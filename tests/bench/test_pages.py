"""Generated blocks of pages, and pictures of results."""

import json
from pathlib import Path

import pytest

from bench.report import readme, staleness
from bench.report.pictures import PICTURES, draw
from bench.report.readme import NOT_MEASURED, Pages, filled
from bench.report.targets import results_of, targets
from tests.bench.repositories import change, git


def write_result(folder: Path, benchmark: str, *, device: str = "amx", **values: float | None) -> None:
    """Write a result of a benchmark on a device."""
    rows = [{"metric": metric, "value": value, "unit": "ratio", "peer": "a peer"} for metric, value in values.items()]
    hardware = {"cpu": "Some CPU", "cores": 2, "machine": "x86_64"}
    result = {"benchmark": benchmark, "hardware": hardware, "commit": "abc1234", "repetitions": 5, "rows": rows}
    (folder / device).mkdir(exist_ok=True)
    (folder / device / f"{benchmark}.json").write_text(json.dumps(result))


def change_result(folder: Path, benchmark: str, *, device: str = "amx", **fields: object) -> None:
    """Change fields of a result, such as its commit; those of its rows if they are fields of rows."""
    path = folder / device / f"{benchmark}.json"
    result = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(result))


def pages_of(folder: Path) -> Pages:
    """Return pages of results whose code has not changed since."""
    return Pages(folder, behind=lambda *_: 0)


def lines_of(folder: Path) -> dict[str, str]:
    """Map each metric of a folder of results to its state."""
    metrics = [metric for group in targets().values() for metric in group if "_" in metric]
    return dict(zip(metrics, (line.met for line in pages_of(folder).lines()), strict=True))


def test_a_line_shows_a_target_as_met_missed_or_not_measured(tmp_path: Path) -> None:
    values = {"b1_of_its_goal": 1.0, "b8_of_its_goal": 0.999, "b32_over_the_better_peer": None}
    write_result(tmp_path, "cpu", **values)
    state = lines_of(tmp_path)
    assert state["b1_of_its_goal"] == "yes"
    assert state["b8_of_its_goal"] == "no"
    assert state["b32_over_the_better_peer"] == NOT_MEASURED
    assert state["decode_of_the_read_bandwidth"] == NOT_MEASURED
    assert state.keys() >= {"swap_out_over_one_large_copy", "linear_fit_r2", "over_in_process"}


def test_the_table_has_a_line_for_each_target_and_counts_them_by_state(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", b8_of_its_goal=0.9)
    pages = pages_of(tmp_path)
    table, wanted = pages.block("performance").splitlines(), targets()
    count = sum("_" in metric for group in wanted.values() for metric in group)
    assert len(table) == 4 + len(wanted) + count
    assert table[0] == (
        f"As of commit HEAD, of {count} targets 0 are met, 1 missed, 0 undecided, 0 void, 0 stale,"
        f" {count - 1} not measured."
    )
    assert "| **Tokens per second on the CPU**; amx: 2 cores of Some CPU (abc1234) | | | | |" in table
    words = wanted["cpu"]["b8_of_its_goal"]["words"]
    assert f"| {words} | **0.9** (amx) | at least 1 (a peer) | **no** | [amx](bench/results/amx/cpu.json) |" in table
    with pytest.raises(KeyError):
        pages.block("nothing")


def test_a_line_shows_the_values_of_all_devices_and_is_met_if_all_meet_it(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", device="avx2", b1_of_its_goal=0.9, b8_of_its_goal=1.0)
    write_result(tmp_path, "cpu", device="amx", b1_of_its_goal=1.5, b8_of_its_goal=1.25)
    first, second = [line for line in pages_of(tmp_path).lines() if line.values]
    assert (first.shown_values, first.met) == ("1.5 (amx), **0.9** (avx2)", "no")
    assert (second.shown_values, second.met) == ("1.25 (amx), 1 (avx2)", "yes")


def test_a_line_links_only_the_results_that_it_has_a_value_from(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", device="avx2", b8_of_its_goal=1.0)
    write_result(tmp_path, "cpu", device="amx", b1_of_its_goal=1.5)
    table = pages_of(tmp_path).block("performance").splitlines()
    links = {
        line.split(" | ")[1]: line.split(" | ")[-1].removesuffix(" |")
        for line in table
        if "](bench/results/" in line and "not measured" not in line
    }
    assert links == {
        "1.5 (amx)": "[amx](bench/results/amx/cpu.json)",
        "1 (avx2)": "[avx2](bench/results/avx2/cpu.json)",
    }


def test_headlines_begin_with_what_is_measured_and_are_the_targets_with_a_headline(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", b32_over_the_better_peer=0.9)
    headlines = pages_of(tmp_path).block("headlines").splitlines()
    assert headlines[0] == "| what | measured | target (peer) | met | from |"
    assert headlines[-1] == "As of commit HEAD."
    wanted = [one["headline"] for group in targets().values() for one in group.values() if "headline" in one]
    assert [line.split(" | ")[0].removeprefix("| ") for line in headlines[2:-2]] == wanted
    assert len(wanted) == 5
    (missed,) = [line for line in headlines if "**no**" in line]
    assert missed.endswith("| **0.9** (amx) | at least 1 (a peer) | **no** | [amx](bench/results/amx/cpu.json) |")


def test_a_generated_page_has_relative_links_and_keeps_the_text_outside_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    write_result(tmp_path, "cpu", b8_of_its_goal=0.9)
    page = tmp_path / "docs" / "page.md"
    page.write_text("Before.\n<!-- performance: begin -->\noutdated\n<!-- performance: end -->\nAfter.\n")
    text = filled(page, pages_of(tmp_path))
    assert "](../bench/results/amx/cpu.json)" in text
    assert "outdated" not in text
    assert text.startswith("Before.\n<!-- performance: begin -->\n")
    assert text.endswith("\n<!-- performance: end -->\nAfter.\n")
    page.write_text(text)
    assert filled(page, pages_of(tmp_path)) == text


def test_the_pages_equal_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme.main(check=True) == 0, capsys.readouterr().err


def test_a_page_that_differs_from_the_results_is_detected_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- performance: begin -->\n<!-- performance: end -->\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "PAGES", (page,))
    assert readme.main(check=True) == 1
    assert readme.main(check=False) == 0
    assert "targets" in page.read_text()
    assert readme.main(check=True) == 0


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"commit": "abc1234-dirty"}, "void"),
        ({"repetitions": 3}, "void"),
        ({"foreign_cores": 0.2}, "void"),
        ({"rows": [{"metric": "b1_of_its_goal", "value": 1.05, "unit": "ratio", "null": [0.9, 1.1]}]}, "undecided"),
        ({"rows": [{"metric": "b1_of_its_goal", "value": 1.36, "unit": "ratio", "limit": True}]}, "void"),
        ({}, "yes"),
    ],
)
def test_a_value_that_does_not_count_is_shown_with_its_reason(
    change: dict[str, object], state: str, tmp_path: Path
) -> None:
    write_result(tmp_path, "cpu", b1_of_its_goal=1.5)
    change_result(tmp_path, "cpu", **change)
    (line,) = [line for line in pages_of(tmp_path).lines() if line.values]
    assert line.met == state
    assert (f"(amx; {state}: " in line.shown_values) == (state != "yes")


def test_a_row_that_names_its_own_commit_is_judged_by_it(tmp_path: Path) -> None:
    write_result(
        tmp_path, "gpu", device="gpu", decode_of_the_read_bandwidth=0.95, ragged_decode_of_the_read_bandwidth=0.95
    )
    path = tmp_path / "gpu" / "gpu.json"
    result = json.loads(path.read_text())
    result["rows"][0]["commit"] = "0123abc-dirty"
    path.write_text(json.dumps(result))
    state = lines_of(tmp_path)
    assert state["decode_of_the_read_bandwidth"] == "void"
    assert state["ragged_decode_of_the_read_bandwidth"] == "yes"


def test_results_of_one_class_from_two_cpus_count_only_for_the_newest(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", b1_of_its_goal=1.5)
    write_result(tmp_path, "batch", over_in_process=0.99)
    older = {"cpu": "Another CPU", "cores": 2, "machine": "x86_64"}
    change_result(tmp_path, "cpu", started="2026-01-01", hardware=older)
    change_result(tmp_path, "batch", started="2026-01-02")
    state = lines_of(tmp_path)
    assert (state["b1_of_its_goal"], state["over_in_process"]) == ("void", "yes")


def test_a_target_is_met_by_the_device_that_counts(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", device="amx", b1_of_its_goal=1.5)
    write_result(tmp_path, "cpu", device="avx2", b1_of_its_goal=1.5)
    change_result(tmp_path, "cpu", device="amx", repetitions=1)
    assert lines_of(tmp_path)["b1_of_its_goal"] == "yes"
    change_result(tmp_path, "cpu", device="avx2", repetitions=1)
    assert lines_of(tmp_path)["b1_of_its_goal"] == "void"


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a result, and a page of headlines, in which `make readme` and its check run."""
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(staleness, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "PAGES", (tmp_path / "page.md",))
    monkeypatch.setattr(readme.Pages.__init__, "__defaults__", (tmp_path, tmp_path, "HEAD", None))
    staleness.is_ancestor.cache_clear()
    git(tmp_path, "init", "-q")
    change(tmp_path, "engine/kernel.py", "1")
    write_result(tmp_path, "cpu", b32_over_the_better_peer=1.5)
    change_result(tmp_path, "cpu", commit=git(tmp_path, "rev-parse", "--short=8", "HEAD"))
    page = "<!-- headlines: begin -->\n<!-- headlines: end -->\n"
    change(tmp_path, "page.md", page)
    return tmp_path


def test_the_check_fails_where_a_page_hides_a_stale_result_but_not_because_code_changed(history: Path) -> None:
    assert readme.main(check=False) == 0
    page = (history / "page.md").read_text()
    assert "| yes |" in page
    change(history, "engine/kernel.py", "2")
    assert readme.main(check=True) == 0  # the page says as of which commit it holds
    hidden = page.replace(
        git(history, "rev-parse", "--short=8", "HEAD~1"), git(history, "rev-parse", "--short=8", "HEAD")
    )
    (history / "page.md").write_text(hidden)
    assert readme.main(check=True) == 1
    assert readme.main(check=False) == 0
    assert "stale: 1 commit behind" in (history / "page.md").read_text()
    assert readme.main(check=True) == 0


def test_a_page_may_not_be_as_of_a_commit_before_the_results_or_of_another_history(history: Path) -> None:
    old = git(history, "rev-parse", "--short=8", "HEAD~1")
    change(history, "engine/kernel.py", "2")
    change_result(history, "cpu", commit=git(history, "rev-parse", "--short=8", "HEAD"))
    assert readme.main(check=False) == 0
    page = (history / "page.md").read_text()
    for as_of in (old, "0123abcd"):
        (history / "page.md").write_text(readme._AS_OF.sub(f"As of commit {as_of}", page))
        assert readme.main(check=True) == 1


def test_a_page_of_which_only_the_commit_would_change_is_not_rewritten(history: Path) -> None:
    assert readme.main(check=False) == 0
    page = (history / "page.md").read_text()
    change(history, "docs/page.md", "1")
    assert readme.main(check=False) == 0
    assert (history / "page.md").read_text() == page


def test_a_page_that_is_older_than_a_result_which_it_does_not_show_is_rewritten(history: Path) -> None:
    assert readme.main(check=False) == 0
    change(history, "docs/page.md", "1")
    write_result(history, "amplification", default_port_files=1)  # has no headline
    change_result(history, "amplification", commit=git(history, "rev-parse", "--short=8", "HEAD"))
    assert readme.main(check=True) == 1
    assert readme.main(check=False) == 0
    assert readme.main(check=True) == 0


@pytest.mark.parametrize("benchmark", [name for name in PICTURES if results_of(name)])
def test_a_result_is_drawn_from_its_file_alone(benchmark: str, tmp_path: Path) -> None:
    picture = draw(benchmark, images=tmp_path)
    assert picture == tmp_path / f"bench-{benchmark}.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_unmeasured_gpu_benchmark_has_a_picture_as_soon_as_it_has_a_result(tmp_path: Path) -> None:
    assert draw("gpu", tmp_path, tmp_path) is None
    rows = [{"metric": "decode_over_flex_attention", "value": 1.5, "target": 1.3}]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "gpu.json").write_text(json.dumps({"rows": rows}))
    picture = draw("gpu", tmp_path, tmp_path)
    assert picture is not None
    assert picture.stat().st_size > 5_000


def test_classes_shows_each_program_and_ratio_of_each_class_that_was_measured(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", device="avx2", b1_over_the_better_peer=1.25, b8_quire_tokens_per_second=1234.5)
    write_result(tmp_path, "cpu", device="amx", first_token_128_vllm_ms=39.6)
    title, _, *lines = pages_of(tmp_path).block("classes").splitlines()
    assert title.startswith("| class | program | 1 request, 32/64 tokens | 8, 128/64 |")
    assert lines == [
        "| amx | Vllm | - | - | - | - | - | 40 ms | - | - |",
        "| avx2 | Quire | - | 1,234 | - | - | - | - | - | - |",
        "| avx2 | Quire over the better | 1.25 | - | - | - | - | - | - | - |",
    ]
