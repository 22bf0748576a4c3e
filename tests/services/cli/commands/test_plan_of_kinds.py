"""`quire plan` of models with windows or chunks: an engine with the options that it prints has its pool."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from blocks import WindowKind
from engine.errors import ModelUnsupported
from engine.model.loaded import LoadedModel, with_kv_dtype
from engine.model.model_shape import read_shape
from engine.model.sizing import PoolSize, cache_bytes
from engine.schedule.capacity import Capacity
from kvmanager import KVManager, PoolSpec
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.engine.startup.device import capacity_of, kv_dtype_of
from services.runtime.settings import InvalidSetting
from tests.running_quire import RunningQuire
from tests.services.cli.commands.test_plan import figures, run

Written = Callable[[str], Path]
GIB, MIB = 1 << 30, 1 << 20
_SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
_OF_LLAMA_4 = {"intermediate_size_mlp": 128, "num_local_experts": 2, "attention_chunk_size": 64}
MODELS = {
    "some-windows": ("olmo3", {"sliding_window": 64, "max_position_embeddings": 8192}),
    "all-windows": ("mistral", {"sliding_window": 64, "max_position_embeddings": 1 << 20}),
    # A GiB holds some of its sequences only, so the split depends on how long they are.
    "large": ("olmo3", {"sliding_window": 4096, "max_position_embeddings": 65536, "num_hidden_layers": 64}),
    "chunks": ("llama4_text", {"max_position_embeddings": 8192, **_OF_LLAMA_4}),
}
SMALL = ("some-windows", "all-windows", "chunks")
CPU = ("--device", "cpu", "--dtype", "bfloat16")
ON_CPU = "its layers attend within chunks of 64 tokens, which needs kinds of blocks: --kinds auto, on a CPU, without"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    def write(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"plan-{name}"
        kind, more = MODELS[name]
        CONFIG_MAPPING[kind](**(_SIZES | more)).save_pretrained(folder)
        return folder

    return write


def printed(*arguments: object) -> EngineSettings:
    """Return the settings of the engine that a plan prints."""
    line = re.search(r"^quire engine (.*)$", run(*arguments).stdout, re.MULTILINE)
    assert line
    words = line[1].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    named = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    return EngineSettings(**{name: int(value) if value.isdigit() else value for name, value in named.items()})


def capacity(settings: EngineSettings, folder: Path) -> Capacity:
    """Return the capacity of an engine on a CPU, of whose model only the configuration is there."""
    shape = read_shape(folder, torch.bfloat16)
    sizes = shape.geometry, shape.context_tokens, shape.vocabulary_size, frozenset[int](), ""
    loaded = LoadedModel(None, torch.device("cpu"), *sizes, torch.bfloat16)
    return capacity_of(settings.for_device(on_gpu=False), with_kv_dtype(loaded, kv_dtype_of(settings.kv_dtype)))


def split_of(planned: dict[str, Any]) -> tuple[int, int, tuple[WindowKind, ...]]:
    windows = tuple(WindowKind(**kind) for kind in planned["windows"])
    return planned["device_blocks"], planned["host_blocks"], windows


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--token-budget", 32),
        ("--memory", "1GiB"),
        ("--memory", "1GiB", "--tokens-per-request", "100,50", "--host-memory", "8MiB"),
        ("--memory", "1GiB", "--context", 50, "--host-memory", "3MiB"),
        ("--memory", "900MiB", "--max-sequences", 100, "--block-size", 4),
        ("--device-blocks", 300, *CPU),
        ("--device-blocks", 300, "--host-memory", "1MiB", *CPU),
        ("--requests", 5, "--tokens-per-request", "400,100", "--kv-dtype", "int8", *CPU),
    ],
    ids=lambda options: "_".join(map(str, options)) or "served",
)
def test_an_engine_with_the_printed_options_has_the_planned_blocks_of_each_kind(
    model: str, options: tuple[object, ...], written: Written
) -> None:
    arguments = ("--model", written(model), *options)
    if "--dtype" not in options:
        arguments += ("--dtype", "bfloat16")
    planned = figures(*arguments)
    settings = printed(*arguments)
    found = capacity(settings, written(model))
    assert (found.device_blocks, found.host_blocks, found.windows) == split_of(planned)
    assert planned["cache_bytes"] <= (settings.cache_mib * MIB or planned["cache_bytes"])
    blocks = (found.device_blocks, found.host_blocks)
    manager = KVManager(1)
    for engine in ("a", "b", "c"):
        manager.register(PoolSpec(engine, 1, "model", found.block_size, *blocks, windows=found.windows))


@pytest.mark.parametrize("model", ["some-windows", "all-windows", "large"])
def test_without_options_the_plan_is_that_of_an_engine_with_its_defaults(model: str, written: Written) -> None:
    found = capacity(EngineSettings(), written(model))
    planned = figures("--model", written(model), *CPU)
    assert (found.device_blocks, found.host_blocks, found.windows) == split_of(planned)


def test_without_kinds_the_printed_engine_has_none_either(written: Written) -> None:
    arguments = ("--model", written("some-windows"), "--memory", "1GiB", "--dtype", "bfloat16", "--kinds", "off")
    settings = printed(*arguments)
    assert (settings.kinds, settings.device) == ("off", "cpu")
    found = capacity(settings, written("some-windows"))
    assert (found.device_blocks, found.host_blocks, found.windows) == split_of(figures(*arguments))
    shown = " ".join(run(*arguments).stdout.split())
    assert (
        "4 layers x 2 KV heads x 16 elements x 2 bytes layers with windows keep all tokens, too: --kinds off" in shown
    )


def test_a_real_engine_starts_with_the_printed_options(
    quire: Callable[..., RunningQuire], tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model("windowed")
    options = ("--model", folder, "--memory", "1GiB", "--host-memory", "2MiB", "--dtype", "float32")
    planned = figures(*options, "--tokens-per-request", "100,50")
    line = re.search(r"^quire engine (.*)$", run(*options, "--tokens-per-request", "100,50").stdout, re.MULTILINE)
    assert line
    running = quire("--model", str(folder), *line[1].split())
    running.output.wait_for("engine is ready")
    pool = running.pool()
    [kind] = pool.kinds
    blocks = (pool.device_blocks, pool.host_blocks), (kind.kind.device_blocks, kind.kind.host_blocks)
    [window] = split_of(planned)[2]
    expected = (planned["device_blocks"], planned["host_blocks"]), (window.device_blocks, window.host_blocks)
    assert blocks == expected


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--kinds", "off"), ON_CPU),
        (("--tensor-parallel", "2"), ON_CPU),
        (("--block-size", "24"), "block_size must divide the model's chunks of 64 tokens, not 24"),
    ],
)
def test_a_plan_and_an_engine_refuse_chunks_that_they_cannot_serve_with_the_same_words(
    options: tuple[str, str], fault: str, written: Written
) -> None:
    folder = written("chunks")
    done = run("--model", folder, "--device-blocks", 100, "--device", "cpu", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert fault in " ".join(done.stderr.split())
    name, value = options[0].removeprefix("--").replace("-", "_"), options[1]
    settings = EngineSettings(
        model=str(folder), device="cpu", **{name: int(value) if value.isdigit() else value}
    ).for_device(on_gpu=False)
    with pytest.raises((ModelUnsupported, InvalidSetting), match=re.escape(fault)):
        capacity(settings, folder)


@pytest.mark.parametrize("goal", [("--gpu-memory", "1GiB"), ("--device-blocks", "100")])
def test_chunks_are_not_planned_on_a_gpu(goal: tuple[str, str], written: Written) -> None:
    done = run("--model", written("chunks"), *goal)
    assert done.exit_code == 2
    assert ON_CPU in " ".join(done.stderr.split())


@pytest.mark.parametrize("settings", [{"kinds": "off"}, {"block_size": 24}])
def test_an_engine_refuses_chunks_before_it_looks_for_weights(settings: dict[str, Any], written: Written) -> None:
    with pytest.raises((ModelUnsupported, InvalidSetting), match="chunks of 64 tokens"):
        assemble(EngineSettings(model=str(written("chunks")), device="cpu", attention_backend="torch", **settings))


def test_more_sequences_than_a_step_has_tokens_are_refused_as_by_an_engine(written: Written) -> None:
    done = run("--model", written("some-windows"), "--memory", "1GiB", "--max-sequences", 600)
    assert done.exit_code == 2
    assert "token_budget must be at least max_sequences (600), not 512" in " ".join(done.stderr.split())


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("more", [(), ("--tokens-per-request", "3000,500")])
def test_the_host_memory_holds_the_host_blocks_of_all_kinds(
    model: str, more: tuple[str, ...], written: Written
) -> None:
    asked = 16 * MIB
    options = ("--context", 8000, *more, *CPU, "--device-blocks", 3000, "--host-memory", f"{asked}B")
    planned = figures("--model", written(model), *options)
    _, blocks, [window] = split_of(planned)
    taken = cache_bytes(blocks, planned["block_bytes"]) + cache_bytes(window.host_blocks, window.block_bytes)
    assert asked * 0.98 < taken == planned["host_cache_bytes"] <= asked


def test_a_host_tier_of_most_of_the_memory_leaves_the_rest_to_the_pool(written: Written) -> None:
    options = ("--tokens-per-request", "300,50", "--dtype", "bfloat16", "--host-memory", "1GiB")
    planned = figures("--model", written("some-windows"), "--memory", "2050MiB", *options)
    assert planned["max_sequences"] > 1


@pytest.mark.parametrize("model", ["some-windows", "all-windows"])
def test_no_more_sequences_are_planned_than_each_kind_has_blocks_for(model: str, written: Written) -> None:
    lengths = ("--tokens-per-request", "3000,500")
    planned = figures("--model", written(model), "--memory", "870MiB", "--dtype", "bfloat16", *lengths)
    whole, _, [window] = split_of(planned)
    sequences = planned["max_sequences"]
    assert 1 < sequences < 512
    assert sequences <= PoolSize(16, whole).requests(3500)
    assert sequences * window.most_blocks(16, 16) <= window.device_blocks
    assert sequences <= planned["requests_in_blocks"] <= sequences + 64 // 6, "windows have 64 blocks for two steps"


def test_the_table_shows_blocks_and_memory_of_each_kind(written: Written) -> None:
    options = ("--device-blocks", "300", "--host-memory", "1MiB", *CPU)
    shown = " ".join(run("--model", written("some-windows"), *options).stdout.split())
    # A token has K and V of 2 heads with 16 elements of 2 bytes.
    token = "2 (K and V) x {} x 2 KV heads x 16 elements x 2 bytes"
    assert f"one token 128 bytes in layers that keep all tokens: {token.format('1 layer')}" in shown
    assert f"384 bytes in layers of window-64: {token.format('3 layers')}" in shown
    assert "one block 2.0 KiB 16 tokens in layers that keep all tokens 6.0 KiB in layers of window-64" in shown
    assert "blocks 300 602.0 KiB for layers that keep all tokens tokens 4,800 in these blocks" in shown
    assert "window-64 blocks 70 426.0 KiB for what 3 layers see" in shown
    assert "host cache 1.0 MiB of the host's memory: the host blocks of all kinds, and one of each" in shown
    assert " host blocks 490 982.0 KiB for layers that keep all tokens window-64 host blocks 6 42.0 KiB" in shown


def test_the_table_says_that_kind_0_takes_no_memory_if_all_layers_have_windows(written: Written) -> None:
    shown = " ".join(run("--model", written("all-windows"), "--memory", "1GiB", "--dtype", "bfloat16").stdout.split())
    assert "one token 512 bytes in layers of window-64: 2 (K and V) x 4 layers x" in shown
    assert "one block 8.0 KiB 16 tokens in layers of window-64 cache" in shown
    assert " blocks 524,288 without memory: all layers have windows, so these blocks only count tokens" in shown
    assert "0 bytes" not in shown


def test_the_table_says_that_windows_keep_all_tokens_on_a_gpu(written: Written) -> None:
    shown = " ".join(run("--model", written("some-windows"), "--gpu-memory", "1GiB").stdout.split())
    assert "keep all tokens, too: kinds of blocks are for CPUs without ranks" in shown


def test_a_pool_that_is_larger_than_a_manager_allows_is_printed_with_the_managers_option(written: Written) -> None:
    options = ("--model", written("some-windows"), "--kinds", "off", *CPU)
    assert "quire kvmanager --max-blocks 5000000 " in run(*options, "--device-blocks", 5_000_000).stdout
    assert "quire kvmanager" not in run(*options, "--device-blocks", 4_000_000).stdout
