"""The servers of table 1 of the PagedAttention paper, and how the compared systems are drawn."""

from typing import Any, NamedTuple

from bench.papers.simulation.cost_model import place
from bench.papers.simulation.scenario import FASTER_TRANSFORMER, PAGED
from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET

BLOCK_SIZE = 16


class Server(NamedTuple):
    """A model on its devices. `kv_gibibytes` of all of them hold K and V, printed without decimals in the paper."""

    model: str
    device: str
    ranks: int
    slots: int
    kv_gibibytes: int
    cost: str = "fit"

    def scenario(self, block_size: int = BLOCK_SIZE) -> dict[str, Any]:
        """Return the fields of a Scenario."""
        return {
            "model": self.model,
            "device": self.device,
            "ranks": self.ranks,
            "blocks": self.slots // block_size,
            "block_size": block_size,
            "cost": self.cost,
        }

    @property
    def slot_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return place(self.model, self.device, self.ranks).shape.token_bytes


# Slots as the paper prints them, in thousands; those of OPT-13B are 983 blocks of 16, which 12 GiB hold.
OPT_13B = Server("opt-13b", "a100-40g", 1, 983 * 16, 12)
OPT_66B = Server("opt-66b", "a100-40g", 4, 9_700, 21)
OPT_175B = Server("opt-175b", "a100-80g", 8, 60_100, 264, "middle")  # no step of it was measured: a roofline

NAMES = {
    PAGED: "Quire",
    "oracle": "Orca (Oracle)",
    "pow2": "Orca (Pow2)",
    "max": "Orca (Max)",
    FASTER_TRANSFORMER: "FasterTransformer",
}
COLORS = {PAGED: QUIRE, "oracle": PEER, "pow2": OTHER, "max": TARGET, FASTER_TRANSFORMER: GREY}
