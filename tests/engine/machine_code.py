"""Counts the instructions of a compiled kernel: all of them, and those of its innermost loops."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.engine.key_loops import listing

_PADDING = re.compile(r"^(NOP|BRA 0x[0-9a-f]+$)")
_BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")


class Loop(NamedTuple):
    """An innermost loop: its instructions, how many of them add float32 numbers, and whether some multiply matrices."""

    instructions: int
    additions: int
    multiplies: bool


class MachineCode(NamedTuple):
    """The instructions of one thread. `loops` are in the order of the code."""

    instructions: int
    loops: tuple[Loop, ...]

    @classmethod
    def of(cls, compiled: Any, cuobjdump: str) -> "MachineCode":
        """Read a compiled kernel of Triton."""
        return counted(listing(compiled, cuobjdump))


def counted(code: list[tuple[int, str]]) -> MachineCode:
    """Count a listing of addresses and instructions; what follows the last return is padding."""
    spans = list(_innermost(_spans(code)))
    bodies = [[text for at, text in code if begin <= at <= end] for begin, end in spans]
    loops = tuple(
        Loop(len(body), sum("FADD" in text for text in body), any("MMA" in text for text in body)) for body in bodies
    )
    return MachineCode(sum(not _PADDING.match(text) for _, text in code), loops)


def _spans(code: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """Return the first and last addresses of all loops; a branch to itself is padding."""
    backward = [(int(found[1], 16), at) for at, text in code if (found := _BRANCH.search(text))]
    return sorted({(to, at) for to, at in backward if to < at})


def _innermost(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for begin, end in spans:
        if not any((begin, end) != other and begin <= other[0] and other[1] <= end for other in spans):
            yield begin, end
