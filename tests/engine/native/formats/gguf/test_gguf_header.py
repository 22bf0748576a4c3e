"""Headers of GGUF files: what is refused, and that nothing large is allocated before."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.file import GgufFile
from engine.native.formats.gguf.header import read_header
from tests.gguf_models import HIDDEN, MIXED, Type, write_llama

BEGIN = b"GGUF" + struct.pack("<I", 3)


def header(tensors: int, keys: int, *parts: bytes) -> bytes:
    return BEGIN + struct.pack("<QQ", tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, name: str = "some_weight") -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def array(kind: int, count: int) -> bytes:
    return text("some.array") + struct.pack("<IIQ", 9, kind, count)


REFUSED = {
    "it is no GGUF file": b"PK" + bytes(100),
    "it has version 1 of GGUF": b"GGUF" + struct.pack("<I", 1) + bytes(100),
    "it has version 50331648 of GGUF": b"GGUF" + struct.pack(">I", 3) + bytes(100),
    "its header ends behind the file's end": header(1, 0, text("a name")),
    "it has 18446744073709551615 tensors": header(2**64 - 1, 0),
    "it has 1099511627776 metadata keys": header(0, 2**40),
    "it has 1152921504606846976 elements in arrays of its metadata": header(0, 1, array(0, 2**60)),
    "it has 4194305 elements in arrays": header(0, 1, array(8, (1 << 22) + 1)),
    "array of the type 9": header(0, 1, array(9, 4), bytes(64)),
    "a value of the unknown type 77": header(0, 1, text("key"), struct.pack("<I", 77)),
    "general.alignment is 3,": header(0, 1, text("general.alignment"), struct.pack("<II", 4, 3)),
    "it is one of 7 parts, but is not named NAME-00001-of-00007.gguf": header(
        0, 1, text("split.count"), struct.pack("<IH", 2, 7)
    ),
    "tensor some_weight has 9 dimensions": header(1, 0, tensor((1,) * 9)),
    "tensor some_weight has shape (4294967296, 4294967296), which is empty or does": header(1, 0, tensor((2**32,) * 2)),
    "tensor some_weight has shape (0, 32), which is empty or does": header(1, 0, tensor((0, 32))),
    "tensor some_weight is of type IQ2_XS, which is not served: use a file with another quantization, such as Q4_K_M": (
        header(1, 0, tensor((2, 256), 17))
    ),
    **{
        f"tensor some_weight is of type {name}, which is not served": header(1, 0, tensor((2, 256), number))
        for number, name in {9: "Q8_1", 15: "Q8_K", 19: "IQ1_S", 18: "IQ3_XXS", 34: "TQ1_0", 40: "NVFP4"}.items()
    },
    "tensor some_weight is of type 999, which is not served": header(1, 0, tensor((2, 256), 999)),
    "tensor some_weight has rows of 48 values, but Q4_0 has blocks of 32": header(1, 0, tensor((2, 48), 2)),
    "it is truncated: tensor some_weight ends behind the file's end": header(1, 0, tensor((4, 32)), bytes(256)),
    "it has two tensors some_weight": header(2, 0, tensor((8,)), tensor((8,), offset=32), bytes(256)),
    # As Q4_0 the first takes 18 bytes of the 32 that its label leaves it; as F16 it would take 64.
    "tensor second begins at byte 32 of the data instead of 64": header(
        2, 0, tensor((1, 32), 1), tensor((8,), offset=32, name="second"), bytes(256)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_damaged_or_hostile_header_is_refused_without_large_allocations(tmp_path: Path, message: str) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(REFUSED[message])
    read_header.__doc__  # noqa: B018 - imports are no part of the measurement
    tracemalloc.start()
    try:
        with pytest.raises(ModelUnsupported) as refused:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(refused.value).startswith("some.gguf cannot be read: ")
    assert message in str(refused.value)
    assert peak < 2 << 20


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"^none\.gguf cannot be read: it is missing$"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelUnsupported, match=r"^empty\.gguf cannot be read: "):
        read_header(tmp_path / "empty.gguf")


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelUnsupported, match=r"^pipe\.gguf cannot be read: it is no regular file$"):
        read_header(tmp_path / "pipe.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "whole.gguf", MIXED).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (*range(1, 200, 7), *np.linspace(200, len(whole) - 33, 60, dtype=int).tolist()):
        cut.write_bytes(whole[:length])
        with pytest.raises(
            ModelUnsupported,
            match=r"it is truncated|it is no GGUF|fit into",
        ):
            read_header(cut)


def test_places_are_those_that_gguf_reads(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    places, read = read_header(path).tensors, gguf.GGUFReader(path)
    assert list(places) == [one.name for one in read.tensors]
    for one in read.tensors:
        place = places[one.name]
        assert (place.offset, place.size) == (one.data_offset, one.n_bytes)
        assert (list(place.shape), place.format.name) == (one.shape.tolist()[::-1], one.tensor_type.name)


CONTRADICTIONS: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None]]] = {
    "tensor blk.0.attn_q.weight has shape (128, 256), but its metadata gives (256, 256)": (
        "blk.0.attn_q",
        lambda writer: writer.add_tensor("blk.0.attn_q.weight", np.zeros((HIDDEN // 2, HIDDEN), np.float32)),
    ),
    "tensor token_embd.weight has shape (384, 128), but its metadata gives (384, 256)": (
        "token_embd",
        lambda writer: writer.add_tensor("token_embd.weight", np.zeros((384, HIDDEN // 2), np.float32)),
    ),
    "it has tensor blk.7.attn_norm.weight, but its block_count is 2": (
        "-",
        lambda writer: writer.add_tensor("blk.7.attn_norm.weight", np.zeros(HIDDEN, np.float32)),
    ),
    "its context_length is 4294967295, more than 16777216": ("-", lambda writer: writer.add_context_length(2**32 - 1)),
    "it lacks tensor blk.1.ffn_down.weight": ("blk.1.ffn_down", lambda _writer: None),
    "tensor rope_freqs.weight is F16 (32,), not F32 for half a head": (
        "-",
        lambda writer: writer.add_tensor("rope_freqs.weight", np.full(32, 4, np.float16)),
    ),
    "its llama.rope.dimension_count is 32, but only 64 is served": (
        "-",
        lambda writer: writer.add_rope_dimension_count(32),
    ),
    "its llama.attention.value_length is 32, but only 64 is served": ("-", lambda writer: writer.add_value_length(32)),
    "its llama.attention.causal is False, but only True is served": (
        "-",
        lambda writer: writer.add_causal_attention(False),
    ),
    "its llama.logit_scale is 0.5, but only 1 is served": ("-", lambda writer: writer.add_logit_scale(0.5)),
    "its llama.rope.scaling.factor is 4.0, but only 1 is served": (
        "-",
        lambda writer: writer.add_rope_scaling_factor(4.0),
    ),
    "its llama.rope.scaling.type is 'yarn', and such rotations are not read from GGUF files": (
        "-",
        lambda writer: (
            writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32)),
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        )[0],
    ),
    "its llama.rope.scaling.factor is 4.0, but only 1 is served with rope_freqs.weight": (
        "-",
        lambda writer: (
            writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32)),
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            writer.add_rope_scaling_factor(4.0),
        )[0],
    ),
    "its llama.attention.sliding_window is 8, and windows are not read from GGUF files": (
        "-",
        lambda writer: writer.add_sliding_window(8),
    ),
    "its llama.attention.layer_norm_rms_epsilon is nan, not a number above 0": (
        "-",
        lambda writer: writer.add_layer_norm_rms_eps(float("nan")),
    ),
    "its llama.rope.freq_base is -5.0, not a number above 0": ("-", lambda writer: writer.add_rope_freq_base(-5.0)),
    "its tokenizer.ggml.eos_token_id is 384, but it has 384 tokens": ("-", lambda writer: writer.add_eos_token_id(384)),
    "its llama.rope.scaling.factor is an array, not a number above 0": (
        "-",
        lambda writer: (
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            writer.add_array("llama.rope.scaling.factor", [1.0, 2.0]),
        )[0],
    ),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_tensors_that_contradict_the_metadata_are_refused(tmp_path: Path, message: str) -> None:
    without, change = CONTRADICTIONS[message]
    path = write_llama(tmp_path / "other.gguf", {"attn_k": Type.Q8_0}, change=change, without=(without,))
    with pytest.raises(ModelUnsupported) as refused:
        GgufFile(path, torch.float32)
    assert str(refused.value) == f"other.gguf cannot be read: {message}"


def test_a_layer_with_another_spelling_of_its_number_does_not_replace_its_tensor(tmp_path: Path) -> None:
    other = np.zeros((HIDDEN, HIDDEN), np.float32)
    path = write_llama(
        tmp_path / "twice.gguf", {}, change=lambda writer: writer.add_tensor("blk.00.attn_q.weight", other)
    )
    file = GgufFile(path, torch.float32)
    assert file.get_tensor("model.layers.0.self_attn.q_proj.weight").count_nonzero() > 0
    assert "blk.00.attn_q.weight" in file.keys()  # noqa: SIM118 - it is no dictionary
