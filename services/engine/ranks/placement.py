"""The place of a process among the ranks of a model: on one machine, or as the environment of torchrun gives it."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.runtime.settings import InvalidSetting

LOOPBACK = "127.0.0.1"
_MAX_PORT = 65535


@dataclass(frozen=True)
class Placement:
    """The rank of this process, its rank and the number of ranks on its machine, and where the ranks' store is."""

    rank: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @classmethod
    def local(cls, rank: int, size: int, port: int) -> "Placement":
        """Return the place of one of `size` ranks on this machine."""
        return cls(rank, rank, size, LOOPBACK, port)


def placement(tensor_parallel: int, environment: Mapping[str, str]) -> Placement | None:
    """Return the place that torchrun gave this process, None without torchrun: it starts its ranks itself then.

    Raises InvalidSetting if a variable is missing, if it is no number, or if it contradicts `tensor_parallel`.
    """
    size = _number(environment, "WORLD_SIZE", 1, default=1)
    if size == 1:
        return None
    if size != tensor_parallel:
        raise InvalidSetting(f"tensor_parallel is {tensor_parallel}, but WORLD_SIZE is {size}: they must be equal")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, default=1)
    return Placement(
        rank=_number(environment, "RANK", 0, size - 1),
        local_rank=_number(environment, "LOCAL_RANK", 0, local_size - 1, default=0),
        local_size=local_size,
        address=_given(environment, "MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT", 1, _MAX_PORT),
    )


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int | None = None, default: int | None = None
) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    text = _given(environment, name)
    if text.isascii() and text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
    raise InvalidSetting(f"{name} must be a whole number {bounds}, not {text!r}")


def _given(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise InvalidSetting(f"{name} must be given, because WORLD_SIZE is {environment['WORLD_SIZE']}")
    return environment[name]
