"""The writer of seals: what the copies of one answer seal."""

import torch

from blocks import Copy
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealChanges, SealWriter, TierChanges
from engine.kept.seals import Sealing
from engine.schedule.step_plan import Copies

FIRST, SECOND = Sealing(b"1" * 32, 0, 0), Sealing(b"2" * 32, 0, 0)


def test_a_block_that_an_answer_copies_to_the_host_and_refills_is_sealed_in_both_tiers() -> None:
    cache, host = (torch.arange(3).view(3, 1).repeat(1, 2) for _ in range(2))
    memory = KeptMemory.private([(cache, host)])
    writer = SealWriter(memory, lambda: 0.0)
    (kind,) = memory.kinds
    for block, sealing in ((1, FIRST), (2, SECOND)):
        writer.apply(SealChanges(TierChanges(sealed={block: sealing}), committed={block: sealing}))
    to_host = Copy(2, 1)
    host[1] = cache[2]
    writer.apply(SealChanges(host=TierChanges(opened=[1]), to_host=[to_host]))
    assert writer.on_copied(Copies((to_host,), (), ())) == []

    evicting, refilling = Copy(1, 2), Copy(1, 1)
    writer.apply(
        SealChanges(TierChanges(opened=[1]), TierChanges(opened=[2]), to_host=[evicting], to_device=[refilling])
    )
    host[2], cache[1] = cache[1].clone(), host[1]
    assert writer.on_copied(Copies((evicting,), (refilling,), ())) == []
    assert not writer.has_pending
    found = [seals.sealing(block) for seals, block in ((kind.host, 2), (kind.device, 1))]
    assert [one and one.key for one in found] == [FIRST.key, SECOND.key]
    assert kind.host.checksum(2) != kind.device.checksum(1)
    assert kind.device.checksum(1) == kind.device.checksum(2)
