"""How a method of quantization stores matrices in a folder's files. It imports no torch: a start is refused early."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.errors import ModelUnsupported
from engine.native.formats.tensors import TypedTensor

if TYPE_CHECKING:
    from engine.native.formats.coded import Codes, ExpertPlace

# Suffixes of tensors that only quantized activations or a quantized cache need.
_UNUSED = frozenset(
    (
        *(f"{place}_{what}" for place in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
        *(f"{place}_{what}" for place in "qkv" for what in ("scale", "zero_point", "global_scale")),
        *("activation_scale", "input_scale_ub", "gate_up_proj_activation_scale", "down_proj_activation_scale"),
    )
)
_CODES = ("I8", "U8")


class Coded(NamedTuple):
    """A matrix in the form of its file. `place` is that of an expert's matrix, if the file has those of all as one."""

    codes: "Codes"
    place: "ExpertPlace | None" = None


class Matrices(NamedTuple):
    """Matrices by the names of their dense tensors, such as `model.layers.0.mlp.up_proj.weight`.

    `parts` are the names of stored tensors that they consist of, or that are of no use without a quantized model.
    """

    coded: Mapping[str, Coded]
    parts: frozenset[str]


class Scheme(Protocol):
    """A declaration of quantized weights that is served."""

    @property
    def label(self) -> str:
        """The format in a few words, such as `gptq int4 g128`, for logs, health and metrics."""

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices among all tensors of a folder; only shapes and types of tensors are read.

        Raises ModelUnsupported, naming the tensor, if a part is missing, or has a shape or type that does not fit.
        """


def by_module(names: Iterable[str], suffixes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the stored names of each module's parts, by suffix: `{"…q_proj": {"qweight": "…q_proj.qweight"}}`."""
    wanted = frozenset(suffixes)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        if suffix in wanted:
            found.setdefault(module, {})[suffix] = name
    return found


def check_part(name: str, tensor: TypedTensor, shape: tuple[int, ...], types: Iterable[str]) -> None:
    """Raise ModelUnsupported, with the tensor's name, if it has another shape, or none of the types."""
    allowed = tuple(types)
    if tensor.get_dtype() not in allowed:
        raise ModelUnsupported(f"its tensor {name} has type {tensor.get_dtype()}, not {' or '.join(allowed)}")
    if tuple(tensor.get_shape()) != shape:
        raise ModelUnsupported(f"its tensor {name} has shape {list(tensor.get_shape())}, not {list(shape)}")


def sides(name: str, tensor: TypedTensor) -> tuple[int, int]:
    """Return outputs and columns of a matrix. Raises ModelUnsupported, with the name, if it is none, or empty."""
    shape = tensor.get_shape()
    if len(shape) != 2 or not all(shape):
        raise ModelUnsupported(f"its tensor {name} has shape {list(shape)}, which is no matrix")
    return shape[0], shape[1]


def unused(names: Iterable[str]) -> set[str]:
    """Return the names of tensors with the scales of quantized activations, or of a quantized cache."""
    return {name for name in names if name.rpartition(".")[2] in _UNUSED}


def check_rest(stored: Mapping[str, TypedTensor], parts: Iterable[str]) -> None:
    """Raise ModelUnsupported, with the name, if a tensor that is not among `parts` has codes instead of values."""
    for name in stored.keys() - parts:
        kind = stored[name].get_dtype()
        if kind.startswith("F8") or (kind in _CODES and len(stored[name].get_shape()) in (2, 3)):
            raise ModelUnsupported(f"its tensor {name} has type {kind}, but no scales of it are known")
