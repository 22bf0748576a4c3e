"""The measured ceiling of products: registers alone, because loads and stores between products would lower it."""

import re
import shutil
import subprocess

import pytest

from engine.native.build import build
from engine.native.cpu_class import NAMES, KernelsUnavailable, select
from services.models.model_store import default_cache

# A product whose factors are one register, and its distinct sums by class.
PRODUCTS = {
    "amx": (r"vdpbf16ps %zmm(\d+),%zmm\1,%zmm(\d+)", r"vpdpbusd %zmm(\d+),%zmm\1,%zmm(\d+)", 24),
    "avx512-bf16": (r"vdpbf16ps %zmm(\d+),%zmm\1,%zmm(\d+)", r"vpdpbusd %zmm(\d+),%zmm\1,%zmm(\d+)", 24),
    "avx2": (r"vfmadd231ps %ymm(\d+),%ymm\1,%ymm(\d+)", r"vpaddd %ymm(\d+),%ymm(\d+),%ymm\2", 12),
}
# What may stand between products: the loop's counter, and the other two of three instructions of 8-bit integers.
BETWEEN = re.compile(r"(add|sub|inc|dec) +\$?\S*,?%\w+$|cmp +%\w+,%\w+$|vpmadd(ubsw|wd) +%ymm\d+,%ymm\d+,%ymm\d+$")


def listing(name: str) -> list[str]:
    objdump = shutil.which("objdump")
    if not objdump:
        pytest.skip("objdump is not installed")
    try:
        library = build(default_cache().parent / "kernels", select(name))
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))
    command = [objdump, "-d", "--no-show-raw-insn", str(library)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [" ".join(line.partition("\t")[2].split()) for line in found.splitlines()]


def most_sums(lines: list[str], product: str) -> int:
    """Return the largest number of distinct sums in a run of products with nothing between them."""
    most, run = 0, set[str]()
    for line in lines:
        if found := re.fullmatch(product, line):
            run.add(found[2])
            most = max(most, len(run))
        elif not BETWEEN.fullmatch(line):
            run = set()
    return most


@pytest.mark.parametrize("name", NAMES)
def test_the_ceiling_of_products_is_computed_without_loads_and_stores(name: str) -> None:
    lines = listing(name)
    *products, chains = PRODUCTS[name]
    assert [most_sums(lines, product) for product in products] == [chains] * 2
