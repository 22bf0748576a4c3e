"""The memory that deployments give an engine on a CPU is enough by `quire plan` for the models that they name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import LlamaConfig

from engine.model.memory_plan import Planner, Workload
from engine.model.model_shape import shape_of
from services.cli.main import cli
from services.engine.settings import EngineSettings

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / ".env").read_text()
PRESET = (ROOT / "helm" / "quire" / "presets" / "production-values.yaml").read_text()
DEFAULTS = EngineSettings().for_device(on_gpu=False)
GIB = 1 << 30


def memory_of_compose() -> tuple[int, int]:
    return int(re.search(r"^QUIRE_MEMORY_ENGINE=(\d+)g$", COMPOSE, re.M)[1]), DEFAULTS.cache_mib


def memory_of_the_preset() -> tuple[int, int]:
    engine = yaml.safe_load(PRESET)["engine"]
    return int(engine["resources"]["limits"]["memory"].removesuffix("Gi")), engine["settings"]["cache_mib"]


def needed_gib(dtype: torch.dtype, cache_mib: int) -> float:
    """What an engine needs for a model of a billion parameters, whose large vocabulary is in both ends of it."""
    size = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    shape = shape_of(LlamaConfig(**size, **heads), dtype)
    assert round(shape.parameters / 1e9, 1) == 1.0
    workload = Workload(DEFAULTS.block_size, DEFAULTS.token_budget, 2048, DEFAULTS.max_sequences)
    blocks = (cache_mib << 20) // shape.geometry.block_bytes(DEFAULTS.block_size, dtype) - 1
    return Planner(shape, dtype, workload, on_gpu=False).for_blocks(blocks, 0.9, 0).memory_bytes / GIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("text", "memory"), [(COMPOSE, memory_of_compose), (PRESET, memory_of_the_preset)], ids=["compose", "preset"]
)
def test_an_engines_memory_is_enough_for_the_models_that_its_file_names(
    text: str, memory: Callable[[], tuple[int, int]], dtype: torch.dtype
) -> None:
    assert re.search(r"up to (\d+)B parameters", text)[1] == "1"
    limit, cache_mib = memory()
    assert limit - 2 < needed_gib(dtype, cache_mib) < limit


def test_the_page_has_the_plan_of_the_demo_model() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    plan = re.search(r"demo model needs (\S+) GiB with default settings, as `quire (plan[^`]*)`", page)
    gib, command = plan.groups()
    done = CliRunner().invoke(cli, [*command.split(), "--json"])
    found = json.loads(done.output)
    assert f"{found['memory_bytes'] / GIB:.1f}" == gib
    assert found["max_sequences"] == DEFAULTS.max_sequences
    assert 0 <= (DEFAULTS.cache_mib << 20) - found["cache_bytes"] < found["block_bytes"]
