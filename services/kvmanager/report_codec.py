"""Reads the pages of a report. The engine's side of it is `services.engine.report_codec`."""

from collections.abc import Iterable

from kvmanager import KEY_BYTES, InvalidReport, PoolReport, PoolSpec, SequenceReport, TierReport
from quire.v1 import kvmanager_pb2 as pb


class ReportReader:
    """Collects pages until the last one. Raises InvalidReport for more than a pool of this size can have to report."""

    def __init__(self, spec: PoolSpec) -> None:
        self.report = PoolReport()
        self._most_device = spec.device_blocks
        self._most_host = spec.host_blocks

    def add(self, page: pb.ReportPage) -> None:
        """Take one page in."""
        report = self.report
        report.sequences += map(_sequence, page.sequences)
        report.pins.update((pin.pin_id, list(pin.block_ids)) for pin in page.pins)
        _add_keys(report.device.keyed, page.keyed_blocks, page.keys)
        _add_keys(report.device.unfindable, page.unfindable_blocks, page.unfindable_keys)
        report.device.release_order += page.release_order
        report.device.withheld += page.withheld_blocks
        _add_keys(report.host.keyed, page.host_keyed_blocks, page.host_keys)
        _add_keys(report.host.unfindable, page.host_unfindable_blocks, page.host_unfindable_keys)
        report.host.release_order += page.host_release_order
        report.host.withheld += page.host_withheld_blocks
        report.resets, report.last_step = page.resets, page.last_applied_step
        _check_size("device", report.device, self._most_device)
        _check_size("host", report.host, self._most_host)
        if len(report.sequences) > self._most_device + self._most_host:
            raise InvalidReport(f"the report has {len(report.sequences)} sequences, more than the pool has blocks")


def _check_size(name: str, tier: TierReport, most: int) -> None:
    for entries in (tier.keyed, tier.unfindable, tier.release_order, tier.withheld):
        if len(entries) > most:
            raise InvalidReport(f"the report lists {len(entries)} {name} blocks, but there are {most}")


def _add_keys(keyed: dict[int, bytes], blocks: Iterable[int], keys: bytes) -> None:
    listed = list(blocks)
    if len(keys) != KEY_BYTES * len(listed):
        raise InvalidReport(f"{len(listed)} blocks have {len(keys)} bytes of keys, which is not {KEY_BYTES} for each")
    for block, start in zip(listed, range(0, len(keys), KEY_BYTES), strict=True):
        if block in keyed:
            raise InvalidReport(f"block {block} has two keys")
        keyed[block] = keys[start : start + KEY_BYTES]


def _sequence(message: pb.SequenceReport) -> SequenceReport:
    return SequenceReport(
        sequence=message.sequence,
        group=message.group,
        request_id=message.request_id,
        salt=message.salt,
        resets=message.resets,
        block_ids=list(message.block_ids),
        prompt_tokens=message.prompt_tokens,
        room_tokens=message.room_tokens,
        computed_tokens=message.computed_tokens,
        committed_blocks=message.committed_blocks,
        swapped=message.swapped,
    )
