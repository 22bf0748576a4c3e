"""Which engines take the memory of an earlier one, and which refuse it by name."""

import os
import shutil
import socket
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from blocks import block_key
from engine.errors import ModelUnsupported
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealChanges, TierChanges
from engine.kept.seals import Sealing
from engine.native.formats.safetensors_files import INDEX
from services.engine.events.origins import Origin, salt_digest
from services.engine.kept.digests import FileDigests, ModelFiles
from services.engine.kept.keeping import Keeping
from services.engine.kept.places import erase_left
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.runtime.settings import InvalidSetting
from tests.services.engine.kept.test_memory_file import folder, path

__all__ = ["folder", "path"]


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny model, whose files may be changed."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def refused(model: Path, path: Path, **settings: Any) -> str:
    """Assemble an engine, end it without erasing, and return why it refused what it found."""
    given: dict[str, Any] = {"device_blocks": 32, "dtype": "float32", "attention_backend": "torch", **settings}
    kept = assemble(EngineSettings(model=str(model), keep_blocks=str(path), **given)).kept
    assert kept is not None
    kept.end(keep=True)
    return kept.refused


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({}, ""),
        ({"device_blocks": 33}, "device_blocks"),
        ({"host_blocks": 4}, "host_blocks"),
        ({"block_size": 8}, "block_size"),
        ({"kv_dtype": "int8"}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"threads": 1}, "backend"),
    ],
)
def test_a_memory_of_another_engine_is_refused_by_name(
    model: Path, path: Path, settings: dict[str, Any], difference: str
) -> None:
    if settings.get("threads"):
        refused(model, path, threads=2)
    else:
        refused(model, path)
    assert refused(model, path, **settings) == difference
    assert refused(model, path, **settings) == ""  # it is used anew


def test_another_split_between_kinds_is_refused_by_the_name_of_the_kind(
    tiny_model: Callable[[str], Path], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("windowed")
    pool: dict[str, Any] = {"host_blocks": 32, "max_sequences": 4, "token_budget": 64}
    assert refused(model, path, **pool, typical_tokens=64) == ""
    assert refused(model, path, **pool, typical_tokens=400) == "host_blocks of window-40"
    assert "the kept blocks differ in host_blocks of window-40: they are erased" in caplog.text
    assert refused(model, path, **pool, kinds="off") == "kinds"
    assert "the kept blocks differ in kinds: they are erased" in caplog.text


def test_a_changed_weight_changes_the_fingerprint(model: Path, path: Path) -> None:
    refused(model, path)
    weights = load_file(model / "model.safetensors")
    middle = next(name for name in sorted(weights) if "layers.1" in name)
    weights[middle].flatten()[7] += 1  # neither end of the file
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert refused(model, path) == "fingerprint"


def test_a_weight_that_changes_without_a_trace_in_its_times_changes_the_fingerprint(model: Path, path: Path) -> None:
    refused(model, path)
    weights = model / "model.safetensors"
    facts = weights.stat()
    with weights.open("r+b") as file:
        file.seek(facts.st_size // 2)  # the model's own fingerprint has both ends
        byte = file.read(1)[0]
        file.seek(facts.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert refused(model, path) == "fingerprint"


def test_an_index_of_the_weights_is_a_part_of_the_fingerprint(model: Path, path: Path) -> None:
    digests = FileDigests(path.parent / "digests")
    (model / INDEX).write_text('{"weight_map": {}}')
    before = ModelFiles(model, digests).digest
    (model / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert ModelFiles(model, digests).digest != before


def test_weights_that_are_replaced_while_they_are_loaded_end_the_start(model: Path, path: Path) -> None:
    digested = ModelFiles(model, FileDigests(path.parent / "digests"))
    digested.check_unchanged()
    (model / "model.safetensors").rename(model / "old")
    shutil.copy(model / "old", model / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="files of the model were changed while it was loaded"):
        digested.check_unchanged()


DAMAGES: dict[str, Callable[[KeptMemory], None]] = {
    "a key of zeros": lambda memory: memory.kinds[0].device.seal(1, Sealing(bytes(32), 0, 0)),
    "a seal of a later reset": lambda memory: memory.kinds[0].device.seal(1, Sealing(b"k" * 32, 0, 5)),
    "a depth beyond all": lambda memory: memory.kinds[0].device.seal(1, Sealing(b"k" * 32, 1 << 31, 0)),
    "all withheld": lambda memory: memory.kinds[0].device.withhold(range(1, 33)),
    "resets beyond all": lambda memory: setattr(memory.counters, "resets", (1 << 64) - 1),
    "a generation beyond all": lambda memory: memory.counters._values["generation"].__setitem__(0, (1 << 32) - 1),
    "a stamp beyond all": lambda memory: memory.counters.tick_past((1 << 64) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_memory_is_erased(model: Path, path: Path, damage: str) -> None:
    settings = EngineSettings(model=str(model), keep_blocks=str(path), device_blocks=32, attention_backend="torch")
    parts = assemble(settings)
    assert parts.kept is not None
    parts.kept.memory.kinds[0].device.seal(1, Sealing(b"k" * 32, 0, 0))
    DAMAGES[damage](parts.kept.memory)
    parts.kept.end(keep=True)
    again = assemble(settings)
    assert again.kept is not None
    assert again.kept.refused == "damage"
    assert again.kept.report.device.keyed == {}
    again.kept.end(keep=False)


EVENTS = {"kv_events_listen": "127.0.0.1:0"}


def kept_with(model: Path, path: Path, **settings: Any) -> Keeping:
    """Assemble an engine, and return its kept memory."""
    given: dict[str, Any] = {"device_blocks": 32, "block_size": 4, "attention_backend": "torch", **settings}
    kept = assemble(EngineSettings(model=str(model), keep_blocks=str(path), **given)).kept
    assert kept is not None
    return kept


def seal_with_row(kept: Keeping, block: int, origin: Origin) -> bytes:
    """Seal a block with its row, as an answer with its key does."""
    key = block_key(origin.hashed, origin.token_ids)
    sealing = Sealing(key, 0, 0)
    kept.memory.kinds[0].device.seal(block, sealing)
    if kept.rows is not None:
        no_copies: list[Any] = [None]
        kept.rows.record(SealChanges(TierChanges(sealed={block: sealing})), no_copies, {key: origin}.get)
    return key


FIRST = Origin(bytes(31) + b"r", True, array("i", [1, 2, 3, 4]).tobytes(), "")
SALTED = Origin(bytes(31) + b"s", True, array("i", [5, 6, 7, 8]).tobytes(), salt_digest(b"salt", b"key"))


def test_the_successor_of_an_engine_with_events_knows_what_the_keys_are_hashes_of(model: Path, path: Path) -> None:
    kept = kept_with(model, path, **EVENTS)
    origins = {seal_with_row(kept, 1, FIRST): FIRST, seal_with_row(kept, 2, SALTED): SALTED}
    kept.end(keep=True)
    again = kept_with(model, path, **EVENTS)
    assert again.rows is not None
    assert (again.refused, again.rows.take_adopted(), again.stats().unknown) == ("", origins, 0)
    again.end(keep=True)
    public = kept_with(model, path, **EVENTS, kv_events_salts="omitted")
    assert public.rows is not None
    assert (list(public.rows.take_adopted().values()), public.stats().unknown) == ([FIRST], 1)
    public.end(keep=False)
    assert path.stat().st_blocks == 0


def test_turning_events_on_and_off_keeps_the_blocks_and_no_tokens(
    model: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire.engine")
    kept = kept_with(model, path)
    key = seal_with_row(kept, 1, FIRST)
    kept.end(keep=True)
    of_an_earlier_version = path.stat().st_size
    on = kept_with(model, path, **EVENTS)
    assert on.rows is not None
    assert (on.refused, on.report.device.keyed, on.rows.take_adopted(), on.stats().unknown) == ("", {1: key}, {}, 1)
    assert "1 kept blocks are not announced in KV events, because their tokens are unknown" in caplog.text
    seal_with_row(on, 1, FIRST)
    on.end(keep=True)
    assert path.stat().st_size > of_an_earlier_version
    off = kept_with(model, path)
    assert (off.refused, off.report.device.keyed, off.rows, off.stats().unknown) == ("", {1: key}, None, None)
    assert path.stat().st_blocks * 512 <= of_an_earlier_version
    off.end(keep=True)
    on = kept_with(model, path, **EVENTS)
    assert on.rows is not None
    assert (on.refused, on.rows.take_adopted()) == ("", {})
    on.end(keep=False)


def test_nothing_is_written_behind_a_memory_that_was_erased(model: Path, path: Path) -> None:
    kept = kept_with(model, path, **EVENTS)
    kept.end(keep=False)
    rows = kept.rows
    assert rows is not None
    key = block_key(FIRST.hashed, FIRST.token_ids)
    no_copies: list[Any] = [None]
    rows.record(SealChanges(TierChanges(sealed={1: Sealing(key, 0, 0)})), no_copies, {key: FIRST}.get)
    assert path.stat().st_blocks == 0


def test_rows_of_another_pool_are_erased_with_its_blocks(model: Path, path: Path) -> None:
    kept = kept_with(model, path, **EVENTS)
    seal_with_row(kept, 1, FIRST)
    kept.end(keep=True)
    other = kept_with(model, path, **EVENTS, device_blocks=8)
    assert other.rows is not None
    assert (other.refused, other.rows.take_adopted(), other.stats().unknown) == ("device_blocks", {}, 0)
    other.end(keep=False)


def test_a_stop_while_the_model_is_loaded_erases_what_was_left(model: Path, path: Path) -> None:
    refused(model, path)
    assert path.stat().st_blocks
    erase_left(EngineSettings(model=str(model), keep_blocks=str(path), keep_at_stop=True))
    assert path.stat().st_blocks
    erase_left(EngineSettings(model=str(model), keep_blocks=str(path)))
    assert path.stat().st_blocks == 0


def test_a_folder_has_a_file_for_each_engine(model: Path, folder: Path) -> None:
    for name in ("a/0", "b"):
        refused(model, folder, engine_id=name)
    refused(model, folder, listen="127.0.0.1:7")  # its id is of host and address
    own = f"{socket.gethostname()}%3A127.0.0.1%3A7.blocks"
    assert sorted(one.name for one in folder.iterdir()) == sorted(["a%2F0.blocks", "b.blocks", own])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"keep_blocks": "memory"}, "keep_blocks is 'memory', which only quire serve has"),
        ({"keep_blocks": "/nowhere/kept"}, "keep_blocks is '/nowhere/kept', which cannot be opened: No such file"),
        ({"keep_blocks": "x", "tensor_parallel": 2}, "ranks keep no blocks"),
        ({"keep_blocks": "x", "device": "cuda"}, "the memory of a GPU ends with its process"),
        ({"keep_blocks": "off", "keep_at_stop": True}, "nothing is kept"),
    ],
)
def test_what_cannot_keep_blocks_is_refused(model: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises((InvalidSetting, ModelUnsupported), match=reason):
        assemble(EngineSettings(model=str(model), device_blocks=32, attention_backend="torch", **settings))
