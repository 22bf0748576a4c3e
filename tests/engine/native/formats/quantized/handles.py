"""Tensors of files, in memory."""

from types import EllipsisType

import torch

MODULE = "model.layers.0.self_attn.q_proj"
_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


class ReadTensor:
    """A tensor that counts the numbers that are read (`TypedTensor`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.numbers = 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES[self._tensor.dtype]

    def __getitem__(self, part: EllipsisType | slice | tuple[slice, slice]) -> torch.Tensor:
        found = self._tensor[part]
        self.numbers += found.numel()
        return found
