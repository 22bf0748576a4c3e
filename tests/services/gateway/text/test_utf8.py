import re
from contextlib import suppress

import pytest
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from quire.v1.decoding_pb2 import LogitRules, Stopping
from quire.v1.gateway_pb2 import Chat, ChatMessage, GenerateRequest, Prompt, TokenIds
from services.gateway.text.utf8 import invalid_utf8_field, parse_request
from services.runtime.errors import InvalidField

MARK = "mark"


def invalid(request: Message) -> bytes:
    """Serialize a request and replace each MARK by bytes of the same length that are not UTF-8."""
    return request.SerializeToString().replace(MARK.encode(), b"\xff\xfe\x80\xc0")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(model=MARK), "model"),
        (GenerateRequest(prompt=Prompt(text="héllo " + MARK)), "prompt.text"),
        (GenerateRequest(stopping=Stopping(stop_strings=["a", "é", "", MARK, "b"])), "stopping.stop_strings[3]"),
        (
            GenerateRequest(prompt=Prompt(chat=Chat(messages=[ChatMessage(role="user", content=MARK)]))),
            "prompt.chat.messages[0].content",
        ),
        (
            GenerateRequest(prompt=Prompt(chat=Chat(messages=[ChatMessage(role="user"), ChatMessage(role=MARK)]))),
            "prompt.chat.messages[1].role",
        ),
        (GenerateRequest(model=MARK, prompt=Prompt(text=MARK)), "model"),
    ],
)
def test_the_first_text_field_that_is_not_utf8_is_named(request_: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_request(GenerateRequest, invalid(request_))
    assert caught.value.field == field
    assert str(caught.value) == f"{field} is not valid UTF-8"


def test_the_path_of_a_map_entry_has_its_position_on_the_wire() -> None:
    struct = Struct()
    struct.update({"key": MARK})
    assert invalid_utf8_field(Struct, invalid(struct)) == "fields[0].value.string_value"
    struct = Struct()
    struct.update({MARK: [1]})
    assert invalid_utf8_field(Struct, invalid(struct)) == "fields[0].key"


def test_a_malformed_message_is_rejected_without_a_field() -> None:
    data = GenerateRequest(model="m").SerializeToString()[:-1]
    with pytest.raises(InvalidField, match=r"not a valid quire\.v1\.GenerateRequest") as caught:
        parse_request(GenerateRequest, data)
    assert caught.value.field == ""


def test_an_invalid_value_is_named_even_if_a_later_value_replaces_it() -> None:
    # Protobuf checks both values and keeps the last.
    data = invalid(GenerateRequest(model=MARK)) + GenerateRequest(model="m").SerializeToString()
    assert invalid_utf8_field(GenerateRequest, data) == "model"


def test_a_valid_request_is_parsed_unchanged() -> None:
    request = GenerateRequest(
        model="模型",
        prompt=Prompt(token_ids=TokenIds(ids=[1, 2])),
        stopping=Stopping(stop_strings=["🙂", "\x00"]),
        logit_rules=LogitRules(logit_bias={7: 1.5}),
    )
    assert parse_request(GenerateRequest, request.SerializeToString()) == request
    assert invalid_utf8_field(GenerateRequest, request.SerializeToString()) == ""


def stopping_on_the_wire(stop_strings: list[bytes]) -> bytes:
    tag = bytes([Stopping.DESCRIPTOR.fields_by_name["stop_strings"].number << 3 | 2])
    return b"".join(tag + bytes([len(text)]) + text for text in stop_strings)


def is_utf8(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() == text


@given(st.lists(st.binary(max_size=4) | st.text(max_size=4).map(str.encode), max_size=6))
def test_a_request_is_parsed_or_its_first_invalid_text_is_named(texts: list[bytes]) -> None:
    bad = [f"stop_strings[{index}]" for index, text in enumerate(texts) if not is_utf8(text)]
    if bad:
        with pytest.raises(InvalidField, match=rf"^{re.escape(bad[0])} is not valid UTF-8$") as caught:
            parse_request(Stopping, stopping_on_the_wire(texts))
        assert caught.value.field == bad[0]
    else:
        assert parse_request(Stopping, stopping_on_the_wire(texts)) == Stopping(
            stop_strings=[text.decode() for text in texts]
        )


@given(st.binary(max_size=40))
def test_random_bytes_are_parsed_or_rejected(data: bytes) -> None:
    with suppress(InvalidField):
        assert isinstance(parse_request(GenerateRequest, data), GenerateRequest)
