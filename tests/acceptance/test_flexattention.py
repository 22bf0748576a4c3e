"""FlexAttention with graphs that are slow to compile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention.backend import Scoring
from engine.attention.flex_backend import FlexBackend
from engine.model.loading import load_model
from engine.schedule.capacity import Capacity
from services.engine.startup.backends import BackendOptions, choose_backend
from tests.engine.paged_case import Case, Feed

# torch's compiler imports modules that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def test_the_setting_flex_chooses_flexattention(tiny_model: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"))
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 8, 16)
    assert isinstance(choose_backend(BackendOptions("flex", loaded, capacity, None, 4, 16)).backend, FlexBackend)


def test_compiled_bfloat16_kernels_attend_with_window_and_softcap() -> None:
    scoring = Scoring(0.125, 9, 20.0)
    feeds = (Feed(0, 1), Feed(37, 1), Feed(16, 1), Feed(0, 33), Feed(20, 13), Feed(15, 17))
    case = Case(feeds, 16, 2, 3, 64, scoring, layers=3, dtype=torch.bfloat16, moved="swapped", make=FlexBackend)
    assert case.run() < 6e-2
    torch._dynamo.reset()
