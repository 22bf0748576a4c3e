"""Records of requests: values of the engine as entries of a file, in both directions."""

from collections.abc import Iterator
from dataclasses import fields

from engine.run.record import RecordedRequest, RecordSettings
from quire.v1 import records_pb2 as pb
from services.wire.records.file import now
from services.wire.records.reader import VERSION, WITHOUT_DIGESTS, RecordReader

REQUESTS_FORMAT = "quire-requests"
_CONTAINS = (
    "for each request: arrival and end in engine steps, keys of the full blocks of prompt and output, their lengths in "
    "tokens, kind of decoding, priority"
)
_SENSITIVE = "no token ids; keys tell which requests begin alike, and lengths how long they are"


def header_entry(settings: RecordSettings, engine_id: str) -> pb.RecordEntry:
    """Write the header of a record of requests."""
    header = pb.RecordHeader(
        format=REQUESTS_FORMAT,
        version=VERSION,
        contains=_CONTAINS,
        sensitive=_SENSITIVE,
        created=now(),
        engine_id=engine_id,
        engine=pb.RecordedEngine(**vars(settings)),
    )
    return pb.RecordEntry(header=header)


def settings_of(reader: RecordReader) -> RecordSettings:
    """Read the engine's settings from the header. Raises InvalidRecord."""
    reader.check_version()
    engine = reader.header.engine
    settings = RecordSettings(**{field.name: getattr(engine, field.name) for field in fields(RecordSettings)})
    if min(settings.block_size, settings.device_blocks) < 1:
        raise reader.invalid(f"header.engine has {settings.device_blocks} blocks of {settings.block_size} tokens")
    return settings


def request_entry(request: RecordedRequest) -> pb.RecordEntry:
    """Write a request."""
    return pb.RecordEntry(request=pb.RecordedRequest(**vars(request)))


def requests_of(reader: RecordReader) -> Iterator[RecordedRequest]:
    """Read requests. Raises InvalidRecord."""
    for entry in reader:
        if (kind := entry.WhichOneof("kind")) != "request":
            raise reader.invalid(f"{kind} is not expected here in a record of requests")
        message = entry.request
        read = {field.name: getattr(message, field.name) for field in fields(RecordedRequest)}
        # Version 2 does not say which samples are of one request.
        number = message.number if reader.header.version == WITHOUT_DIGESTS else message.request
        request = RecordedRequest(**read | {"keys": tuple(message.keys), "request": number})
        if not request.is_valid:
            raise reader.invalid("request has impossible lengths")
        yield request
