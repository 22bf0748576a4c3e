"""How a method of quantization stores matrices in a folder's files. It imports no torch: a start is refused early."""

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.errors import ModelUnsupported
from engine.native.formats.tensors import ExpertPlace, TypedTensor

if TYPE_CHECKING:
    from engine.native.formats.coded import StoredCodes

HELP = "use a GGUF file, such as Q4_K_M, or a checkpoint in bfloat16, on CPUs with --weights int8 or int4"
# Suffixes of tensors that only quantized activations or a quantized cache need.
_UNUSED = frozenset(
    (
        *(f"{place}_{what}" for place in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
        *(f"{place}_{what}" for place in "qkv" for what in ("scale", "zero_point", "global_scale")),
        *("activation_scale", "input_scale_ub", "gate_up_proj_activation_scale", "down_proj_activation_scale"),
    )
)


class Coded(NamedTuple):
    """A matrix in the form of its file. `place` is that of an expert's matrix, if the file has those of all as one."""

    codes: "StoredCodes"
    place: ExpertPlace | None = None


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


def check_part(
    name: str, tensor: TypedTensor, shape: tuple[int, ...], types: Iterable[str], declared: str = ""
) -> None:
    """Raise ModelUnsupported, with the tensor's name, if it has another shape, or none of the types.

    `declared` is the field, with its value, that the shape follows from.
    """
    check_type(name, tensor, types)
    if tuple(tensor.get_shape()) != shape:
        reason = f" as with its quantization's {declared}" if declared else ""
        raise ModelUnsupported(f"its tensor {name} has shape {list(tensor.get_shape())}, not {list(shape)}{reason}")


def check_matrix(name: str, tensor: TypedTensor, types: Iterable[str]) -> tuple[int, int]:
    """Return the shape of a tensor of two dimensions. Raises ModelUnsupported, with its name, if it is none of these.

    Its type must be one of the types, and no dimension 0.
    """
    check_type(name, tensor, types)
    shape = tuple(tensor.get_shape())
    if len(shape) != 2 or 0 in shape:
        raise ModelUnsupported(f"its tensor {name} has shape {list(shape)}, not two dimensions")
    return shape


def check_type(name: str, tensor: TypedTensor, types: Iterable[str]) -> None:
    """Raise ModelUnsupported, with the tensor's name, if it has none of the types."""
    allowed = tuple(types)
    if tensor.get_dtype() not in allowed:
        raise ModelUnsupported(f"its tensor {name} has type {tensor.get_dtype()}, not {' or '.join(allowed)}")


def check_complete(module: str, parts: Mapping[str, str], needed: Iterable[str], names: Container[str]) -> str:
    """Return the name of a module's dense matrix, of which `parts` are the parts by suffix.

    Raises ModelUnsupported, with the tensor's name, if a part is missing, or if there is a dense matrix too.
    """
    lacking = next((suffix for suffix in needed if suffix not in parts), None)
    if lacking:
        present = next(iter(parts.values()))
        raise ModelUnsupported(f"its files lack tensor {module}.{lacking}, although they have {present}")
    if (dense := f"{module}.weight") in names:
        raise ModelUnsupported(f"its files have tensor {dense} twice: as it is, and in the parts of a quantized matrix")
    return dense


def not_served(method: str) -> ModelUnsupported:
    """Return the refusal of a method, or of one of its formats, such as `gptq in the format marlin`."""
    return ModelUnsupported(f"its weights are quantized ({method}), which is not served: {HELP}")


def unused(names: Iterable[str]) -> set[str]:
    """Return the names of tensors with the scales of quantized activations, or of a quantized cache."""
    return {name for name in names if name.rpartition(".")[2] in _UNUSED}
