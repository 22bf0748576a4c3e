import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.run.record import RecordedRequest, RecordSettings
from quire.v1 import kvmanager_pb2, records_pb2
from services.wire.records.reader import InvalidRecord, RecordReader
from services.wire.records.requests import header_entry, request_entry, requests_of, settings_of
from tests.services.wire.records.recorded import content, end

COUNTS = st.integers(1, (1 << 31) - 1)
NUMBERS = st.integers(0, (1 << 63) - 1)
WORDS = st.text(st.characters(codec="utf-8"), max_size=10)
SETTINGS = st.builds(
    RecordSettings,
    *(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS),
    WORDS,
    st.floats(0, 0.5),
    st.booleans(),
)


@st.composite
def requests(draw: st.DrawFn) -> RecordedRequest:
    prompt, output = draw(st.integers(1, 100)), draw(st.integers(0, 100))
    return RecordedRequest(
        number=draw(NUMBERS),
        arrival_step=draw(NUMBERS),
        end_step=draw(NUMBERS),
        keys=tuple(draw(st.lists(st.integers(0, (1 << 64) - 1), max_size=min(5, prompt + output)))),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=draw(st.integers(output, 200)),
        decoding=draw(WORDS),
        priority=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        finish=draw(WORDS),
        request=draw(NUMBERS),
    )


SOME = RecordedRequest(1, 2, 3, (4, 5), 10, 2, 20, "greedy", 0, "stop", 6)
HEADER = header_entry(RecordSettings(4, 64, 32, 8), "engine")


@given(SETTINGS, st.lists(requests(), max_size=3))
def test_settings_and_requests_round_trip(settings: RecordSettings, recorded: list[RecordedRequest]) -> None:
    file = content([header_entry(settings, "engine"), *map(request_entry, recorded), end("why")])
    reader = RecordReader(io.BytesIO(file))
    assert settings_of(reader) == settings
    assert list(requests_of(reader)) == recorded
    assert reader.end == "why"


def test_the_header_describes_the_record() -> None:
    header = HEADER.header
    assert (header.format, header.version, header.engine_id) == ("quire-requests", 3, "engine")
    assert header.sensitive.startswith("no token ids")
    assert "keys of the full blocks" in header.contains


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (request_entry(replace(SOME, prompt_tokens=1, output_tokens=0)), "entry 2: request has impossible lengths"),
        (request_entry(replace(SOME, output_tokens=21)), "entry 2: request has impossible lengths"),
        (request_entry(replace(SOME, prompt_tokens=0)), "entry 2: request has impossible lengths"),
        (
            records_pb2.RecordEntry(snapshot=kvmanager_pb2.ReportPage(last=True)),
            "entry 2: snapshot is not expected here in a record of requests",
        ),
    ],
)
def test_an_invalid_request_is_refused_with_its_entry(entry: records_pb2.RecordEntry, reason: str) -> None:
    with pytest.raises(InvalidRecord) as refused:
        list(requests_of(RecordReader(io.BytesIO(content([HEADER, entry])))))
    assert str(refused.value) == reason


def test_a_header_without_a_pool_is_refused() -> None:
    header = records_pb2.RecordHeader(format="quire-requests", version=3)
    reader = RecordReader(io.BytesIO(content([records_pb2.RecordEntry(header=header)])))
    with pytest.raises(InvalidRecord, match=r"entry 1: header\.engine has 0 blocks of 0 tokens"):
        settings_of(reader)
