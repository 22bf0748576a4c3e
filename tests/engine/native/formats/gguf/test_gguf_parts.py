"""GGUF files of several parts, read as one, and parts that do not belong together."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelUnsupported
from engine.model.loaded import fingerprint
from engine.native.formats.gguf.file import GgufFile, gguf_of, quantized_format, rotation_factors
from engine.native.formats.gguf.header import read_header
from engine.native.formats.stored import files_of
from services.models.files.bounded_json import InvalidModelFile
from services.models.gguf.file_check import check_gguf
from tests.gguf_models import HIDDEN, MIXED, write_llama

FIRST, SECOND, THIRD = (f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3))


def with_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, HIDDEN // 8, dtype=np.float32))


def written(folder: Path, **given: object) -> Path:
    """Write a model in three parts; the last has the tensors of the second layer's end."""
    folder.mkdir(exist_ok=True)
    first = write_llama(folder / "tiny.gguf", MIXED, part_tensors=8, **given)  # type: ignore[arg-type]
    assert sorted(path.name for path in folder.iterdir()) == [FIRST, SECOND, THIRD]
    return first


def edited(path: Path, key: str, kind: gguf.GGUFValueType, value: int) -> None:
    """Replace a number of the metadata, whose key is there once."""
    content = path.read_bytes()
    place = content.index(key.encode()) + len(key) + 4
    size = {gguf.GGUFValueType.UINT16: 2, gguf.GGUFValueType.INT32: 4}[kind]
    path.write_bytes(content[:place] + value.to_bytes(size, "little") + content[place + size :])


@pytest.mark.parametrize("given", ["folder", "path of the first part"])
def test_all_parts_are_read_as_one_file(tmp_path: Path, given: str) -> None:
    first = written(tmp_path / "parts")
    whole = GgufFile(write_llama(tmp_path / "tiny.gguf", MIXED), torch.float32)
    path = gguf_of(tmp_path / "parts") if given == "folder" else first
    assert path == first
    found = GgufFile(path, torch.float32)
    assert found.keys() == whole.keys()
    for name in whole.keys():  # noqa: SIM118 - it is no dictionary
        assert torch.equal(found.get_tensor(name), whole.get_tensor(name))
    assert [read_header(path).files[one.part].name for one in read_header(path).tensors.values()].count(THIRD) == 4
    assert list(files_of(tmp_path / "parts", torch.float32)) == whole.keys()
    assert quantized_format(path) == "Q6_K"
    check_gguf(path)


def test_factors_of_rotations_are_read_from_the_part_that_has_them(tmp_path: Path) -> None:
    first = write_llama(tmp_path / "tiny.gguf", MIXED, change=with_factors, part_tensors=1)
    factors = rotation_factors(read_header(first))
    assert factors is not None
    np.testing.assert_array_equal(factors, np.linspace(1, 8, HIDDEN // 8, dtype=np.float32))
    last = write_llama(tmp_path / "other.gguf", MIXED | {"attn_q": gguf.GGMLQuantizationType.F32}, part_tensors=1)
    assert rotation_factors(read_header(last)) is None


def test_a_split_model_of_one_part_is_a_file_like_others(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED).rename(tmp_path / "tiny-00001-of-00001.gguf")
    assert gguf_of(tmp_path) == path
    assert read_header(path).files == (path,)


def test_every_part_is_in_the_fingerprint(tmp_path: Path) -> None:
    first = written(tmp_path / "parts")
    (first.parent / "config.json").write_text("{}")
    known = {fingerprint(first.parent)}
    for name in (FIRST, SECOND, THIRD):
        content = bytearray((first.parent / name).read_bytes())
        content[-1] ^= 1
        (first.parent / name).write_bytes(content)
        known.add(fingerprint(first.parent))
    assert len(known) == 4


def swap(folder: Path) -> None:
    (folder / SECOND).rename(folder / "kept")
    (folder / THIRD).rename(folder / SECOND)
    (folder / "kept").rename(folder / THIRD)


def of_another_model(folder: Path, **given: object) -> None:
    other = folder.parent / "other"
    written(other, **given)
    shutil.copy(other / SECOND, folder / SECOND)


def cut(folder: Path) -> None:
    (folder / THIRD).write_bytes((folder / THIRD).read_bytes()[:-100])


def twice(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content.replace(b"blk.1.attn_v.weight", b"blk.0.attn_v.weight"))


def fewer(folder: Path) -> None:
    for name in (FIRST, SECOND, THIRD):
        edited(folder / name, "split.tensors.count", INT32, 19)


def named_differently(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.extra", np.zeros(HIDDEN, np.float32))


def link_to_nothing(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / "gone.gguf")


UINT16, INT32 = gguf.GGUFValueType.UINT16, gguf.GGUFValueType.INT32
REFUSED: dict[str, Callable[[Path], object]] = {
    f"{SECOND} cannot be read: it is missing": lambda folder: (folder / SECOND).unlink(),
    f"{FIRST} cannot be read: it is missing": lambda folder: (folder / FIRST).unlink(),
    f"{SECOND} cannot be read: {SECOND} is a link to {{folder}}/gone.gguf, which is gone": link_to_nothing,
    f"{SECOND} cannot be read: its split.no is 2, but part 2 of 3 has 1": swap,
    f"{THIRD} cannot be read: its name says that there are 3 parts, but its split.count is 4": (
        lambda folder: edited(folder / THIRD, "split.count", UINT16, 4)
    ),
    f"{FIRST} cannot be read: its name says that there are 3 parts, but its split.count is 0": (
        lambda folder: shutil.copy(write_llama(folder.parent / "whole.gguf", MIXED), folder / FIRST)
    ),
    f"{FIRST} cannot be read: its split.tensors.count is 19, but its parts have 20 tensors": fewer,
    f"{SECOND} cannot be read: it has tensor blk.0.attn_v.weight, which an earlier part has too": twice,
    f"{SECOND} cannot be read: its split.tensors.count is '21', but that of {FIRST} is '20'": (
        lambda folder: of_another_model(folder, change=named_differently)
    ),
    f"{THIRD} cannot be read: it is truncated: tensor blk.1.ffn_down.weight ends behind the file's end": cut,
    f"{THIRD} cannot be read: it is no GGUF file": lambda folder: (folder / THIRD).write_bytes(b"PK" + bytes(99)),
    f"{THIRD} cannot be read: cannot mmap an empty file": lambda folder: (folder / THIRD).write_bytes(b""),
}


@pytest.mark.parametrize("message", REFUSED)
def test_parts_that_are_not_of_one_model_are_refused_by_the_name_of_the_file(tmp_path: Path, message: str) -> None:
    folder = tmp_path / "parts"
    first = written(folder)
    REFUSED[message](folder)
    for read in (read_header, lambda path: GgufFile(path, torch.float32)):
        with pytest.raises(ModelUnsupported) as refused:
            read(first)
        assert str(refused.value) == message.format(folder=folder)
    with pytest.raises(InvalidModelFile) as invalid:
        check_gguf(first)
    assert str(invalid.value) == message.format(folder=folder)


def test_a_part_of_a_model_of_other_sizes_is_refused_by_its_name(tmp_path: Path) -> None:
    first = written(tmp_path)
    content = (tmp_path / SECOND).read_bytes()
    name = b"blk.1.attn_k.weight"
    dimensions = content.index(name) + len(name) + 4
    (tmp_path / SECOND).write_bytes(content[:dimensions] + struct.pack("<2Q", 512, 64) + content[dimensions + 16 :])
    sentence = f"tensor blk.1.attn_k.weight in {SECOND} has shape (64, 512), but its metadata gives (128, 256)"
    with pytest.raises(ModelUnsupported) as refused:
        GgufFile(first, torch.float32)
    assert str(refused.value) == f"{FIRST} cannot be read: {sentence}"


def test_a_later_part_and_a_part_without_its_name_are_refused(tmp_path: Path) -> None:
    first = written(tmp_path)
    with pytest.raises(ModelUnsupported, match=rf"^{SECOND} is part 2 of 3: give the first, {FIRST}$"):
        read_header(tmp_path / SECOND)
    renamed = first.rename(tmp_path / "renamed.gguf")
    sentence = r"^renamed\.gguf cannot be read: it is one of 3 parts, but is not named NAME-00001-of-00003\.gguf$"
    with pytest.raises(ModelUnsupported, match=sentence):
        read_header(renamed)


def test_parts_of_several_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    shutil.copy(tmp_path / SECOND, tmp_path / "tiny-00002-of-00004.gguf")
    with pytest.raises(ModelUnsupported, match=rf"has several \.gguf files: {FIRST}, tiny-00001-of-00004\.gguf$"):
        gguf_of(tmp_path)


def test_a_name_that_promises_many_parts_costs_nothing(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", {}).rename(tmp_path / "tiny-00001-of-99999.gguf")
    with pytest.raises(ModelUnsupported, match=r"^tiny-00002-of-99999\.gguf cannot be read: it is missing$"):
        read_header(path)
