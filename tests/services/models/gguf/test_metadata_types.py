"""Each key that is read of a GGUF file, with each type of value in its place, and missing.

A file is read as with the usual type, or refused with its name and the key, never with an error of a library.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.errors import ModelUnsupported
from services.models.files.bounded_json import InvalidModelFile
from services.models.gguf.file_check import check_gguf, keys
from services.models.gguf.metadata import CHARSMAP, MERGES, SCORES, TOKENS, TYPES
from services.models.gguf_conversion import convert
from tests.gguf_models import write_gpt2

Kind = gguf.GGUFValueType
WHOLE = (Kind.UINT8, Kind.INT8, Kind.UINT16, Kind.INT16, Kind.UINT32, Kind.INT32, Kind.UINT64, Kind.INT64)
NUMBERS = (*WHOLE, Kind.FLOAT32, Kind.FLOAT64)
SCALARS = (*NUMBERS, Kind.BOOL, Kind.STRING)
Value = tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]

# All numbers are whole and fit into a byte, so that each type can have them.
HIDDEN, HEADS, KV_HEADS, LAYERS, CONTEXT = 32, 4, 2, 2, 100
LETTERS = [*"abcdefgh", "ab"]
SIZES = {
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "block_count": LAYERS,
    "feed_forward_length": HIDDEN,
    "vocab_size": len(LETTERS),
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HIDDEN // HEADS,
    "attention.value_length": HIDDEN // HEADS,
    "rope.dimension_count": HIDDEN // HEADS,
    "rope.scaling.original_context_length": CONTEXT,
}
OF_LAYERS = {f"llama.{name}" for name in ("feed_forward_length", "attention.head_count", "attention.head_count_kv")}
# Values with which nothing changes.
FACTORS = {
    "attention.layer_norm_rms_epsilon": 1,
    "attention.layer_norm_epsilon": 1,
    "rope.freq_base": 100,
    "rope.scaling.factor": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scale_linear": 1,
    "logit_scale": 1,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
}
TEXTS = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.chat_template": "{{ messages }}",
    "llama.rope.scaling.type": "none",
}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
_NORMALIZERS = ("normalizer.lowercase", "normalizer.strip_accents")
FLAGS = {"llama.attention.causal": True} | {f"tokenizer.ggml.{name}": False for name in (*_FLAGS, *_NORMALIZERS)}
ARRAYS: dict[str, list[Any]] = {
    TOKENS: LETTERS,
    MERGES: ["a b"],
    TYPES: [1] * len(LETTERS),
    SCORES: [0] * len(LETTERS),
    CHARSMAP: [0],
}
COMMON = {"split.count": 1, "general.alignment": 32}
NEEDED = {
    "general.architecture",
    "tokenizer.ggml.model",
    TOKENS,
    MERGES,
    *(f"llama.{name}" for name in ("context_length", "embedding_length", "block_count", "feed_forward_length")),
    *(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "layer_norm_rms_epsilon")),
}
# The number of heads is assumed without it, and contradicts this tensor.
NAMED_OTHERWISE = {"llama.attention.head_count_kv": "attn_k.weight"}
READ = sorted({*keys("llama"), *TEXTS, *FLAGS, *ARRAYS, *COMMON})
FOREIGN = re.compile(r"Error|None|<class|expected (int|str|float)|object is|argument|Traceback")


def usual(key: str) -> Any:
    """Return a value of a key with which a file is served."""
    name = key.removeprefix("llama.")
    for known in (TEXTS, FLAGS, ARRAYS, COMMON):
        if key in known:
            return known[key]
    if name in FACTORS:
        return FACTORS[name]
    return SIZES.get(name, 1 if key.endswith("_token_id") else 0)


def allowed(key: str) -> tuple[gguf.GGUFValueType, ...]:
    """Return the types with which a key is read, those of elements for arrays."""
    if key in TEXTS or key in (TOKENS, MERGES):
        return (Kind.STRING,)
    if key in FLAGS:
        return (Kind.BOOL,)
    if key == CHARSMAP:
        return (Kind.UINT8, Kind.INT8)
    return NUMBERS if key == SCORES or key.removeprefix("llama.") in FACTORS else WHOLE


def typed(value: Any, kind: gguf.GGUFValueType) -> Any:
    """Return a value in a type, something else where it has none."""
    if kind == Kind.STRING:
        return value if isinstance(value, str) else "text"
    number = 1 if isinstance(value, str) else value
    return bool(number) if kind == Kind.BOOL else float(number) if kind in (Kind.FLOAT32, Kind.FLOAT64) else int(number)


def variants(key: str) -> Iterator[tuple[Value | None, bool]]:
    """Give values of each type, None for a missing one, and whether they are served."""
    given, kinds, is_array = usual(key), allowed(key), key in ARRAYS
    for kind in SCALARS:
        one = given[0] if is_array else given
        yield (typed(one, kind), kind, None), kind in kinds and not is_array
        elements = given if is_array else [given] * LAYERS
        served = kind in kinds if is_array else key in OF_LAYERS and kind in WHOLE
        yield ([typed(element, kind) for element in elements], Kind.ARRAY, kind), served
    yield None, key not in NEEDED


def plain() -> dict[str, Value]:
    """Return the metadata of a file that has all that it needs, in the usual types."""
    needed = sorted(NEEDED - ARRAYS.keys() - TEXTS.keys())
    metadata: dict[str, Value] = {key: (TEXTS[key], Kind.STRING, None) for key in TEXTS if key in NEEDED}
    for key in needed:
        epsilon = key.endswith("epsilon")
        metadata[key] = (usual(key), Kind.FLOAT32 if epsilon else Kind.UINT32, None)
    return metadata | {key: (ARRAYS[key], Kind.ARRAY, Kind.STRING) for key in (TOKENS, MERGES)}


def write(path: Path, metadata: dict[str, Value]) -> Path:
    """Write a Llama of two layers of 32 elements, whose tensors are zero."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, (value, kind, element) in metadata.items():
        writer.add_key_value(key, value, kind, element)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(LETTERS), HIDDEN), "output_norm": (HIDDEN,)}
    matrices = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{part}": (HIDDEN, HIDDEN) for part in matrices}
        shapes |= {f"blk.{layer}.{part}": (HIDDEN // 2, HIDDEN) for part in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{part}": (HIDDEN,) for part in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def outcome(path: Path) -> tuple[str, dict[str, str]]:
    """Return the sentence that refuses a file, and else what is written for it."""
    folder = path.with_suffix("")
    try:
        check_gguf(path)
        convert(path, folder)
    except InvalidModelFile as error:  # which has the file's name
        return str(error).removeprefix(f"{path.name}: "), {}
    except ModelUnsupported as error:
        return str(error), {}
    return "", {one.name: one.read_text() for one in folder.iterdir()}


@pytest.mark.parametrize("key", READ)
def test_a_key_is_read_in_its_types_and_refused_by_name_in_others(key: str, tmp_path: Path) -> None:
    expected: dict[str, str] | None = None
    for number, (value, served) in enumerate(variants(key)):
        metadata = {one: given for one, given in plain().items() if one != key}
        fault, written = outcome(
            write(tmp_path / f"{number}.gguf", metadata | ({key: value} if value is not None else {}))
        )
        assert served == (not fault), f"{key} as {value}: {fault or 'served'}"
        assert not FOREIGN.search(fault)
        if fault:
            assert key.removeprefix("llama.") in fault or NAMED_OTHERWISE.get(key, "-") in fault
        elif value is not None and key != CHARSMAP:
            expected = expected or written
            assert written == expected, f"{key} as {value}"


def change(key: str, value: Value | None) -> Callable[[gguf.GGUFWriter], None]:
    """Return what replaces a key."""

    def replace(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, *value)

    return replace


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        *(f"gpt2.{name}" for name in ("block_count", "context_length", "embedding_length", "attention.head_count")),
        *(f"tokenizer.ggml.{role}_token_id" for role in ("bos", "padding")),
    ],
)
@pytest.mark.parametrize(
    "value", [("x", Kind.STRING, None), ([2, 2], Kind.ARRAY, Kind.UINT32), (2.5, Kind.FLOAT32, None), None], ids=str
)
def test_a_key_of_another_family_is_refused_by_name_too(key: str, value: Value | None, tmp_path: Path) -> None:
    fault, _ = outcome(write_gpt2(tmp_path / "tiny.gguf", change(key, value)))
    assert bool(fault) != (value is None and key.endswith("token_id"))
    assert not FOREIGN.search(fault)
    assert not fault or key.removeprefix("gpt2.") in fault
