"""The input of custom tools in the arguments that models write."""

import json
import random
import string

import pytest

from services.gateway.http.openai.responses_api.custom_input import CustomInput, arguments_of

ALPHABET = [
    *string.ascii_letters,
    *'"\\/\b\f\n\r\t{}: ',
    "é",
    "漢",
    "\x00",
    "\x7f",
    "\u2028",
    "😊",
    "𝄞",
    "\ud83d",
    "\ude0a",
]


def read(*parts: str) -> str:
    decoder = CustomInput()
    return "".join([*map(decoder.push, parts), decoder.finish()])


def spelled(text: str, rng: random.Random) -> str:
    """Write a text as JSON, with escapes where they are needed and elsewhere at random."""
    units = []
    for unit in text:
        whole = json.dumps(unit)[1:-1]
        plain = unit if unit.isprintable() and unit not in '"\\' and not "\ud800" <= unit <= "\udfff" else whole
        units.append(rng.choice([plain, whole, "\\/" if unit == "/" else plain]))
    blanks = [rng.choice(["", " ", "\n\t"]) for _ in range(4)]
    return '{}{{{}"input"{}:{}"'.format(*blanks) + "".join(units) + '"}'


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def test_an_input_is_decoded_wherever_its_arguments_are_cut() -> None:
    rng = random.Random(52)
    for _ in range(4000):
        arguments = spelled("".join(rng.choices(ALPHABET, k=rng.randrange(12))), rng)
        expected = json.loads(arguments)["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert read(*cut(arguments, rng)) == expected, arguments
        assert read(*arguments) == expected, arguments


def test_what_is_final_is_decoded_at_once() -> None:
    decoder = CustomInput()
    parts = ['{"in', 'put": "a', r"\n", "\\", "u00", "e9b", r"\ud83d", r"\ude0a", 'c"', "}"]
    assert [decoder.push(part) for part in parts] == ["", "a", "\n", "", "", "éb", "", "😊", "c", ""]
    assert decoder.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", "{}"),
        ('{"in', '{"in'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"in put": "x"}', '{"in put": "x"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"input": "cut', "cut"),
        (r'{"input": "cut\u00', "cut"),
        ('{"input": "cut\\', "cut"),
        (r'{"input": "\q\uzz"}', r"\q\uzz"),
        ('{"input": "line\nend", "more": "x"}', "line\nend"),
    ],
)
def test_arguments_of_another_form_lose_no_text(arguments: str, text: str) -> None:
    assert read(arguments) == read(*arguments) == text


def test_a_text_is_written_as_it_is_read() -> None:
    assert read(arguments_of('*** "é" \\ 😊\n')) == '*** "é" \\ 😊\n'
