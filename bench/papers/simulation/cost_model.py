"""Durations of steps: by measured fits, or by a roofline from a device and a model's shape.

The coefficients and their sources are in `coefficients.toml`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_COEFFICIENTS = Path(__file__).with_name("coefficients.toml")
_BYTES_PER_NUMBER = 2  # half precision
_MILLI = 1e-3


class InvalidCostModel(ValueError):
    """An unknown model or device, or an impossible shape; the message names it and what is possible."""


class StepLoad(NamedTuple):
    """What a step computes and copies, in tokens, sequences and blocks.

    `context_tokens` are read by the `decoding` sequences. `prompt_squares` is the sum of end^2 - start^2 over the parts
    of prompts. Copies within the device are in `copied_blocks`, copies to and from the host in `swapped_blocks`.
    """

    decoding: int
    context_tokens: int
    prompt_tokens: int
    prompt_squares: int
    copied_blocks: int = 0
    swapped_blocks: int = 0


class CostModel(Protocol):
    """Durations of steps."""

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step in seconds."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model. Raises InvalidCostModel, naming the field, if it is impossible."""

    layers: int
    hidden: int
    heads: int
    parameter_bytes: float

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "parameter_bytes"):
            if not getattr(self, name) > 0:
                raise InvalidCostModel(f"{name} must be above 0, not {getattr(self, name)}")
        if self.hidden % self.heads:
            raise InvalidCostModel(f"hidden must be a multiple of heads ({self.heads}), not {self.hidden}")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, in all layers."""
        return 2 * self.layers * self.hidden * _BYTES_PER_NUMBER

    @property
    def flops_per_token(self) -> float:
        """Operations of the products with the weights, two for each parameter."""
        return 2 * self.parameter_bytes / _BYTES_PER_NUMBER


@dataclass(frozen=True)
class Device:
    """Peak rates of one device: memory in bytes, bytes a second, operations a second."""

    memory_bytes: int
    bytes_per_second: float
    flops: float


@dataclass(frozen=True)
class Placement:
    """A model on `ranks` equal devices. Raises InvalidCostModel if it does not fit, or cannot be divided."""

    shape: Shape
    device: Device
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.shape.heads % self.ranks:
            raise InvalidCostModel(f"ranks must be a divisor of the {self.shape.heads} heads, not {self.ranks}")
        if self.weights_bytes >= self.device.memory_bytes:
            raise InvalidCostModel(
                f"the weights take {self.weights_bytes / 1e9:.1f} GB of each of {self.ranks} devices, "
                f"which have {self.device.memory_bytes / 1e9:.1f} GB"
            )

    @property
    def weights_bytes(self) -> float:
        """Bytes of weights on each device."""
        return self.shape.parameter_bytes / self.ranks


@dataclass(frozen=True)
class Transfers:
    """Durations of copies of whole blocks of `block_bytes` on each rank, in seconds and bytes a second.

    A block takes `copies_per_block` copies to or from the host, each of which costs `copy_seconds` to launch.
    """

    block_bytes: float
    host_bytes_per_second: float
    device_bytes_per_second: float
    copy_seconds: float
    copies_per_block: int

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step's copies."""
        swap = self.block_bytes / self.host_bytes_per_second + self.copies_per_block * self.copy_seconds
        copied = 2 * self.block_bytes / self.device_bytes_per_second
        return load.swapped_blocks * swap + load.copied_blocks * copied


@dataclass(frozen=True)
class LargeBatch:
    """The terms of decoding in steps of at least `sequences` sequences, in milliseconds."""

    sequences: int
    decode: float
    decode_context: float
    decode_sequence: float


@dataclass(frozen=True)
class MeasuredFit:
    """Durations by linear fits to measured steps, in milliseconds. A step with both kinds of work adds their terms.

    Decoding has two fits: one for small batches, and `large` for others.
    """

    prefill: float
    prefill_token: float
    prefill_square: float
    decode: float
    decode_context: float
    decode_sequence: float
    large: LargeBatch | None = None
    transfers: Transfers | None = None

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step in seconds."""
        if not load.decoding and not load.prompt_tokens:
            return self._copies(load)
        prompts = self.prefill_token * load.prompt_tokens + self.prefill_square * load.prompt_squares
        return _MILLI * (prompts + (self._decoding(load) if load.decoding else self.prefill)) + self._copies(load)

    def _decoding(self, load: StepLoad) -> float:
        """Return the milliseconds of the decoding sequences. The sizes are those that the fits were measured for."""
        terms = self.large if self.large and load.decoding >= self.large.sequences else self
        return terms.decode + terms.decode_context * load.context_tokens + terms.decode_sequence * load.decoding

    def on(self, measured: Placement, target: Placement) -> "MeasuredFit":
        """Return the fit moved to another device: weights and KV are read at its bandwidth."""
        before, after = measured.device.bytes_per_second, target.device.bytes_per_second
        weights = measured.weights_bytes * (1 / after - 1 / before) / _MILLI
        large = self.large and replace(
            self.large,
            decode=self.large.decode + weights,
            decode_context=self.large.decode_context * before / after,
        )
        return replace(
            self,
            prefill=self.prefill + weights,
            decode=self.decode + weights,
            decode_context=self.decode_context * before / after,
            large=large,
        )

    def _copies(self, load: StepLoad) -> float:
        return self.transfers.seconds(load) if self.transfers else 0.0


@dataclass(frozen=True)
class Roofline:
    """Durations by peak rates and efficiencies. Milliseconds, except for rates."""

    placement: Placement
    overhead: float
    weights_efficiency: float
    kv_efficiency: float
    flops_efficiency: float
    sequence: float
    all_reduce: float
    nvlink_bytes_per_second: float
    transfers: Transfers | None = None

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step in seconds."""
        copies = self.transfers.seconds(load) if self.transfers else 0.0
        tokens = load.decoding + load.prompt_tokens
        if not tokens:
            return copies
        fixed = _MILLI * (self.overhead + self.sequence * load.decoding)
        return fixed + self._products(tokens) + self._attention(load) + self._all_reduces(tokens) + copies

    def _products(self, tokens: int) -> float:
        device, shape, ranks = self.placement.device, self.placement.shape, self.placement.ranks
        weights = self.placement.weights_bytes / (self.weights_efficiency * device.bytes_per_second)
        return max(weights, shape.flops_per_token * tokens / ranks / (self.flops_efficiency * device.flops))

    def _attention(self, load: StepLoad) -> float:
        device, shape, ranks = self.placement.device, self.placement.shape, self.placement.ranks
        read = shape.token_bytes * load.context_tokens / ranks / (self.kv_efficiency * device.bytes_per_second)
        # Scores and values of a pair of tokens take 4 operations for each number of a layer's hidden state.
        pairs = load.prompt_squares / 2
        scored = 4 * shape.layers * shape.hidden * pairs / ranks / (self.flops_efficiency * device.flops)
        return read + scored

    def _all_reduces(self, tokens: int) -> float:
        if self.placement.ranks == 1:
            return 0.0
        shape = self.placement.shape
        sent = _BYTES_PER_NUMBER * shape.hidden * tokens / self.nvlink_bytes_per_second
        return 2 * shape.layers * (_MILLI * self.all_reduce + sent)


def place(model: str, device: str, ranks: int = 1) -> Placement:
    """Return a model of the file on devices of the file. Raises InvalidCostModel."""
    return Placement(Shape(**_entry("models", model)), Device(**_entry("devices", device)), ranks)


def fit_of(model: str, device: str, ranks: int = 1, transfers: Transfers | None = None) -> MeasuredFit:
    """Return the measured fit of a model, moved to a device. Raises InvalidCostModel if there is none for the ranks."""
    known = _coefficients()["fits"]
    if model not in known or known[model]["ranks"] != ranks:
        measured_at = ", ".join(f"{name} on {one['ranks']}" for name, one in known.items())
        raise InvalidCostModel(
            f"no steps of {model} on {ranks} ranks were measured, but of {measured_at}: "
            "choose the cost low, middle or high, a roofline"
        )
    measured = dict(known[model])
    at = place(model, measured.pop("device"), measured.pop("ranks"))
    large = LargeBatch(**measured.pop("large"))
    return replace(MeasuredFit(**measured, large=large), transfers=transfers).on(at, place(model, device, ranks))


def roofline_of(placement: Placement, band: str = "middle", transfers: Transfers | None = None) -> Roofline:
    """Return the roofline with the coefficients of a band: low, middle or high. Raises InvalidCostModel."""
    return Roofline(placement, **_entry("roofline", band), transfers=transfers)


def transfers_of(placement: Placement, block_size: int, *, one_piece: bool = True) -> Transfers:
    """Return the durations of copies of blocks of `block_size` tokens.

    A block is one piece, as in Quire, or two pieces for each layer, as in vLLM of 2023.
    """
    swap, ranks = _coefficients()["swap"], placement.ranks
    return Transfers(
        block_bytes=block_size * placement.shape.token_bytes / ranks,
        host_bytes_per_second=swap["bytes_per_second"],
        device_bytes_per_second=placement.device.bytes_per_second,
        copy_seconds=_MILLI * swap["copy"],
        copies_per_block=1 if one_piece else 2 * placement.shape.layers,
    )


def _entry(kind: str, name: str) -> Mapping[str, Any]:
    known = _coefficients()[kind]
    if name not in known:
        raise InvalidCostModel(f"no {kind} entry {name!r} in {_COEFFICIENTS.name}: there are {', '.join(known)}")
    entry: Mapping[str, Any] = known[name]
    return entry


@cache
def _coefficients() -> dict[str, Any]:
    return tomllib.loads(_COEFFICIENTS.read_text())
