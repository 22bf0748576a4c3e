"""Weights reach their device tensor by tensor, with the values that transformers loads, or are refused by name."""

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.attention.interface import ATTENTION_NAME, register
from engine.errors import ModelUnsupported
from engine.model.checkpoint import Checkpoint
from engine.model.loading import load_model
from engine.model.staging import Staging, Wait
from engine.model.weights import WeightReader, gpu_reader, modules_of
from engine.native.formats.safetensors_files import INDEX
from engine.native.formats.stored import files_of
from engine.parallel.loading import ModelFolder
from tests.engine.families import FAMILIES, FURTHER, Family
from tests.engine.families import Checkpoint as Folder
from tests.engine.late_device import PIECE_BYTES, FakeDevice
from tests.engine.model.peak_memory import peak_bytes
from tests.tiny_models import usual_size

CPU = torch.device("cpu")
# Matrices side by side, with biases and with norms; experts that are stacked; a tied head, and transposed matrices; a
# head that is not tied; projections of the embeddings; rotations by length; rotations of two kinds.
KINDS = ("llama", "qwen2", "qwen3", "mixtral", "gpt2", "gemma2", "opt with projections", "phi3 with long rotations")
MORE = ("gemma3_text",)

Tiny = Callable[[str], Path]


class CountedReader(WeightReader):
    """A reader on a fake device that counts the reads of each tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reads: Counter[str] = Counter()

    def read(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        found = super().read(name)
        assert self.staging
        self.staging.finish()  # a stream orders later kernels behind the copies; the fake has no order
        return found


def gpu_like(folder: Path, dtype: torch.dtype, staging: Staging | None = None) -> CountedReader:
    """Return a reader as for a GPU, on a fake device."""
    plain = WeightReader(Checkpoint(folder), dtype, CPU)
    reader = gpu_reader(plain, folder, staging or FakeDevice().staging)
    return CountedReader(reader.checkpoint, dtype, CPU, reader.staging, reader.together)


def by_transformers(folder: Path, dtype: torch.dtype) -> Any:
    register()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)


@pytest.fixture(autouse=True)
def one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine loads onto a GPU. The fake device and the profiler see one thread."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.fixture
def copy(tiny_model: Tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "copy")


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_parameters_buffers_and_ties_are_those_that_transformers_loads(checkpoint: Folder, kind: str) -> None:
    folder = checkpoint(FAMILIES.get(kind) or Family(kind, FURTHER[kind]))
    reader = gpu_like(folder, torch.bfloat16)
    expected, found = by_transformers(folder, torch.bfloat16), modules_of(reader, folder)
    assert set(reader.reads.values()) == {1}, "no tensor is read twice"
    assert len(reader.reads) == len(reader.checkpoint.names), "every tensor is read"
    for theirs, ours in ((expected.state_dict(), found.state_dict()), *[map(buffers, (expected, found))]):
        assert list(theirs) == list(ours)
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(ours[name], tensor), name
    assert tied(found) == tied(expected)
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()


def buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


def tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_gets_the_same_weights_without_staging(tiny_model: Tiny, dtype: torch.dtype) -> None:
    folder = tiny_model("llama")
    expected, found = by_transformers(folder, dtype), load_model(folder, dtype, CPU).model
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), expected.parameters(), strict=True))


@usual_size
def test_loading_takes_the_memory_of_the_weights_and_of_one_tensor_more(tiny_model: Tiny) -> None:
    folder = tiny_model("llama")
    register()
    staging = FakeDevice().staging
    weights = sum(one.nbytes for one in by_transformers(folder, torch.bfloat16).parameters())
    largest = 384 * 96 * 4  # the embeddings, in the file's float32
    mapped = (folder / "model.safetensors").stat().st_size  # the file, which the profiler counts too
    peak = peak_bytes(lambda: modules_of(gpu_like(folder, torch.bfloat16, staging), folder)) - mapped
    assert weights <= peak < weights + largest


class TestStaging:
    @pytest.mark.parametrize("length", [0, 1, 249, 250, 251, 5000])
    def test_a_tensor_of_any_size_crosses_in_two_buffers_that_are_not_written_too_early(self, length: int) -> None:
        device = FakeDevice()
        sources = [torch.randn(length), torch.randn(7, length), torch.randn(())]
        targets = [torch.empty_like(one) for one in sources]
        for source, target in zip(sources, targets, strict=True):
            device.staging.copy(source, target)
        device.staging.finish()
        assert all(map(torch.equal, sources, targets))
        assert [len(one) for one in device.buffers] == [PIECE_BYTES] * 2

    @pytest.mark.parametrize(
        "part", [(slice(3, 40), slice(0, 600)), (slice(1, 3), slice(7, 580)), (slice(5, 5), slice(2, 9))]
    )
    def test_a_slice_crosses_by_rows_or_by_pieces_of_long_rows(self, part: tuple[slice, slice]) -> None:
        device, source = FakeDevice(), torch.randn(50, 600)
        for one in (source[part], source[:, :90][part]):
            device.staging.copy(one, target := torch.empty(one.shape))
            device.staging.finish()
            assert torch.equal(one, target)
        assert [len(one) for one in device.buffers] == [PIECE_BYTES] * 2

    @usual_size
    def test_a_slice_of_columns_takes_no_memory_of_its_own_on_the_host(self) -> None:
        staging = Staging(lambda size: torch.empty(size, dtype=torch.uint8), copy_now, PIECE_BYTES)
        source, target = torch.randn(400, 50)[:, :25], torch.empty(400, 25)
        assert peak_bytes(lambda: staging.copy(source, target)) == 0

    def test_threads_have_buffers_of_their_own(self) -> None:
        staging = Staging(lambda size: torch.empty(size, dtype=torch.uint8), copy_now, PIECE_BYTES)
        sources = [torch.randn(3000) for _ in range(32)]
        targets = [torch.empty_like(one) for one in sources]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(staging.copy, sources, targets))
        assert all(map(torch.equal, sources, targets))

    def test_an_element_larger_than_a_buffers_rest_is_not_divided(self) -> None:
        device = FakeDevice()
        source = torch.arange(400, dtype=torch.int64)
        device.staging.copy(source, target := torch.empty_like(source))
        device.staging.finish()
        assert torch.equal(source, target)


def copy_now(piece: torch.Tensor, target: torch.Tensor) -> Wait:
    target.copy_(piece)
    return lambda: None


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    source = logging.getLogger("transformers.modeling_utils")  # it does not propagate to the root
    source.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, source.name):
        yield caplog
    source.removeHandler(caplog.handler)


class TestFiles:
    def test_files_of_an_index_are_read_like_one(self, copy: Path) -> None:
        whole = load_model(copy, torch.float32, CPU)
        split_files(copy)
        (copy / "consolidated.safetensors").write_bytes(b"another format, which the index does not name")
        parts = load_model(copy, torch.float32, CPU)
        named = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in named)
        assert files_of(copy, torch.float32).keys() == json.loads((copy / INDEX).read_text())["weight_map"].keys()

    def test_an_index_that_does_not_fit_its_files_is_refused_naming_tensor_and_file(self, copy: Path) -> None:
        split_files(copy)
        index = json.loads((copy / INDEX).read_text())
        places = index["weight_map"]
        name = "model.norm.weight"
        faults = {
            f"places tensor {name} in a.safetensors, which lacks it": places | {name: "a.safetensors"},
            f"its folder lacks c.safetensors, where {INDEX} places tensor {name}": places | {name: "c.safetensors"},
            "has no weight_map from tensors to files": {},
        }
        for file in ("", ".", "..", "../b.safetensors", "part/b.safetensors", f"{copy}/b.safetensors", "b\0"):
            fault = f"places tensor {name} in {file!r}, which is no safetensors file of the model's folder"
            faults[re.escape(fault)] = places | {name: file}
        for fault, weight_map in faults.items():
            (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
            with pytest.raises(ModelUnsupported, match=f"^copy: .*{fault}"):
                load_model(copy, torch.float32, CPU)
            with pytest.raises(ModelUnsupported, match=fault):  # as read by ranks and by decoders
                files_of(copy, torch.float32)

    def test_a_damaged_file_is_refused_by_name(self, copy: Path) -> None:
        file = copy / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ModelUnsupported, match=r"^copy: model\.safetensors cannot be read: "):
            load_model(copy, torch.float32, CPU)
        file.rename(copy / "weights.safetensors")
        with pytest.raises(ModelUnsupported, match=r"^weights\.safetensors cannot be read: "):
            files_of(copy, torch.float32)

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            (lambda all_: all_.pop("model.norm.weight"), "its files lack the tensor model.norm.weight"),
            (
                lambda all_: [all_.pop(f"model.layers.0.mlp.{part}_proj.weight") for part in ("up", "gate", "down")],
                "its files lack the tensors model.layers.0.mlp.down_proj.weight, ",
            ),
            (
                lambda all_: all_.update({"model.extra.weight": torch.zeros(1)}),
                "its files have the unknown tensor model.extra.weight",
            ),
            (
                lambda all_: all_.update({"model.norm.weight": torch.zeros(95)}),
                r"its tensor model.norm.weight has shape \(95,\), but its configuration \(96,\)",
            ),
            (
                lambda all_: all_.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 96)}),
                r"its tensor model.layers.0.self_attn.q_proj.weight has shape \(8, 96\), but its configuration ",
            ),
            (
                lambda all_: all_.update({"model.norm.weight": all_["model.norm.weight"].to(torch.int8)}),
                "its tensor model.norm.weight has type I8, but its files do not say how it is quantized",
            ),
            (
                lambda all_: all_.update({"model.norm.weight": all_["model.norm.weight"].to(torch.float8_e4m3fn)}),
                "its tensor model.norm.weight has type F8_E4M3, but its files do not say how it is quantized",
            ),
        ],
    )
    def test_missing_unknown_misshaped_and_coded_tensors_are_refused_by_name_and_in_one_line(
        self,
        copy: Path,
        change: Callable[[dict[str, torch.Tensor]], object],
        fault: str,
        transformers_log: pytest.LogCaptureFixture,
    ) -> None:
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelUnsupported, match=f"^copy: {fault}"):
            load_model(copy, torch.float32, CPU)
        with pytest.raises(ModelUnsupported, match=fault):
            modules_of(gpu_like(copy, torch.float32), copy)
        assert "LOAD REPORT" not in transformers_log.text  # in many lines


def split_files(folder: Path) -> None:
    """Divide the weights between two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    places = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("declared", "method"),
    [
        ({"quantization_config": {"quant_method": "hqq", "nbits": 4}}, "hqq, 4 bits"),
        ({"quantization_config": {"quant_method": "quanto"}}, "quanto"),
        ({"text_config": {"quantization_config": {"quant_method": "torchao"}}}, "torchao"),
        ({"compression_config": {"quant_method": "aqlm"}}, "aqlm"),
    ],
)
def test_quantized_weights_are_refused_by_their_method(copy: Path, declared: dict[str, Any], method: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | declared))
    refused = rf"^copy: its weights are quantized \({method}\), which is not served"
    with pytest.raises(ModelUnsupported, match=refused):
        load_model(copy, torch.float32, CPU)
    with pytest.raises(ModelUnsupported, match=refused):
        ModelFolder(copy, 2)
