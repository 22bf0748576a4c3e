"""The host tier of a GPU is pinned memory of whole pages, and is refused by name if CUDA does not pin it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.attention.cache import CacheGeometry, CacheLayout, make_host_cache
from engine.attention.host_memory import registered_zeros
from engine.errors import HostTierUnavailable
from engine.model.loading import load_model
from engine.model.sizing import cache_bytes
from engine.schedule.capacity import Capacity
from services.engine.startup.backends import BackendOptions, choose_backend
from services.runtime.settings import InvalidSetting
from tests.engine.gpu_in_host_memory import GpuInHostMemory

GEOMETRY = CacheGeometry.uniform(layers=3, kv_heads=2, head_size=24)
LAYOUT = CacheLayout.of(GEOMETRY, lambda heads, size: (16, heads, size))
GPU = torch.device("cuda", 1)


class FakePinning:
    """Notes what is pinned, and finds pages that are still mapped when they are released."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.released: list[bool] = []

    def register(self, address: int, size: int) -> None:
        self.sizes[address] = size

    def unregister(self, address: int) -> None:
        self.released.append(is_mapped(address))
        del self.sizes[address]


def is_mapped(address: int) -> bool:
    ranges = [line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_a_tensor_takes_its_bytes_in_whole_pages_and_frees_them_with_its_last_view() -> None:
    pinning = FakePinning()
    shape = (5, 3, 2, 16, 2, 24)  # just above a power of two of bytes
    tier = registered_zeros(shape, torch.bfloat16, pinning)
    size = cache_bytes(4, GEOMETRY.block_bytes(16, torch.bfloat16))
    assert tier.nbytes == size
    assert pinning.sizes == {tier.data_ptr(): -(-size // PAGESIZE) * PAGESIZE}
    assert tier.data_ptr() % PAGESIZE == 0
    assert (tuple(tier.shape), tier.is_contiguous(), tier.count_nonzero().item()) == (shape, True, 0)
    tier.fill_(3)
    view = tier[2]
    del tier
    assert pinning.sizes
    assert (view == 3).all()
    del view
    assert (pinning.sizes, pinning.released) == ({}, [True])


def test_memory_that_the_system_does_not_have_is_refused() -> None:
    with pytest.raises(HostTierUnavailable, match=r"^the system does not give the tier 262144.00 GiB of host memory: "):
        registered_zeros((1 << 48,), torch.int8, FakePinning())


@dataclass
class FakeCuda:
    """CUDA as far as it pins memory; `fault` is what it returns."""

    fault: int = 0
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda _address, size, flags: self.note(self.fault, "register", size, flags),
            cudaHostUnregister=lambda _address: self.note(0, "unregister"),
            cudaGetErrorString={2: "out of memory"}.get,
        )

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.note(0, "device", device)
        yield
        self.note(0, "device before")

    def synchronize(self, device: torch.device) -> None:
        self.note(0, "wait", device)

    def note(self, result: int, *call: object) -> int:
        self.calls.append(call)
        return result


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("cudart", "device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_the_tier_of_a_gpu_is_registered_on_its_device_and_released_after_its_last_copy(cuda: FakeCuda) -> None:
    tier = make_host_cache(LAYOUT, 4, torch.bfloat16, GPU)
    assert tier is not None
    registered = ("register", -(-tier.nbytes // PAGESIZE) * PAGESIZE, 3)
    assert cuda.calls == [("device", GPU), registered, ("device before",)]
    del tier
    assert cuda.calls[3:] == [("wait", GPU), ("unregister",)]


def test_memory_that_cuda_does_not_pin_is_refused_and_not_released(cuda: FakeCuda) -> None:
    cuda.fault = 2
    with pytest.raises(
        HostTierUnavailable, match=r"^CUDA cannot pin the tier's 0\.00 GiB of host memory: out of memory"
    ):
        make_host_cache(LAYOUT, 4, torch.bfloat16, GPU)
    assert ("unregister",) not in cuda.calls


def test_the_refusal_of_a_tier_names_its_setting(cuda: FakeCuda, tiny_model: Callable[[str], Path]) -> None:
    cuda.fault = 2
    loaded = replace(load_model(tiny_model("llama"), torch.float32, torch.device("cpu")), device=GPU)
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 16, device_blocks=3, host_blocks=5)
    options = BackendOptions("torch", loaded, capacity, None, max_sequences=4, token_budget=8)
    with GpuInHostMemory(), pytest.raises(InvalidSetting, match=r"^host_blocks is 5, but CUDA cannot pin"):
        choose_backend(options)
