"""Modules whose quantized matrices are decoded where they are used, a piece at a time.

The CPU's decoder runs large quantized models from its own packed weights; transformers' modules only probe the model
and check the decoder, once. Dense weights for them would take several times the memory that the model needs. The probe
looks at which tokens are combined, not at values: it multiplies by stand-ins. So each matrix is decoded once, for the
check.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.native.formats.experts import JoinedExperts
from engine.native.formats.finite import check_finite
from engine.native.formats.tensors import StoredTensor

# Dense weights of at most this size are loaded. They make the first start faster; no later start needs their memory.
LOADED_BYTES = 192 << 20
_PIECE = 16 << 20  # weights that are dense at the same time


def placeholder(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a matrix's shape that takes no memory."""
    return torch.zeros(1, dtype=dtype).expand(*stored.get_shape())


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the placeholder of a matrix."""
    return tensor.numel() > 1 and not any(tensor.stride())


def decode_on_use(model: Any, matrices: dict[str, StoredTensor]) -> None:
    """Let the modules of these weights, which have placeholders, decode them in each call."""
    for name, module in model.named_modules():
        experts = {kind: matrices.get(f"{name}.{kind}") for kind in _DecodedExperts.KINDS}
        if all(experts.values()):
            vars(module)["forward"] = _DecodedExperts(module, experts)
            continue
        stored = matrices.get(f"{name}.weight") or (_tied(model, module, matrices))
        if stored is not None:
            assert isinstance(module, nn.Linear | nn.Embedding), f"{name} is a matrix"
            vars(module)["forward"] = _Decoded(module, stored)


@contextmanager
def stand_ins(model: Any) -> Iterator[None]:
    """Let these modules multiply by stand-ins of their matrices, which need no decoding, in the body of the context."""
    found = [vars(module).get("forward") for module in model.modules()]
    decoded = [one for one in found if isinstance(one, _Decoded | _DecodedExperts)]
    for one in decoded:
        one.stands_in = True
    try:
        yield
    finally:
        for one in decoded:
            one.stands_in = False


def decode(model: Any) -> None:
    """Give the modules dense weights, and their own `forward`. Raises ModelUnsupported if weights are not finite."""
    dense: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        decoded = vars(module).get("forward")
        if isinstance(decoded, _DecodedExperts):
            del vars(module)["forward"]
            decoded.give_dense(name)
        if isinstance(decoded, _Decoded):
            del vars(module)["forward"]
            # A tied head has the embedding's.
            shared = dense.setdefault(id(decoded.stored), nn.Parameter(decoded.stored[...], requires_grad=False))
            check_finite([(f"{name}.weight", shared)])
            module.weight = shared


def _tied(model: Any, module: Any, matrices: dict[str, StoredTensor]) -> StoredTensor | None:
    embedding = model.get_input_embeddings()
    if module is not model.get_output_embeddings() or module.weight is not embedding.weight:
        return None
    return next((matrices.get(f"{name}.weight") for name, one in model.named_modules() if one is embedding), None)


def _stand_in(shape: Sequence[int], dtype: torch.dtype, number: int = 0) -> torch.Tensor:
    """Return a random matrix, another for each number, whose products are as large as what they multiply.

    It is a Hankel matrix: a view of as many numbers as it has rows and columns.
    """
    rows, columns = shape
    numbers = torch.randn(rows + columns - 1, generator=torch.Generator().manual_seed(number)) / columns**0.5
    matrix: torch.Tensor = numbers.to(dtype).as_strided((rows, columns), (1, 1))
    return matrix


class _Decoded:
    """The computation of a linear module or an embedding with decoded rows."""

    def __init__(self, module: nn.Linear | nn.Embedding, stored: StoredTensor) -> None:
        self._module = module
        self.stored = stored
        self.stands_in = False

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        if isinstance(self._module, nn.Embedding):
            rows, places = torch.unique(given, return_inverse=True)
            return torch.cat([self.stored[slice(row, row + 1)] for row in rows.tolist()])[places]
        outputs, inputs = self.stored.get_shape()
        step = max(1, _PIECE // inputs)
        pieces = [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]
        matrix = _stand_in((outputs, inputs), given.dtype) if self.stands_in else self.stored
        found = torch.cat([functional.linear(given, matrix[piece]) for piece in pieces], dim=-1)
        return found if self._module.bias is None else found + self._module.bias


class _DecodedExperts:
    """The computation of a module of experts that decodes those that a step's tokens chose."""

    KINDS = ("gate_up_proj", "down_proj")

    def __init__(self, module: Any, experts: dict[str, Any]) -> None:
        """`experts` has the tensors of all experts by kind."""
        self._module = module
        self._experts: dict[str, JoinedExperts] = experts
        self.stands_in = False

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            gated = self._module._apply_gate(self._product("gate_up_proj", expert, hidden[rows]))
            result = self._product("down_proj", expert, gated)
            found.index_add_(0, rows, result.float() * weights[rows, places, None].float())
        return found.to(hidden.dtype)

    def give_dense(self, name: str) -> None:
        """Give the module dense weights. Raises ModelUnsupported if weights are not finite."""
        for kind, stored in self._experts.items():
            dense = nn.Parameter(stored[...], requires_grad=False)
            check_finite([(f"{name}.{kind}", dense)])
            setattr(self._module, kind, dense)

    def _product(self, kind: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        stored = self._experts[kind]
        weights = _stand_in(stored.get_shape()[1:], rows.dtype, expert) if self.stands_in else stored.expert(expert)
        bias = getattr(self._module, f"{kind}_bias", None)
        product = rows @ (weights if self._module.is_transposed else weights.T)
        return product if bias is None else product + bias[expert]
