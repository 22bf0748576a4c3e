"""Predicted memory equals the engine's memory, and the numbers of the PagedAttention paper are reproduced."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, OPTConfig

from engine.attention import TorchBackend
from engine.attention.backend import PagedBatch
from engine.attention.cache import CacheGeometry
from engine.attention.interface import ATTENTION_NAME, register
from engine.attention.paged_context import PagedContext
from engine.errors import ModelUnsupported
from engine.model.loading import load_model
from engine.model.memory_plan import Planner, Workload
from engine.model.model_shape import ModelShape, read_shape, shape_of
from engine.model.sizing import (
    DoesNotFit,
    PoolSize,
    RecordedSizes,
    StepSizes,
    blocks_on_gpu,
    blocks_within,
    cache_bytes,
)
from engine.native.grouped_strips import packed_bytes
from engine.native.llama_weights import FileWeights
from engine.run.sampling import Draw, sample_on_device
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import RowRules
from tests.engine.families import FAMILIES, FURTHER, Checkpoint, Family
from tests.engine.model.peak_memory import peak_bytes
from tests.gguf_models import MIXED, Type, write_llama

GIB = 1 << 30
ALL = FAMILIES | {name: Family(name, config) for name, config in FURTHER.items()}


# The model, by its configuration


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4", "mixed"])
def test_the_header_of_a_gguf_file_predicts_its_packed_weights(kind: str, tmp_path: Path) -> None:
    """Of Q2_K and Q3_K, the kernels' codes have more bits than the file's."""
    types = MIXED if kind == "mixed" else dict.fromkeys(MIXED, Type[kind])
    path = write_llama(tmp_path / "tiny.gguf", types)
    files = FileWeights(tmp_path)
    sizes = [
        packed_bytes(one) if (one := files.grouped(name)) else 2 * prod(files.shape(name) or ()) for name in files.names
    ]
    assert read_shape(path, torch.bfloat16).packed.packed == sum(sizes)


@pytest.mark.parametrize("name", ALL)
def test_the_configuration_predicts_the_loaded_model(name: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(ALL[name])
    shape = read_shape(folder, torch.bfloat16)
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    assert shape.geometry == loaded.geometry
    assert shape.weights_bytes == sum(weights.nbytes for weights in loaded.model.parameters())
    assert shape.context_tokens == loaded.context_tokens
    assert shape.vocabulary_size == loaded.vocabulary_size


def test_a_quantized_configuration_is_refused_with_the_reason(tmp_path: Path) -> None:
    CONFIG_MAPPING["llama"](quantization_config={"quant_method": "hqq"}).save_pretrained(tmp_path / "hqq")
    with pytest.raises(ModelUnsupported, match=r"^hqq: its weights are quantized"):
        read_shape(tmp_path / "hqq", torch.float32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "bloom",
            r"it adds a distance bias to its scores \(ALiBi\), .*; BloomForCausalLM computes its attention itself",
        ),
        ("mpt", r"it adds a distance bias to its scores \(ALiBi\)"),
        ("mamba", "its layer 0 is of type linear_attention, which keeps a state besides or instead of keys and values"),
        ("falcon_mamba", "its layer 0 is of type linear_attention"),
        ("recurrent_gemma", "its layer 0 is of type linear_attention"),
        ("rwkv", "RwkvForCausalLM computes its attention itself"),
        ("xlstm", "its forward call lacks logits_to_keep, so it computes logits for every token"),
    ],
)
def test_a_type_that_is_not_served_is_refused_for_the_reason_that_loading_gives(
    name: str, reason: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[name]().save_pretrained(tmp_path / name)
    with pytest.raises(ModelUnsupported, match=f"^{name}: {reason}"):
        read_shape(tmp_path / name, torch.float32)


@pytest.mark.parametrize("content", ["", "{}", '{"model_type": "no such thing"}'])
def test_an_invalid_configuration_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelUnsupported, match=rf"^{tmp_path.name}: .") as refused:
        read_shape(tmp_path, torch.float32)
    assert "\n" not in str(refused.value)


# Table 1 of the paper: OPT in float16 on A100s


def opt(hidden: int, layers: int, heads: int) -> ModelShape:
    config = OPTConfig(
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2048,
    )
    return shape_of(config, torch.float16)


# The paper's GB are 10^9 bytes for weights and 2^30 for the cache.
@pytest.mark.parametrize(
    ("shape", "weights_gb", "token_kib", "cache_gib", "slots"),
    [
        pytest.param(opt(5120, 40, 40), 26, 800, 12.0, 15_700, id="13B"),
        pytest.param(opt(9216, 64, 72), 132, 2304, 21.3, 9_700, id="66B"),
        pytest.param(opt(12288, 96, 96), 346, 4608, 264.0, 60_100, id="175B"),
    ],
)
def test_weights_and_slots_of_the_papers_servers(
    shape: ModelShape, weights_gb: float, token_kib: int, cache_gib: float, slots: int
) -> None:
    assert shape.weights_bytes / 1e9 == pytest.approx(weights_gb, rel=0.015)
    assert shape.geometry.block_bytes(1, torch.float16) == token_kib * 1024
    block_bytes = shape.geometry.block_bytes(16, torch.float16)
    # The paper's system has no block of padding.
    pool = PoolSize(16, blocks_within(int(cache_gib * GIB) + block_bytes, block_bytes))
    assert pool.tokens == pytest.approx(slots, rel=0.005)


def test_opt_13b_batches_as_in_the_papers_figure_13() -> None:
    """ShareGPT: 7.00 on average with reservations of 2,048 tokens, and 30.42 with blocks, 4.3 times as many."""
    pool = PoolSize(16, 15_700 // 16)
    assert pool.reserved_requests(2048) == 7
    assert pool.requests(161 + 338) == 30


def test_opt_13b_on_an_a100_gets_the_rest_of_the_memory() -> None:
    """The paper's 12 of 40 GB: three tenths, and the weights take 65 %."""
    workload = Workload(block_size=16, token_budget=2048, context_tokens=2048, max_sequences=64, lengths=(161, 338))
    planned = Planner(opt(5120, 40, 40), torch.float16, workload, on_gpu=True).for_memory(40 * GIB, 0.9, 0)
    assert planned.token_bytes == 800 * 1024
    assert cache_bytes(planned.device_blocks, planned.block_bytes) / GIB == pytest.approx(12, rel=0.08)


# The cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_tensors_have_the_predicted_size_and_one_more_block_does_not_fit(
    dtype: torch.dtype,
) -> None:
    geometry = CacheGeometry.uniform(layers=3, kv_heads=2, head_size=16)
    block_bytes = geometry.block_bytes(8, dtype)
    memory = 100 * block_bytes + 17
    blocks = blocks_within(memory, block_bytes)
    backend = TorchBackend(geometry, 8, blocks, dtype, host_blocks=7)
    assert backend.host_cache is not None
    assert backend.cache.nbytes == cache_bytes(blocks, block_bytes) <= memory < cache_bytes(blocks + 1, block_bytes)
    assert backend.host_cache.nbytes == cache_bytes(7, block_bytes)


def test_memory_for_padding_alone_holds_no_block() -> None:
    assert [blocks_within(memory, 10) for memory in (0, 9, 10, 19, 20, 35)] == [0, 0, 0, 0, 1, 2]
    assert cache_bytes(0, 10) == 0


# One step


def shape_in_float32(config: Any) -> ModelShape:
    return shape_of(config, torch.float32)


def test_sampling_with_every_rule_takes_less_than_predicted_but_not_far_less() -> None:
    rows, vocabulary = 16, 20_000
    sizes = shape_in_float32(CONFIG_MAPPING["llama"](vocab_size=vocabulary, num_hidden_layers=1)).step_sizes(0, rows)
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=1)
    penalties = LogitRules(1.1, 0.1, logit_bias=((1, 2.0),), allowed_token_ids=(1,))
    rules = RowRules(penalties, (1, 2), (3,), mask=b"\xff" * (vocabulary // 8))
    draws = [Draw(sampling, 0, place, rules) for place in range(rows)]
    # The profiler does not see the logits, because they are allocated before.
    logits = torch.randn(rows, vocabulary, dtype=torch.bfloat16)
    taken = logits.nbytes + peak_bytes(lambda: sample_on_device(logits, draws))
    assert 0.6 * sizes.bytes(2) < taken < sizes.bytes(2)


class _NoCache:
    """An attention backend without a cache, to measure a step without attention."""

    def write(self, *_: object) -> None:
        pass

    def attend(self, _layer: int, query: torch.Tensor, *_: object) -> torch.Tensor:
        return query.clone()


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {
    "llama": HEADS | {"hidden_size": 128, "intermediate_size": 384},
    "qwen3": HEADS | {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32},
    "gemma2": HEADS | {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32},
    "mixtral": HEADS | {"hidden_size": 128, "intermediate_size": 256},
    "gpt2": {"hidden_size": 128, "num_attention_heads": 4},
    "opt": {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", WIDE)
def test_activations_take_less_than_predicted_but_not_far_less(name: str) -> None:
    tokens = 256
    config = CONFIG_MAPPING[name](num_hidden_layers=2, vocab_size=64, bos_token_id=1, eos_token_id=2, **WIDE[name])
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    ids = torch.arange(tokens) % 64
    paged = PagedContext(_NoCache(), PagedBatch.of((), 1, ids.device))  # type: ignore[arg-type]

    @torch.inference_mode()
    def run() -> None:
        places = torch.tensor([tokens - 1])
        positions = torch.arange(tokens)[None]
        model(input_ids=ids[None], position_ids=positions, use_cache=False, logits_to_keep=places, paged=paged)

    predicted = shape_in_float32(config).step_sizes(tokens, 0).bytes(4)
    assert 0.4 * predicted < peak_bytes(run) < predicted


# Plans


@pytest.mark.parametrize(
    ("utilization", "used", "free", "blocks"),
    [
        (0.9, 300, 690, 59),  # 10 are the context's
        (1.0, 300, 690, 66),  # of the free memory, 20 stay for recorded steps
        (0.9, 300, 400, 37),  # other processes have 300
        (0.32, 300, 690, 1),
    ],
)
def test_a_gpus_pool_has_the_share_that_weights_and_step_leave_and_no_more_than_is_free(
    utilization: float, used: int, free: int, blocks: int
) -> None:
    assert blocks_on_gpu(1000, utilization, used, free, 10) == blocks


def test_a_gpu_without_room_for_a_block_is_refused_with_the_reason() -> None:
    with pytest.raises(DoesNotFit, match=r"^0\.90 GiB of it can be used, but a pool of one block needs 1\.02 GiB$"):
        blocks_on_gpu(GIB, 0.9, GIB, 0, 10 << 20)
    with pytest.raises(DoesNotFit, match=r"^0\.02 GiB of it are free beside weights, a step and recorded"):
        blocks_on_gpu(GIB, 0.9, GIB // 2, GIB // 50, 10 << 20)


# Llama-3-8B in bfloat16 on a GPU of 79.1 GiB, whose context takes 0.6 GiB.
WEIGHTS, GPU_BYTES, CONTEXT_BYTES = 16_060_522_496, int(79.1 * GIB), int(0.6 * GIB)


@pytest.mark.parametrize(("sequences", "utilization"), [(1024, 0.9), (512, 0.97), (256, 0.97), (1024, 1.0)])
def test_steps_of_many_sequences_can_be_recorded_beside_the_pool(sequences: int, utilization: float) -> None:
    recorded = RecordedSizes(sequences, 8192 // 16, 128_256, 2)
    used = WEIGHTS + StepSizes(2048, sequences, 4096, 14336, 128_256).bytes(2)
    free = GPU_BYTES - CONTEXT_BYTES - used
    block_bytes = 16 * 131_072
    blocks = blocks_on_gpu(GPU_BYTES, utilization, used, free - recorded.reserved, block_bytes)
    left = free - cache_bytes(blocks, block_bytes)
    activations = StepSizes(sequences, 0, 4096, 14336, 128_256).bytes(2)
    assert left >= recorded.kept + activations + GIB, "a GiB for launches"
    assert recorded.kept < 1.02 * sequences * 128_256 * 2, "logits of the largest size"


def planner(*, on_gpu: bool = True, **workload: Any) -> Planner:
    config = CONFIG_MAPPING["llama"](
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        **HEADS,
        max_position_embeddings=256,
    )
    bounds = {"block_size": 16, "token_budget": 64, "context_tokens": 256} | workload
    return Planner(shape_of(config, torch.bfloat16), torch.bfloat16, Workload(**bounds), on_gpu=on_gpu)


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("sequences", [None, 4])
def test_a_plans_blocks_fit_into_the_memory_and_one_block_more_does_not(on_gpu: bool, sequences: int | None) -> None:
    one = planner(on_gpu=on_gpu, max_sequences=sequences, lengths=(30, 40))
    planned = one.for_memory(2 * GIB, 0.9, 100 << 20)
    assert planned.device_blocks > 1000
    assert one.for_blocks(planned.device_blocks, 0.9, 100 << 20).memory_bytes <= 2 * GIB
    assert one.for_blocks(planned.device_blocks + 1, 0.9, 100 << 20).memory_bytes > 2 * GIB


def test_on_a_cpu_the_host_tier_takes_memory_from_the_pool_and_on_a_gpu_it_does_not() -> None:
    for on_gpu, lost in ((True, 0), (False, 1600)):
        one = planner(on_gpu=on_gpu)
        with_tier, without = (one.for_memory(2 * GIB, 0.9, host) for host in (1600 * 4096, 0))
        assert without.block_bytes == 4096
        assert with_tier.host_blocks == 1599
        assert without.device_blocks - with_tier.device_blocks == lost


def test_as_many_sequences_as_fit_are_planned_and_no_more_than_a_step_feeds() -> None:
    roomy = planner(lengths=(30, 40)).for_memory(2 * GIB, 0.9, 0)
    assert roomy.max_sequences == 64
    tight = planner(lengths=(30, 40)).for_memory(3 << 20, 1.0, 0)
    assert 1 < tight.max_sequences < 64
    # One sequence less saves a row of sampling: 12 blocks, enough for two requests.
    assert tight.max_sequences <= tight.pool.requests(70) <= tight.max_sequences + 3


def test_the_blocks_of_requests_hold_them_and_one_block_less_does_not() -> None:
    blocks = planner(lengths=(30, 40)).blocks_for(10)
    assert PoolSize(16, blocks).requests(70) == 10
    assert PoolSize(16, blocks - 1).requests(70) == 9


def test_a_requests_last_token_needs_no_slot() -> None:
    assert [PoolSize(16, 0).blocks_of(tokens) for tokens in (1, 2, 17, 18, 33, 34)] == [1, 1, 1, 2, 2, 3]


def test_too_little_memory_is_refused_naming_the_need() -> None:
    with pytest.raises(DoesNotFit, match=r"^0\.90 GiB of it can be used, but a pool of one block needs 1\.63 GiB$"):
        planner(on_gpu=False, block_size=4096).for_memory(GIB, 0.9, 900 << 20)
