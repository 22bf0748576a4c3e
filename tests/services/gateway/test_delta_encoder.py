from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import gateway_pb2
from services.gateway.delta_encoder import DeltaEncoder

TEXTS = st.text(st.characters(codec="utf-8"), max_size=300)
TOKENS = st.lists(st.integers(0, (1 << 31) - 1), max_size=40)


@given(st.integers(0, 200), TEXTS, TOKENS)
def test_an_encoded_response_is_that_of_a_message(sample: int, text: str, token_ids: list[int]) -> None:
    delta = gateway_pb2.Delta(sample=sample, text=text, token_ids=token_ids)
    encoded = DeltaEncoder(sample).encode(text, token_ids)
    assert encoded == gateway_pb2.GenerateResponse(delta=delta).SerializeToString()
