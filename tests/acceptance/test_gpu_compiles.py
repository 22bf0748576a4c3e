"""The kernels compile for a GPU, for every kind of shape, and by an older Triton; `make test` compiles one kind."""

from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.engine.gpu_resources import PROCESSORS
from tests.engine.gpu_table import OLDER, PAGE, cells_on, older, rows_of
from tests.engine.triton_kernels.test_repeated_launches import check_repeated
from tests.engine.triton_kernels.test_triton_compiles import check_kernels

CAPABILITIES = [str(one) for one in PROCESSORS]


@pytest.fixture(scope="module")
def older_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an older Triton only."""
    return older(tmp_path_factory.mktemp("older"))


def test_every_kernel_compiles_for_every_kind_of_shape_and_gpu(record: Record) -> None:
    found = check_kernels("all", "sampler", *CAPABILITIES)
    record(most_shared=max(one.shared for one in found), most_stack=max(one.stack for one in found))


def test_every_kernel_compiles_by_an_older_triton(record: Record, older_triton: Path) -> None:
    found = check_kernels("all", "sampler", *CAPABILITIES, packages=older_triton)
    record(most_shared=max(one.shared for one in found), most_stack=max(one.stack for one in found))


def test_layers_repeat_launches_of_an_older_triton_too(older_triton: Path) -> None:
    check_repeated(older_triton)


def test_the_page_of_kernels_has_what_two_compilers_make(record: Record, older_triton: Path) -> None:
    page, compared = PAGE.read_text(), 0
    for packages in (None, older_triton):
        version, rows = rows_of(packages, PROCESSORS)
        assert packages is None or version == OLDER
        assert cells_on(page, version) == {(row.kernel, row.capability): row.cells() for row in rows}
        compared += len(rows)
    record(compared=compared)
