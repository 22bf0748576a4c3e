"""The bounds of the JSON parser for untrusted input."""

import json

import pytest

from services.runtime.http.json_body import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MalformedJson, parse


def test_as_many_arrays_objects_and_keys_as_allowed_are_parsed() -> None:
    lists = [[]] * (MAX_CONTAINERS - 1)
    assert parse(json.dumps(lists).encode()) == lists
    keys = {str(number): 0 for number in range(MAX_KEYS)}
    assert parse(json.dumps(keys).encode()) == keys


@pytest.mark.parametrize("one", ["{}", "[]", '{"a": [1]}'])
@pytest.mark.parametrize("levels", [1, MAX_DEPTH - 2])
def test_more_arrays_and_objects_are_refused(one: str, levels: int) -> None:
    body = "[" * levels + ",".join([one] * MAX_CONTAINERS) + "]" * levels
    with pytest.raises(MalformedJson, match=f"^the body must have at most {MAX_CONTAINERS} arrays and objects$"):
        parse(body.encode())


def test_more_keys_are_refused() -> None:
    keys = {str(number): 0 for number in range(MAX_KEYS + 1)}
    with pytest.raises(MalformedJson, match=f"^the body must have at most {MAX_KEYS} keys$"):
        parse(json.dumps(keys).encode())


@pytest.mark.parametrize("text", ["[{:" * MAX_KEYS, '\\"[{:' * MAX_KEYS])
def test_brackets_and_colons_in_strings_do_not_count(text: str) -> None:
    body = {"prompt": text, "list": [{}] * 100}
    assert parse(json.dumps(body).encode()) == body


def test_any_number_of_token_ids_is_parsed() -> None:
    numbers = list(range(1_000_000))
    assert parse(json.dumps(numbers).encode()) == numbers
