import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import KEY_BYTES
from kvmanager import InvalidReport, Pool, PoolReport, PoolSpec, SequenceReport, TierReport, report_of
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField
from services.wire.attach import kind_of, only_field
from services.wire.report import ReportReader, pages_of
from tests.services.wire.slicing import drain

BLOCKS = 12
COUNTS = st.integers(0, (1 << 31) - 1)
IDS = st.integers(-(1 << 63), (1 << 63) - 1)
LISTS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=BLOCKS)
KEYED = st.dictionaries(COUNTS, st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=BLOCKS)
TIERS = st.builds(TierReport, keyed=KEYED, unindexed=KEYED, release_order=LISTS, withheld=LISTS)
NAMES = st.text(st.characters(codec="utf-8"), max_size=512)
SEQUENCES = st.builds(
    SequenceReport,
    sequence=IDS,
    group=IDS,
    request_id=NAMES,
    salt=st.binary(max_size=512),
    resets=COUNTS,
    block_ids=LISTS,
    room_tokens=COUNTS,
    computed_tokens=COUNTS,
    committed_blocks=COUNTS,
    swapped=st.booleans(),
    prompt_tokens=COUNTS,
)
REPORTS = st.builds(
    PoolReport,
    sequences=st.lists(SEQUENCES, max_size=3),
    pins=st.dictionaries(NAMES, LISTS, max_size=3),
    device=TIERS,
    host=TIERS,
    resets=COUNTS,
    last_step=IDS,
)


def read(report: PoolReport, spec: PoolSpec) -> tuple[PoolReport, list[int]]:
    """Write a report in pages; return the report that is read from them, and their sizes."""
    reader, sizes = ReportReader(spec), []
    for page in pages_of(report):
        data = pb.PoolRequest(report=page).SerializeToString()
        assert kind_of(data) == "report"
        assert drain(reader.add(only_field(data, "report"))) == page.last
        sizes.append(len(data))
    assert page.last
    return reader.report, sizes


@given(REPORTS)
def test_a_report_round_trips(report: PoolReport) -> None:
    assert read(report, PoolSpec("engine", 1, "model", 4, BLOCKS, BLOCKS))[0] == report


def test_a_large_report_is_written_in_small_pages() -> None:
    pool = Pool(PoolSpec("engine", 1, "model", 4, 100_000, 10_000))
    report = report_of(pool)
    report.device.keyed = {block: bytes(KEY_BYTES) for block in report.device.release_order}
    found, sizes = read(report, pool.spec)
    assert found == report
    assert max(sizes) < 100_000


def test_pages_of_empty_columns_count_as_empty() -> None:
    reader = ReportReader(PoolSpec("engine", 1, "model", 4, BLOCKS, BLOCKS))
    packed = pb.ReportPage.DESCRIPTOR.fields_by_name["keyed_blocks"].number << 3 | 2
    page = bytes((packed, 0))  # a column of length 0
    kind = pb.PoolRequest.DESCRIPTOR.fields_by_name["report"].number << 3 | 2
    message = bytes((kind, len(page))) + page
    for _ in range(100):
        drain(reader.add(only_field(message, "report")))
    with pytest.raises(InvalidReport, match="empty pages"):
        drain(reader.add(only_field(message, "report")))


@pytest.mark.parametrize("place", ["report", "report.sequences", "report.pins"])
def test_a_field_that_a_later_version_has_is_refused_by_its_number(place: str) -> None:
    request = pb.PoolRequest(report={"sequences": [{"sequence": 1}], "pins": [{"pin_id": "a"}], "last": True})
    _, _, name = place.partition(".")
    message = getattr(request.report, name)[0] if name else request.report
    message.MergeFromString(b"\xa8\x03\x01")  # field 53
    data = request.SerializeToString()
    reader = ReportReader(PoolSpec("engine", 1, "model", 4, BLOCKS, BLOCKS))
    with pytest.raises(InvalidField, match=rf"^{place} has field 53, which this version does not know"):
        drain(reader.add(only_field(data, "report")))
