"""What files of tensors have in common: the handles of safetensors, and what is used like them."""

from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

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
