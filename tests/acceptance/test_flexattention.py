"""The choice of FlexAttention, whose graphs take long to compile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention.flex_backend import FlexBackend
from engine.model.loading import load_model
from engine.schedule.request import Capacity
from services.engine.startup.backends import BackendOptions, choose


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_the_setting_flex_chooses_flexattention(tiny_model: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"))
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 8, 16)
    assert isinstance(choose(BackendOptions("flex", loaded, capacity, None, 4)).backend, FlexBackend)
