"""LookupPrefix: written by gateways, read by the KV manager within bounds."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmanager import PrefixHolding, limits
from quire.v1 import kvmanager_pb2 as pb
from services.wire.wire_fields import ENTRY_BYTES, Sliced, numbers, parts, root_message

_TOKEN_IDS = pb.LookupPrefixRequest.DESCRIPTOR.fields_by_name["token_ids"].number
_VARINT_BYTES = 10


class Lookup(NamedTuple):
    """A LookupPrefix request: tokens of a prompt, its salt, and the model's fingerprint (empty: any)."""

    token_ids: "array[int]"
    salt: bytes
    model_fingerprint: str


def lookup_message(token_ids: Sequence[int], salt: bytes, model_fingerprint: str) -> pb.LookupPrefixRequest:
    """Write a LookupPrefixRequest."""
    return pb.LookupPrefixRequest(token_ids=token_ids, salt=salt, model_fingerprint=model_fingerprint)


def read_lookup(data: bytes) -> Sliced[Lookup]:
    """Read a LookupPrefixRequest, in slices. Raises InvalidField and DecodeError."""
    columns = {_TOKEN_IDS: limits.MAX_PROMPT_TOKENS * _VARINT_BYTES}
    found = yield from parts(root_message(data), pb.LookupPrefixRequest.DESCRIPTOR, columns, {}, ENTRY_BYTES)
    token_ids = yield from numbers(found.columns[_TOKEN_IDS], limits.MAX_PROMPT_TOKENS, "token_ids")
    rest = pb.LookupPrefixRequest.FromString(bytes(found.rest))
    return Lookup(token_ids, rest.salt, rest.model_fingerprint)


def holdings_message(holdings: Iterable[PrefixHolding]) -> pb.LookupPrefixResponse:
    """Write the holdings of each pool."""
    return pb.LookupPrefixResponse(holdings=[pb.PrefixHolding(**one._asdict()) for one in holdings])


def holdings_of(message: pb.LookupPrefixResponse) -> list[PrefixHolding]:
    """Read the holdings of each pool."""
    return [PrefixHolding(one.engine_id, one.device_tokens, one.host_tokens) for one in message.holdings]
