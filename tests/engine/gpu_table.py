"""Writes docs/gpu-kernels.md: what two Tritons make of each kernel for absent GPUs, at Llama-3-8B's shape.

`make gpu-compile` runs it. With the word `rows` it prints the rows of the Triton that Python finds, as JSON;
with `few`, of few kernels.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.models.model_store import default_cache

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu-kernels.md"
# torch 2.11, which GPU machines often have, requires it.
OLDER = "3.6.0"
_BEGIN, _END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"
_VARIANTS = ("SPLIT", "NORMED", "PARTS", "FILTERS", "WORDS")

Constants = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A kernel on a capability. `in_flight`: copies that may be in flight at each wait of its key loops.

    `instructions`: of a thread. `loops`: of these, those of its innermost loops. `each`: those of all threads for one
    `unit`, None where there is none.
    """

    capability: int
    kernel: str
    warps: int
    registers: int
    stack: int
    shared: int
    programs: int
    in_flight: list[int]
    instructions: int
    loops: list[int]
    unit: str
    each: float | None

    def cells(self) -> str:
        """Return what differs between compilers."""
        flight = "/".join(map(str, self.in_flight)) or "-"
        each = "-" if self.each is None else f"{self.each:g}"
        numbers = (self.registers, self.stack, f"{self.shared:,}", self.programs, flight, f"{self.instructions:,}")
        return " | ".join(map(str, (*numbers, each)))


def tokens_of_tile(constants: Constants) -> int:
    return int(constants["TILE"])


# What a thread's instructions are divided by: a unit, how many of them a program (or one turn of its loop) processes.
UNITS: dict[str, tuple[str, Callable[[Constants], int], bool]] = {
    "scan": ("token", tokens_of_tile, False),
    "measure": ("token", tokens_of_tile, False),
    "gather": ("token", tokens_of_tile, False),
    "bound_spread": ("token, twice", tokens_of_tile, True),
    "choose": ("candidate and round", lambda one: one["CHUNK"], True),
    "_decode": ("key of a KV head", lambda one: one["KEYS"], True),
    "_prefill": ("score", lambda one: one["ROWS"] * one["KEYS"], True),
    "_copy": ("8 bytes", lambda one: one["WORDS"], True),
    "_silu_gated": ("element", lambda one: one["ELEMENTS"], False),
    "_add_and_norm": ("element", lambda one: one["ELEMENTS"], False),
    "_embed_part": ("element", lambda one: one["ELEMENTS"], False),
    "_write_rotated": ("element", lambda one: (one["GROUP"] + 2) * one["HEAD_SIZE"], False),
    "_write": ("element", lambda one: one["TOKENS"] * (one["KEY_ELEMENTS"] + one["VALUE_ELEMENTS"]), False),
}


def rows(capabilities: Iterable[int], *, few: bool = False) -> list[Row]:
    """Compile the kernels with the Triton that is installed; the `few` are those without cache and sampler."""
    import torch

    from tests.engine.compile_for_gpu import SHAPES, compiling, cuobjdump, use, use_kernels_without_cache, use_sampler
    from tests.engine.gpu_resources import Resources
    from tests.engine.key_loops import UNPIPELINED, key_loops
    from tests.engine.machine_code import MachineCode

    found: dict[tuple[int, str], Row] = {}

    def report(resources: Resources, compiled: Any, constants: Constants) -> None:
        label = label_of(resources.kernel, constants)
        if (resources.capability, label) in found or resources.kernel == "_read":  # that is bench's
            return
        code = MachineCode.of(compiled, cuobjdump())
        attends = resources.kernel in UNPIPELINED
        loops = key_loops(compiled.asm["ttgir"], compiled.asm["ptx"]) if attends else []
        unit, each = _each(resources, code, constants)
        found[resources.capability, label] = Row(
            resources.capability,
            label,
            resources.threads // 32,
            resources.registers,
            resources.stack,
            resources.shared,
            resources.programs,
            [min(loop.waits) for loop in loops if loop.waits],
            code.instructions,
            [loop.instructions for loop in code.loops],
            unit,
            each,
        )

    with compiling(report) as driver:
        for driver.capability in capabilities:
            use_kernels_without_cache()
            if not few:
                use(*next(one for one in SHAPES if one[0] == torch.bfloat16 and one[1].kv_heads == 8 and one[2] == 4))
                use_sampler(torch.bfloat16)
    return list(found.values())


def label_of(kernel: str, constants: Constants) -> str:
    """Return the name of a kernel with the constants that make it another one."""
    return " ".join([kernel.lstrip("_"), *(f"{name}={constants[name]}" for name in _VARIANTS if name in constants)])


def _each(resources: Any, code: Any, constants: Constants) -> tuple[str, float | None]:
    """Return a unit and the instructions of all threads for it.

    Of several loops, the search of `choose` has the largest share of additions, and whole tiles of keys the fewest
    instructions of those with products.
    """
    if resources.kernel not in UNITS or (resources.kernel == "choose" and not constants["FILTERS"]):
        return "", None
    unit, number, of_loop = UNITS[resources.kernel]
    counted = code.instructions
    if of_loop:
        multiplying = [loop for loop in code.loops if loop.multiplies]
        if multiplying:
            counted = min(loop.instructions for loop in multiplying)
        else:
            counted = max(code.loops, key=lambda loop: loop.additions / loop.instructions).instructions
    return unit, round(counted * resources.threads / number(constants), 1)


def rows_of(packages: Path | None, capabilities: Iterable[int], *words: str) -> tuple[str, list[Row]]:
    """Return the version of the Triton in a folder, None for the installed one, and its rows."""
    paths = [str(path) for path in (packages, ROOT, ROOT / "protos") if path]
    cache = default_cache().parent / "triton"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "tests.engine.gpu_table", "rows", *words, *map(str, capabilities)]
    printed = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(printed)
    return found["triton"], [Row(**one) for one in found["rows"]]


def older(folder: Path) -> Path:
    """Return a folder with the older Triton, which is installed there if it is empty."""
    if not (folder / "triton").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder)]
        subprocess.run([*command, f"triton=={OLDER}"], check=True)
    return folder


def table(found: dict[str, list[Row]]) -> str:
    """Return the table of all rows, by kernel; compilers with equal figures share a line."""
    head = "| kernel, warps | sm | Triton | registers | spilled | shared | programs | in flight | instructions | each |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    keys = sorted({(row.kernel, row.capability, row.warps) for rows in found.values() for row in rows})
    for kernel, capability, warps in keys:
        by_cells: dict[str, list[str]] = {}
        for version, rows in found.items():
            for row in rows:
                if (row.kernel, row.capability, row.warps) == (kernel, capability, warps):
                    by_cells.setdefault(row.cells(), []).append(version)
        for cells, versions in by_cells.items():
            lines.append(f"| {kernel}, {warps} | {capability} | {', '.join(versions)} | {cells} |")
    return "\n".join(lines) + "\n"


def cells_on(page: str, version: str) -> dict[tuple[str, int], str]:
    """Return the figures of one compiler on the page, by kernel and capability."""
    lines = page.split(_BEGIN)[1].split(_END)[0].splitlines()[2:]
    parts = [line.strip("| ").split(" | ", 3) for line in lines]
    return {
        (kernel.rsplit(", ", 1)[0], int(capability)): cells
        for kernel, capability, versions, cells in parts
        if version in versions.split(", ")
    }


def main() -> None:
    """Print rows, or write the table into the page. It takes minutes, and installs an older Triton into build/ once."""
    from tests.engine.gpu_resources import PROCESSORS

    every = [str(one) for one in PROCESSORS]
    parser = ArgumentParser(description=main.__doc__)
    known = ("rows", "few", *every)
    shown = f"rows: print rows as JSON, of these compute capabilities ({', '.join(every)}; all by default); few: some"
    parser.add_argument("words", nargs="*", help=f"{shown} kernels only. Without rows the page is written, with all.")
    words = parser.parse_args().words
    if unknown := [one for one in words if one not in known]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    if words and "rows" not in words:
        parser.error("the page has all kernels and capabilities: only rows can be of some")
    capabilities = [int(one) for one in words if one in every] or list(PROCESSORS)
    if "rows" in words:
        import triton

        found_rows = [asdict(one) for one in rows(capabilities, few="few" in words)]
        sys.stdout.write(json.dumps({"triton": triton.__version__, "rows": found_rows}))
        return
    found = dict(rows_of(folder, capabilities) for folder in (None, older(ROOT / "build" / f"triton-{OLDER}")))
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}{table(found)}{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
