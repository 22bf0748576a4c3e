"""`quire plan`: its figures equal those of a real engine, and impossible plans are refused."""

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import gguf
import pytest

from engine.errors import ModelUnsupported
from engine.native import cpu_class
from engine.parallel.loading import ModelFolder
from services.cli.main import cli
from services.models.gguf_conversion import convert
from tests.engine.image_text import write_image_text
from tests.engine.native_kernels import FOLDER as KERNELS
from tests.gguf_models import HEADS, HIDDEN, KV_HEADS, LAYERS, MIXED, OTHERS, SHAPES, write_llama
from tests.model_types.cases import case_named, configuration
from tests.running_quire import RunningQuire
from tests.services.models.test_model_store import write_tiny_llama
from tests.tiny_models import usual_size

Tiny = Callable[[str], Path]
MIB = 1 << 20


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner(env={"COLUMNS": "120"}).invoke(cli, ["plan", *map(str, arguments)])


def figures(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def test_a_real_engine_with_the_options_that_it_prints_has_its_pool_and_stays_within_the_memory(
    quire: Callable[..., RunningQuire], tiny_model: Tiny
) -> None:
    options = ("--model", tiny_model("llama"), "--memory", "1GiB", "--host-memory", "8MiB", "--max-sequences", "16")
    planned, shown = figures(*options), run(*options).stdout
    line = re.search(r"^quire engine (.*)$", shown, re.MULTILINE)
    assert line
    running = quire("--model", str(tiny_model("llama")), *line[1].split())
    running.output.wait_for("engine is ready")  # its pool is attached, which a gateway does not wait for
    pool = running.pool()
    assert (pool.device_blocks, pool.host_blocks) == (planned["device_blocks"], planned["host_blocks"])
    status = Path(f"/proc/{running.children()['engine']}/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert peak
    assert int(peak[1]) * 1024 < planned["memory_bytes"]


def test_a_plan_without_options_is_that_of_quire_serve_on_this_machine(tiny_model: Tiny) -> None:
    from services.engine.settings import EngineSettings
    from services.engine.startup.assembly import assemble

    folder = str(tiny_model("llama"))
    settings = EngineSettings(model=folder, kernels_folder=str(KERNELS))
    parts, planned = assemble(settings), figures("--model", folder)
    capacity, limits = parts.scheduler.capacity, parts.scheduler.limits
    assert planned["device_blocks"] == capacity.device_blocks
    assert planned["dtype"] == str(parts.loaded.dtype).removeprefix("torch.")
    assert (planned["max_sequences"], planned["token_budget"]) == (limits.max_sequences, limits.token_budget)


@pytest.mark.parametrize(("classes", "dtype"), [((), "float32"), (("avx2",), "bfloat16")])
def test_the_type_on_a_cpu_is_what_an_engine_would_choose(
    classes: tuple[str, ...], dtype: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_class, "supported", lambda: classes)
    options = ("--model", tiny_model("llama"), "--memory", "1GiB")
    assert figures(*options)["dtype"] == dtype
    assert figures(*options, "--dtype", "float32")["dtype"] == "float32"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_an_engine_with_the_planned_cache_bytes_has_the_planned_blocks(tiny_model: Tiny, kv_dtype: str) -> None:
    from services.engine.settings import EngineSettings
    from services.engine.startup.assembly import assemble

    folder = str(tiny_model("llama"))
    settings = EngineSettings(model=folder, attention_backend="torch", cache_mib=8, device="cpu", kv_dtype=kv_dtype)
    parts = assemble(settings)
    blocks = parts.scheduler.capacity.device_blocks
    # The backend torch does not use the CPU's kernels, so the engine chooses float32.
    options = ("--model", folder, "--device-blocks", blocks, "--device", "cpu", "--dtype", "float32")
    planned = figures(*options, "--kv-dtype", kv_dtype)
    assert planned["kv_dtype"] == kv_dtype
    assert planned["cache_bytes"] <= 8 * MIB < planned["cache_bytes"] + planned["block_bytes"]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_kept_blocks_of_a_real_engine_take_the_planned_memory(tiny_model: Tiny, kv_dtype: str) -> None:
    from services.engine.settings import EngineSettings
    from services.engine.startup.assembly import assemble

    folder = str(tiny_model("llama"))
    settings = EngineSettings(model=folder, attention_backend="torch", device="cpu", kv_dtype=kv_dtype)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        keeping = replace(settings, device_blocks=3000, host_blocks=500, keep_blocks=f"{memory}/b")
        kept = assemble(keeping).kept
        assert kept
        facts = (Path(memory) / "b").stat()
        kept.end(keep=False)
    pool = ("--device-blocks", "3000", "--device", "cpu", "--dtype", "float32", "--kv-dtype", kv_dtype)
    common = ("--model", folder, *pool)
    options = (*common, "--host-memory", f"{figures(*common)['block_bytes'] * (500 + 1)}B")
    planned = figures(*options)
    assert planned["host_blocks"] == 500
    assert planned["kept_bytes"] == facts.st_size == facts.st_blocks * 512
    shown = " ".join(run(*options).stdout.split())
    assert f"; a tmpfs needs size={facts.st_size >> 20}m" in shown
    assert "MiB in place of the cache, with 72 bytes for each block" in shown


def test_nothing_is_planned_to_be_kept_on_gpus_and_by_ranks(tiny_model: Tiny) -> None:
    common = ("--model", tiny_model("llama"), "--device-blocks", "100")
    for options in (("--device", "cuda"), ("--device", "cpu", "--tensor-parallel", "2")):
        assert figures(*common, *options)["kept_bytes"] == 0
        assert "kept" not in run(*common, *options).stdout


def test_a_cache_in_8_bits_is_planned_with_its_scales(tiny_model: Tiny) -> None:
    options = ("--model", tiny_model("llama"), "--device-blocks", "100", "--device", "cpu", "--dtype", "bfloat16")
    codes, plain = figures(*options, "--kv-dtype", "int8"), figures(*options)
    assert codes["block_bytes"] / plain["block_bytes"] == (16 + 2) / (16 * 2)  # a head has 16 elements
    shown = run(*options, "--kv-dtype", "int8").stdout
    assert " --dtype bfloat16 --kv-dtype int8" in shown
    assert "(16 bytes and 2 of a scale)" in " ".join(shown.split())


def test_a_cache_in_8_bits_on_a_gpu_is_planned_with_the_only_backend_that_reads_it(tiny_model: Tiny) -> None:
    shown = run("--model", tiny_model("llama"), "--device-blocks", "100", "--kv-dtype", "int8").stdout
    assert " --dtype bfloat16 --kv-dtype int8 --attention-backend torch" in shown


def test_a_cache_in_8_bits_is_refused_where_no_engine_has_it(tiny_model: Tiny) -> None:
    options = ("--device", "cpu", "--tensor-parallel", "2", "--kv-dtype", "int8")
    done = run("--model", tiny_model("llama"), "--device-blocks", "100", *options)
    assert done.exit_code == 2
    assert "--tensor-parallel must be at most 1 with --kv-dtype int8, not 2" in done.output


@pytest.mark.parametrize(("weights", "bits"), [("auto", 16), ("bf16", 16), ("int8", 8), ("int4", 5)])
def test_quantized_weights_are_planned_beside_the_loaded_ones(tiny_model: Tiny, weights: str, bits: int) -> None:
    options = ("--model", tiny_model("llama"), "--device-blocks", "100", "--device", "cpu", "--dtype", "bfloat16")
    planned = figures(*options, "--weights", weights)
    assert planned["weights"] == (weights if bits < 16 else "bfloat16")
    # Norms, embeddings and the scales of outputs are no matrices.
    packed = planned["weights_bytes"] - 2 * planned["parameters"]
    assert bits / 8 * 0.9 < packed / planned["parameters"] < bits / 8 * 1.5
    shown = " ".join(run(*options, "--weights", weights).stdout.split())
    assert (f" --weights {weights} " in shown) == (weights != "auto")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--gpu-memory", "8GiB"), "--device must be auto or cpu with --weights int8, not cuda"),
        (
            ("--memory", "8GiB", "--dtype", "float32"),
            "--dtype must be auto or bfloat16 with --weights int8, not float32",
        ),
        (
            ("--memory", "8GiB", "--tensor-parallel", "2"),
            "--tensor-parallel must be at most 1 with --weights int8, not 2",
        ),
    ],
)
def test_quantized_weights_are_refused_where_no_engine_has_them(
    tiny_model: Tiny, options: tuple[str, ...], reason: str
) -> None:
    done = run("--model", tiny_model("llama"), "--weights", "int8", *options)
    assert done.exit_code == 2
    assert reason in done.output
    other = run("--model", tiny_model("gpt2"), "--weights", "int8", "--memory", "8GiB")
    assert "int8 is not for this model: the CPU's kernels do not run it as a whole" in " ".join(other.output.split())


def test_a_gguf_file_is_planned_with_the_bytes_that_it_has(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    options = ("--model", path, "--device-blocks", "100", "--device", "cpu", "--dtype", "bfloat16")
    planned = figures(*options)
    assert planned["weights"] == "Q6_K"
    packed = planned["weights_bytes"] - 2 * planned["parameters"]
    assert packed == pytest.approx(path.stat().st_size, rel=0.05)


def test_a_gguf_file_is_planned_with_the_sizes_that_its_engine_has(tmp_path: Path) -> None:
    def wide(writer: gguf.GGUFWriter) -> None:  # as in Qwen3's small models, whose heads are wider than hidden / heads
        writer.add_key_length(2 * HIDDEN)

    shapes = {"attn_q": (HEADS, HIDDEN), "attn_k": (KV_HEADS, HIDDEN), "attn_v": (KV_HEADS, HIDDEN)}
    with pytest.MonkeyPatch.context() as patch:
        for part, (heads, hidden) in shapes.items():
            patch.setitem(SHAPES, part, (heads * 2 * HIDDEN, hidden))
        patch.setitem(SHAPES, "attn_output", (HIDDEN, HEADS * 2 * HIDDEN))
        patch.setitem(OTHERS, "qwen3", dict.fromkeys(OTHERS["qwen3"], (2 * HIDDEN,)))
        path = write_llama(tmp_path / "tiny.gguf", MIXED, "qwen3", wide)
    convert(path, tmp_path / "folder")
    (tmp_path / "folder" / "tiny.gguf").symlink_to(path)
    options = ("--device-blocks", "100", "--device", "cpu", "--dtype", "bfloat16")
    planned = figures("--model", path, *options)
    assert planned["token_bytes"] == 2 * LAYERS * KV_HEADS * 2 * HIDDEN * 2
    of_folder = figures("--model", tmp_path / "folder", *options)
    assert planned | {"model": ""} == of_folder | {"model": ""}


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        (0, "cannot mmap an empty file"),
        (90, "it is truncated: its header ends behind the file's end"),
        (-4096, "it is truncated: tensor blk.1.ffn_down.weight ends behind the file's end"),
    ],
)
def test_a_truncated_gguf_file_is_refused_by_name(tmp_path: Path, size: int, fault: str) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    path.write_bytes(path.read_bytes()[:size])
    done = run("--model", path, "--device-blocks", "100")
    assert done.exit_code == 2
    assert f"tiny.gguf cannot be read: {fault}" in " ".join(done.output.split())


def test_memory_gives_blocks_and_those_blocks_need_that_memory(tiny_model: Tiny) -> None:
    common = ("--model", tiny_model("opt"), "--block-size", "32", "--tokens-per-request", "50,60")
    forward = figures(*common, "--gpu-memory", "64MiB")
    back = figures(*common, "--device-blocks", forward["device_blocks"])
    assert forward["dtype"] == "bfloat16"
    assert forward["requests_in_blocks"] == forward["tokens"] // 128
    assert 0 <= forward["memory_bytes"] - back["memory_bytes"] < 2 * forward["block_bytes"]


def test_ranks_share_blocks_and_weights(tiny_model: Tiny) -> None:
    common = ("--model", tiny_model("llama"), "--device-blocks", "100")
    one, two = figures(*common), figures(*common, "--tensor-parallel", "2")
    assert two["block_bytes"] * 2 == one["block_bytes"]
    assert one["weights_bytes"] / 2 <= two["weights_bytes"] < 0.51 * one["weights_bytes"]
    assert "--tensor-parallel 2" in run(*common, "--tensor-parallel", "2").stdout


def test_ranks_that_cannot_share_a_model_are_refused(tiny_model: Tiny) -> None:
    done = run("--model", tiny_model("llama"), "--requests", "1", "--tensor-parallel", "3")
    assert done.exit_code == 2
    assert "3, which does not divide its 6 attention heads and 2 KV heads: possible are 1, 2" in done.output


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_plan_and_an_engine_refuse_ranks_that_transformers_gives_no_heads_of_their_own(
    tmp_path: Path, family: str
) -> None:
    configuration(case_named(family)).save_pretrained(tmp_path)
    refusal = f"transformers' tensor-parallel plan for models of type '{family}' keeps all heads on every rank"
    done = run("--model", tmp_path, "--requests", "1", "--tensor-parallel", "2")
    assert done.exit_code == 2
    assert refusal in " ".join(done.output.split())
    with pytest.raises(ModelUnsupported, match=refusal):
        ModelFolder(tmp_path, 2)


def test_requests_are_converted_to_blocks(tiny_model: Tiny) -> None:
    planned = figures("--model", tiny_model("gpt2"), "--requests", "10", "--tokens-per-request", "16,17")
    assert planned["device_blocks"] == 20
    assert planned["requests_in_blocks"] == planned["max_sequences"] == 10
    assert planned["max_requests"] == 13
    assert planned["requests_of_full_context"] == planned["requests_reserving_the_context"] == 0


def test_no_more_sequences_are_planned_than_an_engine_can_have(tiny_model: Tiny) -> None:
    options = ("--model", tiny_model("llama"), "--device-blocks", 1 << 20, "--token-budget", 1 << 17)
    assert figures(*options, "--tokens-per-request", "8,8")["max_sequences"] == 2048


def test_a_gguf_file_is_planned_from_its_metadata_without_conversion(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf")
    planned = figures("--model", tmp_path / "tiny.gguf", "--device-blocks", "10", "--dtype", "float32")
    assert planned["token_bytes"] == 2 * 1 * 1 * 16 * 4
    assert planned["context_tokens"] == 64
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_plan_names_the_model_whose_text_part_it_is(tiny_model: Tiny, tmp_path: Path) -> None:
    write_image_text("llava", tmp_path)
    options = ("--device-blocks", "100", "--device", "cpu", "--dtype", "float32")
    assert figures("--model", tmp_path, *options)["text_part_of"] == "llava"
    shown = run("--model", tmp_path, *options).stdout
    assert "only the text part of this image-text model (llava) is served" in shown
    assert figures("--model", tiny_model("llama"), *options)["text_part_of"] is None


@usual_size
def test_the_table_shows_the_formula_and_the_gain_of_paging(tiny_model: Tiny) -> None:
    common = ("--model", tiny_model("llama"), "--dtype", "float32", "--device", "cpu")
    shown = run(*common, "--device-blocks", "1280", "--tokens-per-request", "30,35", "--host-memory", "1MiB").stdout
    flat = " ".join(shown.split())
    assert "one token 768 bytes 2 (K and V) x 3 layers x 2 KV heads x 16 elements x 4 bytes" in flat
    assert "blocks 1,280 tokens 20,480 requests of 2,048 tokens 10 " in flat
    assert "requests of 65 tokens 320 in blocks, none of them shared" in flat
    assert "the same without paging 10 each reserves 2,048 tokens: in blocks 32.0 times as many" in flat
    assert "empty slots per request 7.5 in the last block, 10.3%" in flat
    assert "host blocks 84 1,020.0 KiB of the host's memory, 7% of the pool" in flat
    assert "process" in flat
    small = run(*common, "--device-blocks", "10").stdout
    assert "requests of 2,048 tokens 0 a request may have 161 tokens at most" in " ".join(small.split())


@pytest.mark.parametrize(
    ("kv_dtype", "token_bytes", "derivation"),
    [
        ("auto", 4 * 4 * (24 + 16) * 4, "4 layers x 4 KV heads x (K: 24 elements x 4 bytes, V: 16 elements x 4 bytes)"),
        (
            "int8",
            4 * 4 * (26 + 18),
            "4 layers x 4 KV heads x (K: (24 bytes and 2 of a scale), V: (16 bytes and 2 of a scale))",
        ),
    ],
)
def test_the_table_shows_keys_and_values_of_different_size_and_what_latents_would_take(
    tmp_path: Path, kv_dtype: str, token_bytes: int, derivation: str
) -> None:
    configuration(case_named("deepseek_v3")).save_pretrained(tmp_path)
    options = ("--model", tmp_path, "--dtype", "float32", "--device", "cpu", "--kv-dtype", kv_dtype)
    assert figures(*options, "--device-blocks", "100")["token_bytes"] == token_bytes
    flat = " ".join(run(*options, "--device-blocks", "100").stdout.split())
    assert derivation in flat
    latents = 160 if kv_dtype == "int8" else 640
    assert f"its attention is latent: K and V of all heads are cached, 4 times the {latents} bytes of its" in flat


@pytest.mark.parametrize(
    ("arguments", "status", "fault"),
    [
        (("--device", "cuda"), 2, "--device is cuda, but torch found no GPU: give --gpu-memory"),
        (("--memory", "8GiB", "--requests", "1"), 2, "give one of --gpu-memory, --memory,"),
        (("--memory", "8GiB", "--device", "cuda"), 2, "--device is only for --device-blocks and --requests"),
        (
            ("--gpu-memory", "80"),
            2,
            "'--gpu-memory': must be a size with its unit, such as 80GiB, and at least 1MiB, not '80'",
        ),
        (("--memory", "much"), 2, "'--memory': must be a size such as 80GiB or 24GB, not 'much'"),
        (("--device-blocks", "0"), 2, "'--device-blocks'"),
        (("--device-blocks", "9" * 20), 2, "'--device-blocks'"),
        (("--memory", "1GiB", "--token-budget", "131073"), 2, "'--token-budget'"),
        (("--requests", "9" * 12), 2, "--requests need"),
        (
            ("--device-blocks", "9", "--memory-utilization", "1.5"),
            2,
            "must be a number at least 0.01 and at most 1, not 1.5",
        ),
        (("--device-blocks", "9", "--memory-utilization", "1e-320"), 2, "must be a number at least 0.01 and at most 1"),
        (("--gpu-memory", "8TiB", "--block-size", "1"), 2, "--gpu-memory has room for "),
        (("--memory", "8GiB", "--host-memory", "8TiB", "--block-size", "1"), 2, "--host-memory has room for "),
        (
            ("--device-blocks", "9", "--tokens-per-request", "5"),
            2,
            "must be two numbers of tokens above 0, such as 161,338, not '5'",
        ),
        (
            ("--device-blocks", "9", "--tokens-per-request", "0,5"),
            2,
            "must be two numbers of tokens above 0, such as 161,338, not '0,5'",
        ),
        (("--device-blocks", "9", "--context", "2049"), 2, "--context is 2049, but the model's context has 2048"),
        (
            ("--device-blocks", "9", "--tokens-per-request", "2000,49"),
            2,
            "--tokens-per-request is 2049 tokens, more than the longest, 2048",
        ),
        (("--memory", "500MiB"), 1, "--memory is too small: 0.44 GiB of it can be used, but a pool of one block needs"),
        (("--gpu-memory", "1MiB"), 1, "--gpu-memory is too small: "),
    ],
)
def test_invalid_plans_are_refused_by_the_options_name(
    arguments: tuple[str, ...], status: int, fault: str, tiny_model: Tiny
) -> None:
    done = run("--model", tiny_model("llama"), *arguments)
    assert (done.exit_code, done.stdout) == (status, "")
    assert fault in " ".join(done.stderr.split())


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_model_that_cannot_be_read_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    if content:
        (tmp_path / "config.json").write_text(content)
    done = run("--model", tmp_path, "--device-blocks", "9")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"--model {tmp_path}: " in " ".join(done.stderr.split())
