"""What kept memory says of itself: its header, and the places of its parts, which are known without the memory."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Self

from engine.kept.checksums import NAME
from engine.kept.seals import seal_bytes

FORMAT = 4
"""Version of the layout. Another one is not read."""

MAGIC = b"\x93quire kept blocks\n"
"""The start of a header, which no text has."""

HEADER_BYTES = 4096
"""The size of a header, a page."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int64": 8}
"""The size of an element, by the names that torch has for its types: those of caches, and one of plain numbers."""

# Large pages, of hugetlbfs and of shared memory.
_LARGE_PAGE = 2 << 20


@dataclass(frozen=True)
class KeptKind:
    """The blocks of one kind. `shapes` describes K and V of its layers inside a block, as the backend lays them out."""

    name: str
    shapes: str
    block_elements: int
    device_blocks: int
    host_blocks: int


@dataclass(frozen=True)
class KeptIdentity:
    """What must be equal for a process to use the blocks that another one left.

    `fingerprint` is a digest of every byte of the weights and of the code that computed K and V; `dtype` is the
    cache's. `kinds` are the kinds of blocks, kind 0 first. `checksums` is what computes the blocks' checksums, empty if
    they have none.
    """

    boot_id: str
    dtype: str
    block_size: int
    kinds: tuple[KeptKind, ...]
    backend: str
    fingerprint: str
    checksums: str = NAME
    format: int = FORMAT

    def difference(self, other: Self) -> str:
        """Return the name of the first field in which two differ, empty if they are equal.

        Fields of window kinds have the kind's name behind them, as in `host_blocks of window-64`.
        """
        own, theirs = vars(self), vars(other)
        found = next((name for name in ("format", *own) if own[name] != theirs[name]), "")
        if found != "kinds" or len(self.kinds) != len(other.kinds):
            return found
        number, one, of = next(
            (number, vars(one), vars(of))
            for number, (one, of) in enumerate(zip(self.kinds, other.kinds, strict=True))
            if one != of
        )
        different = next(name for name in one if one[name] != of[name])
        if different == "name":
            return "kinds"
        return f"{different} of {one['name']}" if number else different


@dataclass(frozen=True)
class Places:
    """Where the parts of one kind begin, and where the last one ends: offsets in bytes."""

    device_seals: int
    host_seals: int
    device: int
    host: int
    end: int

    @classmethod
    def behind(cls, start: int, device_blocks: int, host_blocks: int, block: int) -> Self:
        """Place a kind with blocks of `block` bytes."""
        device_seals = _aligned(start, HEADER_BYTES)
        host_seals = _aligned(device_seals + seal_bytes(device_blocks), HEADER_BYTES)
        device = _aligned(host_seals + seal_bytes(host_blocks), _LARGE_PAGE)
        host = _aligned(device + (device_blocks + 1) * block, _LARGE_PAGE)
        host_size = (host_blocks + 1) * block if host_blocks else 0
        return cls(device_seals, host_seals, device, host, _aligned(host + host_size, _LARGE_PAGE))


def places_of(identity: KeptIdentity) -> list[Places]:
    """Return the places of each kind, in order."""
    itemsize = ITEM_BYTES[identity.dtype]
    return _placed((one.device_blocks, one.host_blocks, one.block_elements * itemsize) for one in identity.kinds)


def _placed(kinds: Iterable[tuple[int, int, int]]) -> list[Places]:
    places: list[Places] = []
    for kind in kinds:
        places.append(Places.behind(places[-1].end if places else 2 * HEADER_BYTES, *kind))
    return places


def kept_bytes(identity: KeptIdentity) -> int:
    """Return the bytes of a whole memory."""
    return places_of(identity)[-1].end


def kept_bytes_for(*kinds: tuple[int, int, int]) -> int:
    """Return the bytes of a whole memory of kinds with these device blocks, host blocks and bytes of a block."""
    return _placed(kinds)[-1].end


def header_of(identity: KeptIdentity) -> bytes:
    """Return the header's page; it is written last, when the rest is zeros."""
    text = MAGIC + json.dumps(asdict(identity), sort_keys=True).encode()
    assert len(text) < HEADER_BYTES, "names are short"
    return text.ljust(HEADER_BYTES, b"\0")


def is_header(page: bytes) -> bool:
    """Return whether a page is the header of a kept memory, of any version."""
    return page.startswith(MAGIC)


def read_header(page: bytes) -> KeptIdentity | None:
    """Return the identity in a header, None if this version cannot read it."""
    try:
        fields = json.loads(page[len(MAGIC) : HEADER_BYTES].rstrip(b"\0"))
        fields["kinds"] = tuple(KeptKind(**kind) for kind in fields["kinds"])
        return KeptIdentity(**fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _aligned(offset: int, size: int) -> int:
    return -(-offset // size) * size
