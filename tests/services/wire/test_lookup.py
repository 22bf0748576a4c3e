from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvmanager import PrefixHolding
from quire.v1 import kvmanager_pb2 as pb
from services.wire.lookup import Lookup, holdings_message, holdings_of, lookup_message, read_lookup
from tests.services.wire.slicing import drain

TOKENS = st.integers(-(1 << 31), (1 << 31) - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=200)
COUNTS = st.integers(0, (1 << 31) - 1)


@given(st.lists(TOKENS, max_size=3000), st.binary(max_size=512), NAMES)
def test_a_lookup_round_trips(token_ids: list[int], salt: bytes, fingerprint: str) -> None:
    data = lookup_message(token_ids, salt, fingerprint).SerializeToString()
    assert drain(read_lookup(data)) == Lookup(array("i", token_ids), salt, fingerprint)


@given(st.lists(st.builds(PrefixHolding, NAMES, COUNTS, COUNTS), max_size=5))
def test_holdings_round_trip(holdings: list[PrefixHolding]) -> None:
    data = holdings_message(holdings).SerializeToString()
    assert holdings_of(pb.LookupPrefixResponse.FromString(data)) == holdings
