"""What the compiler made of the key loops of an attention kernel: pipelining, widths of loads, spilled registers.

Key loops are the innermost loops with matrix products. Triton's IR shows which tiles of K and V a turn loads, and how
many copies may be in flight when it awaits its own. PTX shows the widths of loads; the machine code, spills.
"""

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

# Loops that are not pipelined: the last tile of an item of decoding, at most one turn.
UNPIPELINED = {"_prefill": 0, "_decode": 1}
# Copies of K and of V, which must be in flight for the next turn.
_LEAST_IN_FLIGHT = 2
_VECTOR = 16  # bytes of one load

_PRODUCT = re.compile(r"\b(tt\.dot|warp_group_dot|tc_gen5_mma)\b")
_TILE = re.compile(r"(tt\.load|ttg\.async_copy_global_to_local) .*?tensor<(\d+)x(\d+)x!tt\.ptr<[a-z]+(\d+)>")
_WAIT = re.compile(r"ttg\.async_wait .*\{num = (\d+)")
_PTX_PRODUCT = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
_FLOAT32_PRODUCT = 64  # instructions of one of float32; fewer combine partial results
_PTX_VECTOR = re.compile(r"cp\.async\.cg\.\S+ .*, (?:16|0x10)\b|ld\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64)")
_PTX_SCALAR = re.compile(r"ld\.global\S*\.[bfsu](?:8|16)\b")
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_SASS_BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")


class KeyLoop(NamedTuple):
    """One loop over tiles of keys.

    `waits`: copies that may be in flight at each wait. `tile_bytes`: of K and V of one turn. `by_copies`: whether
    asynchronous copies load them. `vectors` and `scalars`: loads of a thread in a turn, of 16 bytes, and of 1 or 2.
    """

    waits: list[int]
    tile_bytes: int
    by_copies: bool
    vectors: int
    scalars: int


def faults_of(kernel: str, compiled: Any) -> list[str]:
    """Return what makes the key loops slow: loads that are awaited at once, or that are not of 16 bytes."""
    threads = 32 * compiled.metadata.num_warps
    return list(_faults(kernel, key_loops(compiled.asm["ttgir"], compiled.asm["ptx"]), threads))


def listing(compiled: Any, cuobjdump: str) -> list[tuple[int, str]]:
    """Return the addresses and instructions of the machine code."""
    with TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        listed = subprocess.run([cuobjdump, "-sass", str(binary)], capture_output=True, text=True, check=True).stdout
    return [(int(address, 16), text) for address, text in _SASS.findall(listed)]


def spilling_loops(compiled: Any, cuobjdump: str) -> int:
    """Return how many key loops of the machine code use local memory."""
    code = listing(compiled, cuobjdump)
    bodies = ("\n".join(text for at, text in code if begin <= at <= end) for begin, end in _sass_loops(code))
    return sum(1 for body in _innermost(bodies, re.compile(r"MMA|FFMA").search) if re.search(r"\b(LDL|STL)\b", body))


def _faults(kernel: str, loops: list[KeyLoop], threads: int) -> Iterator[str]:
    synchronous = sum(not loop.by_copies for loop in loops)
    if not loops or synchronous > UNPIPELINED[kernel]:
        yield f"{synchronous} of {len(loops)} key loops do not load K and V asynchronously"
    for loop in loops:
        if loop.by_copies and min(loop.waits, default=0) < _LEAST_IN_FLIGHT:
            yield f"a key loop waits until {loop.waits} copies are in flight: it is not pipelined"
        if loop.scalars or loop.vectors * _VECTOR * threads < loop.tile_bytes:
            yield f"a key loop has {loop.scalars} scalar loads and {loop.vectors} of 16 bytes for {loop.tile_bytes}"


def key_loops(ttgir: str, ptx: str) -> list[KeyLoop]:
    """Return the key loops of a kernel, in their order."""
    bodies = _innermost(_ttgir_loops(ttgir), _PRODUCT.search)
    compiled = _innermost(_ptx_loops(ptx), _PTX_PRODUCT.search if _PTX_PRODUCT.search(ptx) else _multiplies)
    return [_key_loop(*pair) for pair in zip(bodies, compiled, strict=True)]


def _key_loop(body: str, ptx: str) -> KeyLoop:
    tiles = _TILE.findall(body)
    return KeyLoop(
        [int(number) for number in _WAIT.findall(body)],
        sum(int(rows) * int(dims) * int(bits) // 8 for _, rows, dims, bits in tiles),
        bool(tiles) and all(operation != "tt.load" for operation, *_ in tiles),
        len(_PTX_VECTOR.findall(ptx)),
        len(_PTX_SCALAR.findall(ptx)),
    )


def _multiplies(loop: str) -> bool:
    return loop.count("fma.rn.f32") >= _FLOAT32_PRODUCT


def _innermost(bodies: Iterable[str], multiplies: Callable[[str], object]) -> list[str]:
    """Return the loops with products that do not contain another one, in order."""
    found = [body for body in bodies if multiplies(body)]
    return [body for body in found if not any(other != body and other in body for other in found)]


def _ttgir_loops(text: str) -> Iterator[str]:
    """Yield the loops, whose first and last lines are indented alike."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "scf.for" in line:
            end = f"{line[: len(line) - len(line.lstrip())]}}}"
            last = next(at for at in range(number + 1, len(lines)) if lines[at].startswith(end))
            yield "\n".join(lines[number : last + 1])


def _ptx_loops(text: str) -> Iterator[str]:
    """Yield what is between a label and the last branch back to it."""
    for label in re.finditer(r"^(\$L__BB\w+):", text, re.MULTILINE):
        back = [one.end() for one in re.finditer(rf"\bbra(?:\.uni)?\s+{re.escape(label[1])};", text[label.end() :])]
        if back:
            yield text[label.start() : label.end() + back[-1]]


def _sass_loops(code: list[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last addresses of loops."""
    for at, text in code:
        branch = _SASS_BRANCH.search(text)
        if branch and int(branch[1], 16) <= at:
            yield int(branch[1], 16), at
