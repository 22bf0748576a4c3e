"""The choice of attention backend and decoder."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import TorchBackend
from engine.gpu.graphs import CudaRecorder, RecordedDecoder, Recorder, Result, Run, batch_sizes
from engine.model.decoder import ModulesDecoder
from engine.model.loaded import LoadedModel, with_kv_dtype
from engine.model.loading import load_model
from engine.schedule.capacity import Capacity
from services.engine.settings import EngineSettings
from services.engine.startup import assembly, backends
from services.engine.startup.backends import (
    BackendChoice,
    BackendOptions,
    NotRecorded,
    choose_backend,
    gpu_decoder,
    record_decoder,
    record_steps,
    recorded_pieces,
)
from services.engine.startup.decoder_check import replays
from services.runtime.settings import InvalidSetting
from tests.engine.launch_tape import LaunchTape
from tests.engine.native_kernels import kernels
from tests.engine.triton_case import DEVICE, make_triton_backend
from tests.services.engine.test_gpu_pool import GIB, FakeGpu

pytest.importorskip("triton")

from engine.gpu.llama import LlamaDecoder
from engine.triton_kernels import prefill

CPU = torch.device("cpu")


@pytest.fixture
def load(tiny_model: Callable[[str], Path]) -> Callable[[str, torch.device], LoadedModel]:
    return lambda family, device: load_model(tiny_model(family), torch.float32, device)


@pytest.fixture
def options(load: Callable[[str, torch.device], LoadedModel]) -> Callable[[str], BackendOptions]:
    def make(attention: str) -> BackendOptions:
        loaded = load("llama", CPU)
        capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 8, 16)
        return BackendOptions(attention, loaded, capacity, None, 4, 16)

    return make


def test_a_cpu_without_kernels_uses_torch_operators(options: Callable[[str], BackendOptions]) -> None:
    choice = choose_backend(options("auto"))
    assert isinstance(choice.backend, TorchBackend)
    assert isinstance(choice.decoder, ModulesDecoder)
    assert not choice.ahead, "on a CPU a step has ended when its launch returns"


def test_both_tiers_of_a_backend_have_the_blocks_that_the_block_manager_counts(
    options: Callable[[str], BackendOptions],
) -> None:
    made = options("torch")
    made = made._replace(capacity=replace(made.capacity, device_blocks=5, host_blocks=3))
    backend: Any = choose_backend(made).backend
    assert (len(backend.cache) - 1, len(backend.host_cache) - 1) == (5, 3)


def with_codes(options: BackendOptions) -> BackendOptions:
    return options._replace(loaded=with_kv_dtype(options.loaded, torch.int8))


def test_a_cache_in_8_bits_has_its_own_fingerprint_and_bytes(options: Callable[[str], BackendOptions]) -> None:
    plain, codes = options("torch"), with_codes(options("auto"))
    assert codes.loaded.fingerprint == f"{plain.loaded.fingerprint}-kv-int8"
    caches = [choose_backend(one).backend.cache for one in (plain, codes)]
    assert caches[1].dtype == torch.int8
    assert caches[1][0].nbytes / caches[0][0].nbytes == (16 + 2) / (16 * 4)  # a head has 16 elements


def test_the_log_says_that_answers_may_depend_on_the_batch_where_no_padding_helps(
    options: Callable[[str], BackendOptions], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "row_unit", lambda model: None)  # this CPU's products have a unit
    coded = with_codes(options("cpu"))._replace(kernels=kernels())
    choose_backend(coded)
    assert "answers may depend on the batch" in caplog.text


@pytest.mark.parametrize("attention", ["flex", "triton"])
def test_backends_that_cannot_have_a_cache_in_8_bits_refuse_it(
    options: Callable[[str], BackendOptions], attention: str
) -> None:
    with pytest.raises(InvalidSetting, match=f"kv_dtype is 'int8', which attention_backend '{attention}' does not"):
        choose_backend(with_codes(options(attention)))


def test_a_cache_in_8_bits_that_no_kernel_of_a_gpu_reads_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "device_of", lambda name: torch.device("cuda"))
    settings = EngineSettings(model=str(tmp_path), device_blocks=9, kv_dtype="int8")
    with pytest.raises(InvalidSetting, match=r"^attention_backend must be torch with kv_dtype int8 and device cuda"):
        assembly.assemble(settings)


def test_kernels_for_gpus_on_a_cpu_are_an_invalid_setting(options: Callable[[str], BackendOptions]) -> None:
    with pytest.raises(InvalidSetting, match="attention_backend is 'triton', but the model runs on cpu"):
        choose_backend(options("triton"))


def test_the_log_has_device_and_size_of_the_pool(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(
        model=str(tiny_model("llama")), device="cpu", dtype="float32", attention_backend="torch", device_blocks=4095
    )
    with caplog.at_level(logging.INFO, "quire.engine"):
        assembly.assemble(settings)
    # 3 layers x K and V x 2 heads x 16 elements x 4 bytes are 768 bytes a token.
    assert "the pool on cpu has 4095 blocks of 16 tokens: with the one for padding 48.0 MiB" in caplog.text


def test_the_log_has_blocks_and_memory_of_each_kind(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(
        model=str(tiny_model("windowed")), device="cpu", dtype="float32", attention_backend="torch", device_blocks=1023
    )
    with caplog.at_level(logging.INFO, "quire.engine"):
        parts = assembly.assemble(settings)
    [window], loaded = parts.scheduler.capacity.windows, parts.loaded
    whole = 1024 * (loaded.geometry.block_bytes(16, torch.float32) - window.block_bytes) / (1 << 20)
    seen = (window.device_blocks + 1) * window.block_bytes / (1 << 20)
    beside = "with the one for padding"
    assert f"the pool on cpu has 1023 blocks of 16 tokens (kind all): {beside} {whole:.1f} MiB" in caplog.text
    blocks = f"{window.device_blocks} blocks of kind window-40 for what {window.layers} layers see"
    assert f"the pool has {blocks}: {beside} {seen:.1f} MiB" in caplog.text


def test_llama_shaped_models_run_on_the_gpus_decoder(load: Callable[[str, torch.device], LoadedModel]) -> None:
    loaded = load("llama", DEVICE)
    backend = make_triton_backend()(loaded.geometry, 16, 8, torch.float32)
    modules = ModulesDecoder(loaded, backend)
    assert type(gpu_decoder(loaded, backend, modules)).__name__ == "LlamaDecoder"


def test_a_model_whose_logits_differ_on_the_gpus_decoder_runs_through_its_modules(
    load: Callable[[str, torch.device], LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load("llama", DEVICE)
    backend = make_triton_backend()(loaded.geometry, 16, 8, torch.float32)
    modules = ModulesDecoder(loaded, backend)
    loaded.model.config.rms_norm_eps = 40.0
    assert gpu_decoder(loaded, backend, modules) is modules
    assert "the GPU's decoder is not used for this model" in caplog.text
    other = load("gpt2", DEVICE)
    backend = make_triton_backend()(other.geometry, 16, 8, torch.float32)
    modules = ModulesDecoder(other, backend)
    assert gpu_decoder(other, backend, modules) is modules


def _runs_again(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    result = run()
    return lambda: result.copy_(run()), result  # type: ignore[return-value]


def _keeps_its_result(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    return lambda: None, run()


def _mixes_rows(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    result = run()
    return lambda: result.copy_(run().roll(1, 0)), result  # type: ignore[return-value]


def _reads_freed_memory(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    result = run()
    return lambda: result.fill_(torch.nan), result  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("record", "same"),
    [(_runs_again, True), (_keeps_its_result, False), (_mixes_rows, False), (_reads_freed_memory, False)],
)
def test_recorded_steps_are_used_only_if_they_give_the_logits_of_launched_ones(
    load: Callable[[str, torch.device], LoadedModel], record: Recorder, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load("llama", CPU)
    backend = TorchBackend(loaded.geometry, 16, 8)
    modules = ModulesDecoder(loaded, backend)
    recorded = RecordedDecoder(modules, record, 16, 8, batch_sizes(5), CPU)
    recorded.prepare(lambda done, of: None)
    assert replays(recorded, modules, loaded, backend, 3) is same
    assert ("recorded steps are not used" in caplog.text) is not same


def test_steps_are_launched_if_there_is_no_memory_to_record_them(
    options: Callable[[str], BackendOptions], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def allocate(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for buffers")

    monkeypatch.setattr("engine.gpu.graphs._Buffers.allocate", allocate)
    given = options("torch")._replace(max_sequences=2**20, memory=FakeGpu(total=80 * GIB, used=79 * GIB))
    launched = choose_backend(given)
    choice = record_steps(given, launched, _runs_again)
    assert choice.decoder is launched.decoder
    needed = 2**20 * (2 * 384 * 4 + 40 + 4 * 256) / GIB
    reason = (
        f"no memory for buffers (inputs and logits of decoding steps need {needed:.2f} GiB beside their launches; "
        "1.00 of 80.00 GiB were free)"
    )
    assert choice.recording_faults == {"decoding": reason}
    (record,) = (one for one in caplog.records if "recorded" in one.message)
    assert record.levelname == "ERROR"
    assert record.message == f"decoding steps cannot be recorded, so each one is launched anew: {reason}"


def test_a_choice_says_which_steps_are_recorded(
    load: Callable[[str, torch.device], LoadedModel], options: Callable[[str], BackendOptions]
) -> None:
    given = options("torch")
    choice = record_steps(given, choose_backend(given), _runs_again)
    assert isinstance(choice.decoder, RecordedDecoder)
    assert choice.recording_faults == {"decoding": ""}


@pytest.mark.parametrize(("refused", "kind"), [(2, "decoding"), (3, "prompts")])
def test_prompts_are_launched_if_only_decoding_steps_can_be_recorded(
    load: Callable[[str, torch.device], LoadedModel], refused: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tape, seen = LaunchTape(), []

    def record(run: Run[Result]) -> tuple[Callable[[], None], Result]:
        seen.append(run)
        if len(seen) == refused:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tape(run)

    loaded = load("llama", CPU)
    backend = make_triton_backend()(loaded.geometry, 4, 1, torch.float32)
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 4, 1)
    decoder = LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    given = BackendOptions("triton", loaded, capacity, None, 2, token_budget=3)
    choice = record_steps(given, BackendChoice(backend, decoder), record)
    size = {"decoding": "the size 1, number 2 of 2", "prompts": "the size 3, number 1 of 1"}[kind]
    assert choice.recording_faults.keys() == {"decoding", kind}
    assert choice.recording_faults[kind].startswith(f"{size}: CUDA out of memory (")
    assert isinstance(choice.decoder, LlamaDecoder if kind == "decoding" else RecordedDecoder)
    assert [one.levelname for one in caplog.records if "cannot be recorded" in one.message] == ["ERROR"]


def test_kernels_for_few_tokens_behind_a_long_prefix_run_at_the_start(
    load: Callable[[str, torch.device], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_count, counts = prefill.split_count, []

    def noted(*given: Any) -> int:
        counts.append(split_count(*given))
        return counts[-1]

    monkeypatch.setattr(prefill, "split_count", noted)
    loaded = replace(load("llama", DEVICE), context_tokens=4096)
    backend = make_triton_backend()(loaded.geometry, 16, 2, torch.float32)
    decoder = LlamaDecoder.of_model(loaded.model, backend, 32)
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 16, 2)
    given = BackendOptions("triton", loaded, capacity, None, 1, 16)
    record = CudaRecorder(DEVICE) if DEVICE.type == "cuda" else _runs_again
    assert record_decoder(decoder, given, backend, record)
    assert max(counts) > 1, "the keys of a tile were split over programs"
    assert min(counts) == 1


def _forgets_launches(run: Run[Result]) -> tuple[Callable[[], None], Result]:
    return lambda: None, run()


def _cannot_record(run: Run[Result]) -> tuple[Callable[[], None], Result]:
    raise RuntimeError("not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (CudaRecorder(DEVICE) if DEVICE.type == "cuda" else LaunchTape(), None),
        (_forgets_launches, "recorded prompts have other logits than launched ones"),
        (_cannot_record, "the size 3, number 1 of 1: not permitted when stream is capturing"),
    ],
)
def test_recorded_pieces_are_used_only_if_they_give_the_logits_of_launched_steps(
    load: Callable[[str, torch.device], LoadedModel],
    record: Recorder,
    fault: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = load("llama", DEVICE)
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, 4, 1)
    backend = make_triton_backend()(loaded.geometry, 4, 1, torch.float32)  # 4 tokens are compared at most
    decoder = LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    options = BackendOptions("triton", loaded, capacity, None, 2, token_budget=3)
    with (
        caplog.at_level(logging.INFO, "quire.engine"),
        pytest.raises(NotRecorded, match=f"^{fault}") if fault else nullcontext(),
    ):
        pieces = recorded_pieces(decoder, decoder, options, backend, record)
        assert pieces.captured == [3]
        assert "recorded pieces of prompts: 1 of 1 sizes" in caplog.text
