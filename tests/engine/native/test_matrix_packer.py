"""What a matrix becomes: strips if the kernels multiply its values, else bfloat16, with no trace of what was tried."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from engine.errors import ModelUnsupported
from engine.native import matrix_packer
from engine.native.formats.coded import ALL
from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import packed_bytes
from engine.native.kernels import Kernels
from engine.native.matrix_packer import MatrixPacker
from tests.engine import native_kernels
from tests.engine.grouped_weights import order_within_groups, ordered, random_weights, rows_of

INPUTS = 64
ORDERS = tuple(order_within_groups(INPUTS, seed) for seed in range(2))


class Given:
    """Matrices by name; what is only a tensor is dense."""

    def __init__(self, matrices: Mapping[str, GroupedWeights | torch.Tensor]) -> None:
        self._matrices = matrices

    def shape(self, name: str) -> Sequence[int] | None:
        return self._matrices[name].shape if name in self._matrices else None

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor | None:
        found = self._matrices.get(name)
        if found is None:
            return None
        return as_tensor(found)[rows] if isinstance(found, GroupedWeights) else found[rows]

    def grouped(self, name: str, rows: slice = ALL) -> GroupedWeights | None:
        found = self._matrices.get(name)
        return rows_of(found, rows) if isinstance(found, GroupedWeights) else None

    def tied(self) -> bool:
        return False


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return native_kernels.kernels("avx2")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_packer, "_PIECE", 16 * INPUTS)


def matrix(outputs: int = 48, kind: str = "Q4_0", seed: int = 0) -> GroupedWeights:
    return random_weights(kind, outputs, INPUTS, seed)


def inexact_at_last(weights: GroupedWeights) -> GroupedWeights:
    """Return weights whose last piece has a scale that no kernel has."""
    scales = weights.scales.copy()
    scales[-1, 0] = np.float32(1) / 3
    return weights._replace(scales=scales)


def dense_bytes(packer: MatrixPacker) -> bytes:
    """Return what was packed last."""
    packed: torch.Tensor = packer.kept[-1]
    return packed.numpy().tobytes()


def as_tensor(weights: GroupedWeights) -> torch.Tensor:
    return torch.from_numpy(weights.dense())


def test_pieces_of_a_matrix_have_formats_of_their_own(kernels: Kernels) -> None:
    weights = matrix(48, "W8A16")
    scales = weights.scales.copy()
    scales[:16] = 1
    packer = MatrixPacker(kernels, Given({"one": weights._replace(scales=scales)}), 1)
    packed = packer.matrix("one")
    assert packed.count == 3
    assert packed.order is None
    strips: np.ndarray = packer.kept[-1]
    assert len(set(strips["format"])) == 2
    for output in (0, 15, 16, 47):
        found = kernels.read_grouped(strips, INPUTS, output)
        assert np.array_equal(found, weights._replace(scales=scales).dense()[output])


@pytest.mark.parametrize("outputs", [16, 17, 40])
def test_a_matrix_without_a_kernel_is_packed_as_its_dense_values_are(kernels: Kernels, outputs: int) -> None:
    """Though its first pieces were strips."""
    weights = inexact_at_last(matrix(outputs))
    tried = MatrixPacker(kernels, Given({"one": weights}), 1)
    plain = MatrixPacker(kernels, Given({"one": as_tensor(weights)}), 1)
    for packer in (tried, plain):
        packed = packer.matrix("one")
        assert packed.dense
        assert not packed.strips
        assert len(packer.kept) == 1
    assert dense_bytes(tried) == dense_bytes(plain)


def test_the_memory_of_strips_that_are_given_up_is_zero_again(kernels: Kernels) -> None:
    """Dense matrices are packed into zeros, which their padding stays."""
    few = matrix(2)
    others: dict[str, GroupedWeights | torch.Tensor] = {"k": as_tensor(matrix(seed=1)), "o": matrix()}
    tried = MatrixPacker(kernels, Given(others | {"q": few}), 1)
    plain = MatrixPacker(kernels, Given(others | {"q": as_tensor(few)}), 1)
    for packer in (tried, plain):
        assert packer.matrix("o").strips  # the others share its memory
        assert packer.matrix("q", "k").dense
    assert dense_bytes(tried) == dense_bytes(plain)


def test_matrices_that_are_multiplied_together_are_all_strips_or_none(kernels: Kernels) -> None:
    quantized, dense = matrix(), as_tensor(matrix(seed=1))
    packer = MatrixPacker(kernels, Given({"q": quantized, "k": dense, "gate": quantized, "down": quantized}), 1)
    assert packer.matrix("q", "k").dense
    assert packer.matrix("q", "q").strips
    gates, down = packer.mlp("gate", "gate", "down")
    assert (gates.count, down.count) == (6, 3)
    gates, down = packer.mlp("gate", "q", "k")
    assert gates.dense
    assert down.dense


@pytest.mark.parametrize("orders", [(ORDERS[0], ORDERS[1]), (None, ORDERS[0]), (ORDERS[0], None)])
def test_matrices_whose_rows_have_orders_of_their_own_are_dense(
    kernels: Kernels, orders: tuple[np.ndarray | None, np.ndarray | None]
) -> None:
    first, second = (matrix(seed=1) if one is None else ordered(matrix(), one) for one in orders)
    packer = MatrixPacker(kernels, Given({"q": first, "k": second, "down": ordered(matrix(), ORDERS[1])}), 1)
    assert packer.matrix("q", "k").dense
    gates, down = packer.mlp("q", "k", "down")
    assert gates.dense
    assert down.dense


def test_a_shared_order_is_that_of_the_rows(kernels: Kernels) -> None:
    first, other = ORDERS
    given = {"q": ordered(matrix(), first), "down": ordered(matrix(), other), "o": matrix()}
    packer = MatrixPacker(kernels, Given(given), 1)
    for packed, order in ((packer.matrix("q", "q"), first), (packer.matrix("o"), None)):
        assert order_of(packer, packed.order, order)
    for packed, order in zip(packer.mlp("q", "q", "down"), (first, other), strict=True):
        assert order_of(packer, packed.order, order)


def order_of(packer: MatrixPacker, address: int | None, order: np.ndarray | None) -> bool:
    if order is None:
        return address is None
    found = next(one for one in packer.kept if isinstance(one, np.ndarray) and one.ctypes.data == address)
    return found.dtype == np.int32 and np.array_equal(found, order)


def test_experts_with_an_order_are_dense(kernels: Kernels) -> None:
    given = {"gate": matrix(), "up": matrix(seed=1), "down": ordered(matrix(), ORDERS[0]), "other": matrix(seed=2)}
    packer = MatrixPacker(kernels, Given(given), 1)
    gates, down = packer.experts([("gate", "up", "other"), ("gate", "up", "down")])
    assert gates.dense
    assert down.dense
    gates, down = packer.experts([("gate", "up", "other"), ("up", "gate", "gate")])
    assert (gates.count, down.count) == (12, 6)


@pytest.mark.parametrize("order", [np.zeros(INPUTS, np.int64), np.arange(INPUTS) - 1, np.arange(32)])
def test_an_order_that_lacks_inputs_is_refused(kernels: Kernels, order: np.ndarray) -> None:
    """The kernels read from where it points."""
    packer = MatrixPacker(kernels, Given({"one": matrix()._replace(order=order)}), 1)
    with pytest.raises(ModelUnsupported, match="order of inputs"):
        packer.matrix("one")


def test_a_missing_matrix_and_one_of_another_shape_are_named(kernels: Kernels) -> None:
    packer = MatrixPacker(kernels, Given({"vector": torch.zeros(3)}), 1)
    with pytest.raises(ModelUnsupported, match="no tensor one"):
        packer.matrix("one")
    with pytest.raises(ModelUnsupported, match=r"vector has shape \[3\]"):
        packer.matrix("vector")


def test_packed_matrices_share_memory_until_it_is_full(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_packer, "_ROOM", 4096)
    packer = MatrixPacker(kernels, Given({"one": matrix(16)}), 1)
    bytes_of_one = packed_bytes(matrix(16))
    addresses = [packer.matrix("one") and packer.kept[-2].data_ptr() for _ in range(4096 // bytes_of_one + 1)]
    *apart, last = np.diff(addresses).tolist()
    assert set(apart) == {bytes_of_one}
    assert last != bytes_of_one
