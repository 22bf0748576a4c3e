"""The GPU decoder and its captured steps, on a GPU or under Triton's interpreter."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blocks import blocks_for
from engine.attention import TorchBackend
from engine.attention.backend import AttentionBackend
from engine.attention.llama_shape import is_llama_shaped
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.sizing import RecordedSizes
from engine.run.runner import ModelRunner
from engine.schedule.capacity import Capacity
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.step_plan import Work
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, Checkpoint, Family
from tests.engine.launch_tape import LaunchTape, MemoryFreed, NotRecordable
from tests.engine.triton_case import DEVICE, make_triton_backend
from tests.engine_in_process import GREEDY, EngineInProcess

pytest.importorskip("triton")

from engine.gpu.graphs import CudaRecorder, RecordedDecoder, Recorder, Result, Run, batch_sizes
from engine.gpu.llama import LlamaDecoder
from engine.gpu.llama_weights import fused
from engine.triton_kernels.embedding import embed_part
from engine.triton_kernels.gated import silu_gated
from engine.triton_kernels.norm import add_and_norm

BLOCK = 16
# Biases and windows; norms of Q and K.
KINDS = [("qwen2 with windows", torch.float32), ("qwen3", torch.float32)]
if DEVICE.type == "cuda":  # the interpreter takes long for it
    KINDS.append(("llama", torch.bfloat16))
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}

Tiny = Callable[[str], Path]


def two_layers(kind: str) -> Family:
    """Return a family with two layers, the second with a window if the family has windows."""
    family = FAMILIES[kind]
    return family._replace(config=family.config | {"num_hidden_layers": 2, "max_window_layers": 1})


def run_again(run: Run[Result]) -> tuple[Callable[[], None], Result]:
    """Run the function again into the same memory instead of a replay, because torch attention reads lengths."""
    output = run()
    assert isinstance(output, torch.Tensor)

    def play() -> None:
        output.copy_(run())

    return play, output


def keeps_its_result(run: Run[Result]) -> tuple[Callable[[], None], Result]:
    """Capture nothing, and keep the result as a graph does."""
    result = run()
    return lambda: None, result


class OfOneLayer:
    """A decoder of embedding and head alone, quick for a thousand sequences."""

    integers = ModulesDecoder.integers

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: Any) -> Any:
        return self._model.lm_head(self._model.model.embed_tokens(token_ids)[places])


def storages(decoder: RecordedDecoder) -> dict[int, int]:
    """Return the bytes of all tensors that a decoder keeps alive besides the model's, by their address."""
    found: dict[int, int] = {}
    seen, open_ = set(), [decoder]
    while open_:
        one: Any = open_.pop()
        if id(one) in seen or isinstance(one, OfOneLayer | type | ModuleType):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif not isinstance(one, FunctionType):
            open_ += gc.get_referents(one)
        else:
            open_ += [cell.cell_contents for cell in one.__closure__ or ()]
    return found


RECORDER: Recorder = CudaRecorder(DEVICE) if DEVICE.type == "cuda" else run_again
GRAPHS: Recorder = CudaRecorder(DEVICE) if DEVICE.type == "cuda" else LaunchTape()


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
def test_logits_are_those_of_the_models_modules(checkpoint: Checkpoint, kind: str, dtype: torch.dtype) -> None:
    loaded = load_model(checkpoint(two_layers(kind)), dtype, DEVICE)
    reference = ModelRunner(loaded, TorchBackend(loaded.geometry, BLOCK, 32, dtype, DEVICE), BLOCK)
    long, short, one = prompt(40, 1), prompt(18, 2), prompt(1, 3)
    tables = (7, 3, 9), (2, 8), (5,)
    parts = (
        ((long[:30], 0, tables[0][:2]), (short[:17], 0, tables[1])),
        ((short, 17, tables[1]), (one, 0, tables[2]), (long, 30, tables[0])),
    )
    expected = [logits(reference, *part) for part in parts]
    assert is_llama_shaped(loaded.model)
    backend = make_triton_backend()(loaded.geometry, BLOCK, 32, dtype)
    decoder = LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    found = [logits(ModelRunner(loaded, backend, BLOCK, decoder=decoder), *part) for part in parts]
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).square().mean().sqrt() / theirs.std()) < TOLERANCES[dtype]


def test_the_models_modules_share_the_weights_that_were_fused(tiny_model: Tiny) -> None:
    loaded = load_model(tiny_model("llama"), torch.float32, DEVICE)
    attention = loaded.model.model.layers[0].self_attn
    before = attention.k_proj.weight.detach().clone()
    backend = make_triton_backend()(loaded.geometry, BLOCK, 4, torch.float32)
    LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    weights = [one.weight for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(weights[1], before)
    assert len({one.untyped_storage().data_ptr() for one in weights}) == 1


def test_matrices_that_were_loaded_side_by_side_are_not_copied(tiny_model: Tiny) -> None:
    loaded = load_model(tiny_model("llama"), torch.float32, DEVICE)
    attention = loaded.model.model.layers[0].self_attn
    parts = attention.q_proj, attention.k_proj, attention.v_proj
    matrix = torch.cat([one.weight.detach() for one in parts])
    for one, rows in zip(parts, matrix.split([len(one.weight) for one in parts]), strict=True):
        one.weight.data = rows
    LlamaDecoder.of_model(
        loaded.model, make_triton_backend()(loaded.geometry, BLOCK, 4, torch.float32), loaded.context_tokens
    )
    assert attention.q_proj.weight.data_ptr() == matrix.data_ptr()
    together = fused(parts)
    assert together.data_ptr() == matrix.data_ptr()
    assert torch.equal(together, matrix)
    assert fused(parts[::-1]).data_ptr() != matrix.data_ptr(), "in another order they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [64, 576, 1000])
def test_a_sum_is_normalized_as_in_the_modules(hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden)
    residual, computed = (torch.randn(5, hidden, device=DEVICE).to(dtype) for _ in range(2))
    norm = LlamaRMSNorm(hidden, 1e-5).to(DEVICE, dtype)
    norm.weight.data.normal_()
    with torch.inference_mode():
        summed = residual + computed
        expected, first = norm(summed), norm(residual)
        assert_close(add_and_norm(residual, None, norm.weight, 1e-5), first)
        assert_close(add_and_norm(residual, computed, norm.weight, 1e-5), expected)
    assert torch.equal(residual, summed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_a_product_are_added_in_their_order_in_float32_and_rounded_once(
    parts: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(parts)
    residual, computed = (
        torch.randn(7, 576, device=DEVICE).to(dtype),
        torch.randn(parts, 7, 576, device=DEVICE).to(dtype),
    )
    norm = LlamaRMSNorm(576, 1e-5).to(DEVICE, dtype)
    summed = residual.float()
    for part in computed:
        summed = summed + part.float()
    normed = add_and_norm(residual, computed, norm.weight.detach(), 1e-5)
    assert torch.equal(residual, summed.to(dtype))
    with torch.inference_mode():
        assert_close(normed, norm(residual))


@pytest.mark.parametrize("rows", [0, 9])
def test_a_part_of_the_vocabulary_has_its_rows_and_zeros_for_other_tokens(rows: int) -> None:
    embedding, tokens = torch.randn(rows, 100, device=DEVICE), torch.tensor([3, 2, 4, 11, 12, 0, 500], device=DEVICE)
    output = torch.full((7, 100), 7.0, device=DEVICE)
    embed_part(embedding, 3, tokens, output)
    expected = torch.zeros_like(output)
    for place, token in enumerate(tokens.tolist()):
        if 3 <= token < 3 + rows:
            expected[place] = embedding[token - 3]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 1536])
def test_gates_equal_those_of_the_modules(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gates = torch.randn(3, 2 * size, device=DEVICE).to(dtype) * 4
    left, right = gates.split(size, dim=1)
    assert_close(silu_gated(gates), torch.nn.functional.silu(left) * right)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    exact = expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5 if exact else 0.01, atol=1e-5 if exact else 1e-3)


def check_batches(
    runner: ModelRunner,
    reference: ModelRunner,
    prompts: list[tuple[tuple[int, ...], tuple[int, ...]]],
    counts: tuple[int, ...],
) -> None:
    """Compare the logits after the last tokens of the first `count` prompts, which come with their block tables."""
    logits(reference, *((tokens[:-1], 0, table) for tokens, table in prompts))
    for count in counts:
        parts = [(tokens, len(tokens) - 1, table) for tokens, table in prompts[:count]]
        torch.testing.assert_close(logits(runner, *parts), logits(reference, *parts), rtol=1e-4, atol=1e-4)


class TestRecorded:
    @pytest.fixture
    def loaded(self, tiny_model: Tiny) -> LoadedModel:
        return load_model(tiny_model("llama"), torch.float32, DEVICE)

    @pytest.fixture
    def backend(self, loaded: LoadedModel) -> AttentionBackend:
        if DEVICE.type == "cuda":
            return make_triton_backend()(loaded.geometry, BLOCK, 40, torch.float32)
        return TorchBackend(loaded.geometry, BLOCK, 40)

    @pytest.fixture
    def recorded(self, loaded: LoadedModel, backend: AttentionBackend) -> RecordedDecoder:
        blocks = blocks_for(loaded.context_tokens, BLOCK)
        return RecordedDecoder(ModulesDecoder(loaded, backend), RECORDER, BLOCK, blocks, batch_sizes(5), DEVICE)

    def test_every_size_gives_the_logits_of_a_step_without_graph(
        self, loaded: LoadedModel, backend: AttentionBackend, recorded: RecordedDecoder
    ) -> None:
        plain = ModelRunner(loaded, backend, BLOCK)
        ours = ModelRunner(loaded, backend, BLOCK, decoder=recorded)
        tokens = [prompt(3 + 9 * seed, seed) for seed in range(7)]
        tables = [tuple(range(1 + 5 * seed, 6 + 5 * seed))[: len(one) // BLOCK + 1] for seed, one in enumerate(tokens)]
        check_batches(ours, plain, list(zip(tokens, tables, strict=True)), (5, 1, 3, 2, 4, 7))

    def test_all_sizes_can_be_captured_in_advance(self, recorded: RecordedDecoder, backend: AttentionBackend) -> None:
        progress: list[tuple[int, int]] = []
        recorded.prepare(lambda done, of: progress.append((done, of)))
        assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
        cache = backend.cache  # type: ignore[attr-defined]
        assert not cache[1:].any(), "only the unused block 0 was written"

    def test_tokens_are_the_same_a_step_ahead(
        self, loaded: LoadedModel, backend: AttentionBackend, recorded: RecordedDecoder
    ) -> None:
        found = []
        for decoder, ahead in ((None, False), (recorded, True)):
            runner = ModelRunner(loaded, backend, BLOCK, decoder=decoder)
            capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, BLOCK, 40)
            engine = EngineInProcess(runner, capacity, ahead=ahead)
            for number in range(6):
                sampling = GREEDY if number % 2 else Sampling(1.2, seed=number)
                engine.take(Request(f"r{number}", prompt(4 + 7 * number, number), sampling, Stopping(6 + number)))
            engine.run()
            found.append(engine.tokens)
        assert found[0] == found[1]

    def test_rows_of_logits_are_those_asked_for(
        self, loaded: LoadedModel, backend: AttentionBackend, recorded: RecordedDecoder
    ) -> None:
        three = [Work(number, (number,), 0, (number,), True, GREEDY) for number in (1, 2, 3)]
        first, second, third = three
        recorded.prepare(lambda done, of: None)
        for work in (
            (first._replace(sample_indices=(0, 1, 2)), second._replace(samples=False), third),
            (first, second._replace(sample_indices=tuple(range(9)))),  # more than the largest size has
            (first._replace(samples=False),),
            (second, first),
        ):
            found, expected = (
                ModelRunner(loaded, backend, BLOCK, decoder=decoder).forward(work) for decoder in (recorded, None)
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("sequences", [256, 512, 1024])
    def test_all_sizes_together_keep_the_memory_that_a_pool_leaves_them(
        self, loaded: LoadedModel, backend: AttentionBackend, sequences: int
    ) -> None:
        recorded = RecordedDecoder(OfOneLayer(loaded), keeps_its_result, BLOCK, 8, batch_sizes(sequences), DEVICE)
        empty = storages(recorded)
        recorded.prepare(lambda done, of: None)
        kept = storages(recorded)
        assert len(kept) == len(empty) + 1, "one output"
        assert sum(kept.values()) == RecordedSizes(sequences, 8, loaded.vocabulary_size, 4).kept

    def test_a_decoder_that_is_not_used_frees_its_memory_at_once(
        self, loaded: LoadedModel, backend: AttentionBackend
    ) -> None:
        recorded = RecordedDecoder(ModulesDecoder(loaded, backend), RECORDER, BLOCK, 8, [1, 2], DEVICE)
        recorded.prepare(lambda done, of: None)
        gone = weakref.ref(recorded)
        gc.disable()
        try:
            del recorded
            assert gone() is None
        finally:
            gc.enable()

    def test_sizes_are_few_and_end_with_the_largest(self) -> None:
        assert batch_sizes(1) == [1]
        assert batch_sizes(6) == [1, 2, 4, 6]
        assert batch_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


@pytest.mark.parametrize("decode", ["few launches", "modules"])
def test_a_whole_step_of_kernels_can_be_captured(checkpoint: Checkpoint, decode: str) -> None:
    loaded = load_model(checkpoint(two_layers("llama")), torch.float32, DEVICE)
    backend = make_triton_backend()(loaded.geometry, BLOCK, 12, torch.float32)
    decoder: Decoder = ModulesDecoder(loaded, backend)
    if decode == "few launches":
        decoder = LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    recorded = RecordedDecoder(decoder, GRAPHS, BLOCK, 8, [1, 3], DEVICE)
    recorded.prepare(lambda done, of: gc.collect())
    make = partial(ModelRunner, loaded, backend, BLOCK)
    prompts = [(prompt(20, 1), (1, 2)), (prompt(5, 2), (3,))]
    check_batches(make(decoder=recorded), make(decoder=decoder), prompts, (1, 2))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tape replaces CUDA graphs on the CPU")
class TestTape:
    """The tests' model of a CUDA graph on the CPU."""

    def test_it_replays_launches_on_the_same_memory(self) -> None:
        numbers, most = torch.arange(4.0), torch.zeros(())

        def run() -> torch.Tensor:
            most.copy_((numbers * 2).max())
            return numbers + most

        with torch.inference_mode():
            play, result = LaunchTape()(run)
            numbers.copy_(torch.tensor([5.0, 1.0, 0.0, 3.0]))
            play()
        assert result.tolist() == [15.0, 11.0, 10.0, 13.0]

    def test_it_fails_if_memory_that_it_did_not_allocate_is_freed(self) -> None:
        def recorded(numbers: torch.Tensor, places: torch.Tensor) -> Callable[[], None]:
            return LaunchTape()(lambda: numbers[places])[0]

        numbers = torch.arange(4.0)
        play = recorded(numbers, torch.tensor([1, 2]))
        with pytest.raises(MemoryFreed, match=r"touches \(2,\) torch.int64"):
            play()

    def test_it_refuses_launches_that_synchronize(self) -> None:
        numbers = torch.arange(4.0)
        for waiting in (lambda: numbers * float(numbers.sum()), lambda: numbers[numbers > 1]):
            with pytest.raises(NotRecordable):
                LaunchTape()(waiting)
