"""Payloads of KV events, compared with bytes that vLLM's own structs have written."""

import os
import subprocess
from array import array

import msgspec
import pytest

from services.engine.events.changes import Cleared, KeyChange, KeyPlace, Medium, Removed, Stored
from services.engine.events.event_stream import EventBatch
from services.engine.events.zeromq.vllm_format import (
    FULL_ATTENTION,
    SLIDING_WINDOW,
    AttentionKind,
    BlockStored,
    Encoder,
    InvalidBatch,
    decode,
    hashes,
    place_of,
)

KINDS = [AttentionKind(FULL_ATTENTION), AttentionKind(SLIDING_WINDOW, 1024), AttentionKind("chunked_local_attention")]


def key(number: int) -> bytes:
    return b"\x05" * 24 + number.to_bytes(8, "big")


def chain(place: KeyPlace, parent: bytes | None, numbers: list[int], tokens: list[list[int]], salt: str = "") -> Stored:
    return Stored(place, parent, [*map(key, numbers)], [array("i", one).tobytes() for one in tokens], salt)


GPU, CPU = Medium.GPU, Medium.CPU
SALTED: list[KeyChange] = [chain(KeyPlace(0, GPU), None, [2**64 - 1, 7], [[0, 127], [128, 70_000]], "5a17")]
WINDOW: list[KeyChange] = [chain(KeyPlace(1, CPU), key(7), [9], [[1, 2]], "5a17")]
GONE: list[KeyChange] = [Removed(KeyPlace(2, GPU), [key(2**64 - 1), key(9)]), Cleared()]

# Written by EventBatch, BlockStored, BlockRemoved and AllBlocksCleared of vLLM 0.32.0.
MAPS: list[tuple[EventBatch, str]] = [
    (
        EventBatch(0, 1764460800.25, SALTED),
        "93cb41da4ae240100000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffffffffffffffff07b170"
        "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394007fcc80ce00011170aa626c6f636b5f73697a6502a76c6f72615f"
        "6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a435613137c0a967726f75705f69647800"
        "b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00",
    ),
    (
        EventBatch(1, 2.0, WINDOW),
        "93cb4000000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e745f626c6f"
        "636b5f6861736807a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c"
        "6f72615f6e616d65c0a967726f75705f69647801b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc"
        "6b765f63616368655f737065635f736c6964696e675f77696e646f77cd040000",
    ),
    (
        EventBatch(2, 3.0, GONE),
        "93cb40080000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392cfffffffffffffffff09a6"
        "6d656469756da3475055a967726f75705f6964780281a474797065b0416c6c426c6f636b73436c656172656400",
    ),
    (EventBatch(3, 4.5, []), "93cb40120000000000009000"),
]
# As vLLM wrote events before 0.24, with the fields that it had then.
ARRAYS: list[tuple[EventBatch, str]] = [
    (
        EventBatch(0, 1764460800.25, SALTED),
        "93cb41da4ae240100000919cab426c6f636b53746f72656492cfffffffffffffffff07c094007fcc80ce0001117002c0a3475055c09291"
        "a435613137c000ae66756c6c5f617474656e74696f6ec000",
    ),
    (
        EventBatch(1, 2.0, WINDOW),
        "93cb4000000000000000919cab426c6f636b53746f72656491090792010202c0a3435055c0c001ae736c6964696e675f77696e646f77cd"
        "040000",
    ),
    (
        EventBatch(2, 3.0, GONE),
        "93cb40080000000000009294ac426c6f636b52656d6f76656492cfffffffffffffffff09a34750550291b0416c6c426c6f636b73436c65"
        "6172656400",
    ),
    (EventBatch(3, 4.5, []), "93cb40120000000000009000"),
]
# With the fields session_id and lookahead_token_ids, and a hash of 32 bytes; written by the structs of vLLM 0.33.0.
OF_VLLM_33 = (
    "93cb401400000000000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c42001010101010101010101"
    "01010101010101010101010101010000000000000005b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa62"
    "6c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756dc0a96c6f72615f6e616d65c0a967726f75705f69647800aa73657373696f"
    "6e5f6964a173b36c6f6f6b61686561645f746f6b656e5f69647391910300"
)


def of_vllm(payload: bytes) -> str:
    """Return a payload without the member that vLLM's structs skip."""
    timestamp, events, rank = msgspec.msgpack.decode(payload)
    members = [{name: value for name, value in one.items() if name != "cache_salt"} for one in events]
    return msgspec.msgpack.encode([timestamp, members, rank]).hex()


@pytest.mark.parametrize(("batch", "payload"), MAPS)
def test_maps_have_the_bytes_of_vllms_structs(batch: EventBatch, payload: str) -> None:
    assert of_vllm(Encoder(2, KINDS).encode(batch)) == payload


@pytest.mark.parametrize(("changes", "salts"), [(SALTED, ["5a17"]), (WINDOW, [None]), (GONE, [None, None])])
def test_the_first_event_of_a_salted_prompt_has_a_member_for_dynamo(
    changes: list[KeyChange], salts: list[str | None]
) -> None:
    _, events, _ = msgspec.msgpack.decode(Encoder(2, KINDS).encode(EventBatch(0, 0.0, changes)))
    assert [one.get("cache_salt") for one in events] == salts


@pytest.mark.parametrize(("batch", "payload"), ARRAYS)
def test_arrays_have_the_fields_in_vllms_order(batch: EventBatch, payload: str) -> None:
    assert Encoder(2, KINDS, arrays=True).encode(batch).hex() == payload


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("changes", [SALTED, WINDOW, GONE, []])
def test_what_was_encoded_is_decoded(changes: list[KeyChange], arrays: bool) -> None:
    events = decode(Encoder(2, KINDS, arrays=arrays).encode(EventBatch(0, 0.0, changes)))
    assert len(events) == len(changes)
    for event, change in zip(events, changes, strict=True):
        if not isinstance(change, Cleared):
            assert [*hashes(event)] == [int.from_bytes(one[-8:], "big") for one in change.keys]  # type: ignore[arg-type]
            assert place_of(event) == (change.place.kind, change.place.medium.value)  # type: ignore[arg-type]


def test_a_later_block_of_a_salted_prompt_has_no_extra_keys() -> None:
    (event,) = decode(Encoder(2, KINDS).encode(EventBatch(0, 0.0, WINDOW)))
    assert isinstance(event, BlockStored)
    assert event.extra_keys is None


def test_events_of_vllm_0_33_are_decoded() -> None:
    (event,) = decode(bytes.fromhex(OF_VLLM_33))
    assert isinstance(event, BlockStored)
    assert [*hashes(event)] == [5], "of bytes, the last 8"
    assert place_of(event) == (0, "GPU")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        msgspec.msgpack.encode([1.0, "no list"]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1]]]]),
        b"\x93\xcb\x3f\xf0" + b"\x91" * 5000,
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidBatch):
        decode(payload)


OF_VLLM = """
import sys, msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    assert batch.data_parallel_rank == 0
    print(msgspec.msgpack.encode(batch).hex())
"""


@pytest.mark.skipif("QUIRE_VLLM_PYTHON" not in os.environ, reason="QUIRE_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_decodes_maps_and_writes_the_same_bytes() -> None:
    written = [Encoder(2, KINDS).encode(batch) for batch, _ in MAPS]
    lines = "".join(f"{one.hex()}\n" for one in written)
    python = os.environ["QUIRE_VLLM_PYTHON"]
    done = subprocess.run([python, "-c", OF_VLLM], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.split() if line.startswith("93")] == [*map(of_vllm, written)]
