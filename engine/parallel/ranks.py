"""The ranks of one model, and what they exchange while a step runs."""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

from engine.errors import RankFailed


class Ranks(Protocol):
    """All ranks, as one of them sees them. Every method is called by all ranks, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank; 0 plans and samples."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place of `values`."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, `[ranks, *shape]`, at each of them. They are contiguous."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, `[ranks, *shape]`, at rank 0, and `[1, *shape]` its own at another."""

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values, in place of `values`."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes; those of other ranks are ignored."""

    def minimum(self, value: int) -> int:
        """Return the smallest value of all ranks."""


class OneRank:
    """A model that one process computes."""

    rank = 0
    size = 1

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values as those of all ranks."""
        return values[None]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values as those of all ranks."""
        return values[None]

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the bytes."""
        return data

    def minimum(self, value: int) -> int:
        """Return the value."""
        return value


# Its new name in torch 2.13, which warns of the old one.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def is_collectives(error: Exception) -> bool:
    """Return whether a collective has failed, so that another rank is the cause."""
    return isinstance(error, RankFailed | distributed.DistError) or "gloo" in str(error).lower()


def _collective(
    method: Callable[Concatenate["TorchRanks", Arguments], Result],
) -> Callable[Concatenate["TorchRanks", Arguments], Result]:
    """Measure a collective, and reraise its errors, which other ranks cause, as RankFailed."""

    @wraps(method)
    def run(ranks: "TorchRanks", /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        begun = ranks.clock()
        ranks.collectives += 1
        try:
            return method(ranks, *arguments, **named)
        except RuntimeError as error:
            raise RankFailed(str(error).strip().split("\n", 1)[0]) from error
        finally:
            ranks.waited += ranks.clock() - begun

    return run


class TorchRanks:
    """Ranks connected by torch.distributed: NCCL between GPUs, gloo between CPUs.

    The collectives raise RankFailed if another rank has ended or does not respond.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        device: torch.device,
        seconds: float,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Connect; returns when all ranks have. A collective that lasts `seconds` fails. `clock` measures `waited`.

        Raises torch.distributed.DistError if they do not connect in time.
        """
        self.rank = rank
        self.size = size
        self.clock = clock
        self.waited = 0.0
        """Seconds in collectives; of those on a GPU, which are queued, only the queueing."""
        self.collectives = 0
        """Number of collectives so far, recorded and failed ones too."""
        self._device = device
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )

    @_collective
    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place of `values`. On a CPU, float32 only."""
        distributed.all_reduce(values)
        return values

    @_collective
    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, `[ranks, *shape]`, at each of them. They are contiguous."""
        gathered = values.new_empty(self.size, *values.shape)
        _all_gather(gathered.flatten(0, 1), values)
        return gathered

    @_collective
    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, `[ranks, *shape]`, at rank 0, and `[1, *shape]` its own at another."""
        if self.rank:
            distributed.gather(values)
            return values[None]
        gathered = values.new_empty(self.size, *values.shape)
        distributed.gather(values, list(gathered))
        return gathered

    @_collective
    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values, in place of `values`."""
        distributed.broadcast(values, src=0)
        return values

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes; those of other ranks are ignored."""
        length = self.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=self._device))
        if self.rank:
            data = bytes(int(length))
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return bytes(self.broadcast(content.to(self._device)).cpu().numpy())

    @_collective
    def minimum(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        smallest = torch.tensor([value], dtype=torch.int64, device=self._device)
        distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
        return int(smallest)

    def limit(self, seconds: float) -> None:
        """Let collectives fail that last `seconds`, from now on."""
        _set_pg_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        """Disconnect from the other ranks."""
        distributed.destroy_process_group()
