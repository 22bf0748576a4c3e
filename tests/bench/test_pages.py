"""Generated blocks of pages, and pictures of results."""

import json
from pathlib import Path

import pytest

from bench.report import readme
from bench.report.pictures import PICTURES, draw
from bench.report.readme import NOT_MEASURED, Pages, filled
from bench.report.targets import results_of, targets


def write_result(folder: Path, benchmark: str, *, device: str = "amx", **values: float | None) -> None:
    """Write a result of a benchmark on a device."""
    rows = [{"metric": metric, "value": value, "unit": "ratio", "peer": "a peer"} for metric, value in values.items()]
    hardware = {"cpu": "Some CPU", "cores": 2, "machine": "x86_64"}
    result = {"benchmark": benchmark, "hardware": hardware, "commit": "abc1234", "rows": rows}
    (folder / device).mkdir(exist_ok=True)
    (folder / device / f"{benchmark}.json").write_text(json.dumps(result))


def lines_of(folder: Path) -> dict[str, str]:
    """Map each metric of a folder of results to its state."""
    metrics = [metric for group in targets().values() for metric in group if "_" in metric]
    return dict(zip(metrics, (line.met for line in Pages(folder).lines()), strict=True))


def test_a_line_shows_a_target_as_met_missed_or_not_measured(tmp_path: Path) -> None:
    values = {"b1_of_its_goal": 1.0, "b8_of_its_goal": 0.999, "b32_over_the_better_peer": None}
    write_result(tmp_path, "cpu", **values)
    state = lines_of(tmp_path)
    assert state["b1_of_its_goal"] == "yes"
    assert state["b8_of_its_goal"] == "no"
    assert state["b32_over_the_better_peer"] == NOT_MEASURED
    assert state["decode_of_the_read_bandwidth"] == NOT_MEASURED
    assert state.keys() >= {"swap_out_over_one_large_copy", "linear_fit_r2", "over_in_process"}


def test_the_table_has_a_line_for_each_target_and_the_list_all_missed_ones(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", b8_of_its_goal=0.9)
    pages = Pages(tmp_path)
    table, wanted = pages.block("performance").splitlines(), targets()
    count = sum("_" in metric for group in wanted.values() for metric in group)
    assert len(table) == 4 + len(wanted) + count
    assert table[0] == f"Of {count} targets 0 are met, 1 missed, {count - 1} not measured."
    assert "| **Tokens per second on the CPU**; amx: 2 cores of Some CPU (abc1234) | | | | |" in table
    words = wanted["cpu"]["b8_of_its_goal"]["words"]
    assert f"| {words} | **0.9** (amx) | at least 1 (a peer) | **no** | [amx](bench/results/amx/cpu.json) |" in table
    (missed,) = pages.block("missed").splitlines()
    assert words in missed
    with pytest.raises(KeyError):
        pages.block("nothing")


def test_a_line_shows_the_values_of_all_devices_and_is_met_if_all_meet_it(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", device="avx2", b1_of_its_goal=0.9, b8_of_its_goal=1.0)
    write_result(tmp_path, "cpu", device="amx", b1_of_its_goal=1.5, b8_of_its_goal=1.25)
    first, second = [line for line in Pages(tmp_path).lines() if line.values]
    assert (first.shown_values, first.met) == ("1.5 (amx), **0.9** (avx2)", "no")
    assert (second.shown_values, second.met) == ("1.25 (amx), 1 (avx2)", "yes")


def test_headlines_are_the_targets_with_a_headline_and_count_all_targets(tmp_path: Path) -> None:
    write_result(tmp_path, "cpu", b32_over_the_better_peer=0.9)
    pages = Pages(tmp_path)
    whole, headlines = (pages.block(name).splitlines() for name in ("performance", "headlines"))
    assert headlines[0] == whole[0]
    wanted = [one["headline"] for group in targets().values() for one in group.values() if "headline" in one]
    assert [line.split(" | ")[0].removeprefix("| ") for line in headlines[4:]] == wanted
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
    page.write_text("Before.\n<!-- performance: begin -->\nstale\n<!-- performance: end -->\nAfter.\n")
    text = filled(page, Pages(tmp_path))
    assert "](../bench/results/amx/cpu.json)" in text
    assert "stale" not in text
    assert text.startswith("Before.\n<!-- performance: begin -->\n")
    assert text.endswith("\n<!-- performance: end -->\nAfter.\n")
    page.write_text(text)
    assert filled(page, Pages(tmp_path)) == text


def test_the_pages_equal_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme.main(check=True) == 0, capsys.readouterr().err


def test_a_stale_page_is_detected_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- performance: begin -->\n<!-- performance: end -->\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "PAGES", (page,))
    assert readme.main(check=True) == 1
    assert readme.main(check=False) == 0
    assert "targets" in page.read_text()
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
    title, _, *lines = Pages(tmp_path).block("classes").splitlines()
    assert title.startswith("| class | program | 1 request, 32/64 tokens | 8, 128/64 |")
    assert lines == [
        "| amx | Vllm | - | - | - | - | - | 40 ms | - | - |",
        "| avx2 | Quire | - | 1,234 | - | - | - | - | - | - |",
        "| avx2 | Quire over the better | 1.25 | - | - | - | - | - | - | - |",
    ]
