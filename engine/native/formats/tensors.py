"""What files of tensors have in common: the handles of safetensors, and what is used like them."""

from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # checks of declarations import no torch
    import torch


class StoredTensor(Protocol):
    """A tensor that is not read yet, as of safetensors' `get_slice`."""

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> "torch.Tensor":
        """Read all of it, some rows, or some rows and columns."""


class TypedTensor(StoredTensor, Protocol):
    """The same with the type that the file declares."""

    def get_dtype(self) -> str:
        """Return safetensors' name of the type, such as BF16, F8_E4M3, I32 or U8."""


class TensorFile(Protocol):
    """An open file of tensors, as of safetensors' `safe_open`."""

    def keys(self) -> list[str]:
        """Return the names of all tensors."""

    def get_slice(self, name: str) -> Any:
        """Return a tensor's handle, a StoredTensor."""


class ExpertPlace(NamedTuple):
    """Where a tensor of all experts has one expert's gate, up or down matrix.

    The tensor is [experts, outputs, inputs]; `transposed`: [experts, inputs, outputs]. `outputs` are the matrix's.
    """

    expert: int
    outputs: range
    transposed: bool

    def of(self, one: "torch.Tensor") -> "torch.Tensor":
        """Return the matrix, [outputs, inputs], in the part of its expert."""
        plane = one.T if self.transposed else one
        return plane[self.outputs.start : self.outputs.stop : self.outputs.step]
