"""The kernels compile for a GPU, for every kind of shape; `make test` compiles two kinds."""

from tests.engine.triton_kernels.test_triton_compiles import check_kernels


def test_every_kernel_compiles_for_every_kind_of_shape() -> None:
    check_kernels("all")
