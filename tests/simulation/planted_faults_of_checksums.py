"""Faults of checksums and of what is condemned: the simulator flips bits, and shows that it finds them."""

from tests.simulation.edit import Edit

OF_CHECKSUMS: dict[str, tuple[Edit, ...]] = {
    "the first hit of an adopted block is not compared": (
        Edit("engine/proof/block_proof.py", "unproven = self.seals.is_unproven(kind, block)", "unproven = False"),
    ),
    "the destination of a copy is sealed with the checksum of what it held before": (
        Edit(
            "engine/kept/seal_writer.py",
            "            pending.update(carried)\n",
            "            if seals is device and self._checksums is not None:\n"
            "                held = {block: self._checksums.of(block) for block in carried}\n"
            "                carried = {block: one._replace(checksum=held[block]) for block, one in carried.items()}\n"
            "            for block, sealing in carried.items():\n"
            "                seals.seal(block, sealing)\n",
        ),
    ),
    "a block has the checksum of another one": (
        Edit(
            "engine/kept/seal_writer.py",
            "checksum=self._checksums.of(block)) for block",
            "checksum=self._checksums.of(max(1, block - 1))) for block",
        ),
    ),
    "a group that was swapped in goes on with a wrong block": (
        Edit(
            "engine/schedule/pool/condemnations.py",
            "        self._pending += wrong\n",
            "        self._pending += wrong\n"
            "        wrong = [one for one in wrong if one.reason is not CondemnReason.SWAP_IN]\n",
        ),
    ),
    "a condemned block is granted again": (
        Edit(
            "engine/schedule/pool/condemnations.py",
            "            Condemn(sequence, blocks, reason, host, kind) for (sequence, reason, host, kind), "
            "blocks in items.items()\n",
            "            Condemn(sequence, blocks, reason, host, kind)\n"
            "            for (sequence, reason, host, kind), blocks in items.items()\n"
            "            if host\n",
        ),
    ),
}
