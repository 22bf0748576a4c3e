"""The page of the GPU's kernels names every kernel, and has what the installed compiler makes of some of them."""

from dataclasses import replace

import pytest

from tests.engine.gpu_resources import PROCESSORS
from tests.engine.gpu_table import PAGE, Row, cells_on, label_of, rows_of, table
from tests.engine.machine_code import counted
from tests.engine.triton_case import make_triton_backend
from tests.engine.triton_kernels.test_triton_compiles import KERNELS, SAMPLER

ROW = Row(90, "copy WORDS=2048", 4, 48, 0, 1024, 10, [3, 3], 159, [130], "8 bytes", 8.1)
# Two loops, the first around another one, and padding behind the last return.
CODE = """
LDG.E R0, [R2] / FADD R1, R0, R1 / @P0 BRA 0x010 / FADD R4, R4, R1 / @P1 BRA 0x000
IADD3 R5, R5, 0x1, RZ / HMMA.16816.F32.BF16 R8, R4, R6, R8 / @!P0 BRA 0x050 / EXIT / BRA 0x090 / NOP
"""


def test_instructions_are_counted_in_all_and_in_innermost_loops() -> None:
    code = [(16 * at, text.strip()) for at, text in enumerate(CODE.replace("\n", " / ").strip(" /").split(" / "))]
    found = counted(code)
    assert found.instructions == 9
    assert found.loops == ((2, 1, False), (3, 0, True))


def test_a_page_returns_what_was_written_and_equal_figures_share_a_line() -> None:
    other = replace(ROW, registers=50)
    text = table({"3.7.1": [ROW, replace(ROW, capability=80)], "3.6.0": [ROW, replace(other, capability=80)]})
    assert text.count("\n") == 2 + 3
    page = f"before\n<!-- begin of the table -->\n{text}<!-- end of the table -->\nbehind\n"
    for version, of_80 in (("3.7.1", ROW), ("3.6.0", other)):
        assert cells_on(page, version) == {(ROW.kernel, 90): ROW.cells(), (ROW.kernel, 80): of_80.cells()}


def test_the_page_names_every_kernel_for_every_capability() -> None:
    page = PAGE.read_text()
    for version in ("3.7.1", "3.6.0"):
        named = {(kernel.split()[0], capability) for kernel, capability in cells_on(page, version)}
        kernels = {label_of(one, {}) for one in (KERNELS | SAMPLER) - {"_read"}}
        assert named == {(kernel, capability) for kernel in kernels for capability in PROCESSORS}


def test_a_thread_takes_at_most_300_instructions_for_its_candidates_in_a_round_of_top_ps_search() -> None:
    """A program of 256 threads reads 1,024 candidates at a time; the page counts the instructions of all threads."""
    page = PAGE.read_text()
    found = {
        (version, capability): float(cells.rsplit(" | ", 1)[1]) * 1024 / 256
        for version in ("3.7.1", "3.6.0")
        for (kernel, capability), cells in cells_on(page, version).items()
        if kernel == "choose FILTERS=True"
    }
    assert len(found) == 2 * len(PROCESSORS)
    assert max(found.values()) <= 300


def test_the_page_has_what_the_installed_compiler_makes_of_kernels_without_cache() -> None:
    make_triton_backend()
    version, rows = rows_of(None, [90], "few")
    found = cells_on(PAGE.read_text(), version)
    if not found:
        pytest.skip(f"the page does not have Triton {version}")
    assert len(rows) >= 5
    assert {(row.kernel, 90): found.get((row.kernel, 90)) for row in rows} == {
        (row.kernel, 90): row.cells() for row in rows
    }, "run `make gpu-compile`"
