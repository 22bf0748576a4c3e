"""The native kernels and decoder over several kinds of blocks: the same logits as over one, whatever block 0 holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.cache import CacheGeometry
from engine.kinds.kinds_backend import KindsBackend
from engine.kinds.layer_kinds import layer_kinds
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import NAMES
from engine.native.kernels import Kernels
from engine.run.runner import ModelRunner
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from services.engine.startup.native_kernels import decoder_for
from tests.engine import native_kernels
from tests.engine.decoding import prompt
from tests.engine.expert_models import EXPERT_MODELS, write_expert_model
from tests.engine.families import FAMILIES, WINDOW, Checkpoint

CPU = torch.device("cpu")
BLOCK = 16
TOKENS = 90
TABLE = (7, 3, 9, 1, 12, 5)


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def dropped(end: int, window: int) -> int:
    """Return the leading blocks that no query from the token before `end` on sees."""
    return max(0, end - window) // BLOCK


class Both:
    """A model over one kind of blocks, and over one for each window; blocks out of a window are as NaN as block 0."""

    def __init__(self, kernels: Kernels, loaded: Callable[[], LoadedModel], native: bool, kv_dtype: Any = None) -> None:
        self.loaded = loaded()
        self.kinds = layer_kinds(self.loaded.geometry, self.loaded.context_tokens)
        assert len(self.kinds) > 1

        def backend(geometry: CacheGeometry, _: int = 0) -> CpuBackend:
            sizes = (BLOCK, 12, self.loaded.dtype)
            return CpuBackend(kernels, geometry, *sizes, threads=2, kv_dtype=kv_dtype)

        self.one = backend(self.loaded.geometry)
        self.several = KindsBackend.of(self.kinds, self.loaded.geometry, backend)
        runners = []
        for own, model in ((self.one, self.loaded), (self.several, loaded() if native else self.loaded)):
            decoder: Decoder | None = ModulesDecoder(model, own)
            if native:
                decoder = decoder_for(kernels, model, own, 2)
                assert decoder is not None, "it matches the model's modules"
            runners.append(ModelRunner(model, own, BLOCK, decoder=decoder))
        self.runners = runners
        if kv_dtype is None:
            for one in self.several.kinds:
                one.cache[0] = torch.nan

    def logits(self, start: int, end: int) -> list[torch.Tensor]:
        """Feed the tokens from `start` to `end` to both; return their logits."""
        tokens = prompt(TOKENS, 1)
        live = [(0,) * dropped(start + 1, kind.tokens) for kind in self.kinds[1:]]
        windows = tuple([(*gone, *TABLE[len(gone) :]) for gone in live])
        work = Work(1, tokens[start:end], start, TABLE, True, Sampling())
        return [
            runner.forward((one,)).clone()
            for runner, one in zip(self.runners, (work, work._replace(window_tables=windows)), strict=True)
        ]


STEPS = ((0, 40), (40, 75), (75, 76), (76, 77), (77, TOKENS))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3 with windows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_several_kinds_is_that_over_one(
    kernels: Kernels, checkpoint: Checkpoint, name: str, dtype: torch.dtype
) -> None:
    folder = checkpoint(FAMILIES[name])
    both = Both(kernels, lambda: load_model(folder, dtype, CPU), native=False)
    for step in STEPS:
        one, several = both.logits(*step)
        assert torch.equal(one, several), step
    assert dropped(77, WINDOW) > 3


@pytest.mark.parametrize("name", ["mistral", "qwen3 with windows"])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_a_step_of_the_decoder_over_several_kinds_is_that_over_one(
    kernels: Kernels, checkpoint: Checkpoint, name: str, kv_dtype: torch.dtype | None
) -> None:
    folder = checkpoint(FAMILIES[name])
    both = Both(kernels, lambda: load_model(folder, torch.bfloat16, CPU), native=True, kv_dtype=kv_dtype)
    for step in STEPS:
        one, several = both.logits(*step)
        assert torch.equal(one, several), step


def test_a_decoder_with_sinks_and_experts_over_several_kinds_is_that_over_one(kernels: Kernels, tmp_path: Path) -> None:
    folder = write_expert_model(EXPERT_MODELS["gpt_oss"], tmp_path / "model")
    both = Both(kernels, lambda: load_model(folder, torch.bfloat16, CPU), native=True)
    for step in STEPS:
        one, several = both.logits(*step)
        assert torch.equal(one, several), step
