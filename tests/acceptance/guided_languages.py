"""Twenty-seven JSON schemas as users write them, each with a prompt."""

from typing import Any, NamedTuple

OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}


class Asked(NamedTuple):
    """A prompt, and the schema of its answer; True: any JSON object."""

    prompt: str
    schema: dict[str, Any] | bool


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has exactly these properties."""
    return OBJECT | {"properties": properties, "required": list(properties)}


def listed(items: Any, least: int = 1, most: int = 3) -> dict[str, Any]:
    """Return the schema of a short list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


INTEGER, NUMBER, BOOLEAN = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
WORD = {"type": "string", "maxLength": 12}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
COLOUR = {"enum": ["red", "green", "blue"]}
POINT = record(x=NUMBER, y=NUMBER)

LANGUAGES: dict[str, Asked] = {
    "integer": Asked("How many inhabitants has France?", INTEGER),
    "number": Asked("What is a third of ten?", NUMBER),
    "share": Asked("How likely is rain tomorrow, from 0 to 1?", SHARE),
    "positive": Asked("How far is the sun, in km?", {"type": "number", "exclusiveMinimum": 0}),
    "negative": Asked("Name a temperature below zero.", {"type": "number", "maximum": -0.5}),
    "large": Asked("Name a number above a million.", {"type": "integer", "minimum": 1_000_000}),
    "boolean": Asked("Is water wet?", BOOLEAN),
    "choice": Asked("Which colour has the sky?", COLOUR),
    "date": Asked("When did the second world war end?", {"type": "string", "format": "date"}),
    "word": Asked("Name a fruit.", WORD),
    "point": Asked("Give the coordinates of a point.", POINT),
    "place": Asked("Where is Paris?", record(name=WORD, latitude=NUMBER, longitude=NUMBER)),
    "price": Asked("What does a loaf of bread cost?", record(amount=NUMBER, currency={"enum": ["EUR", "USD"]})),
    "statistics": Asked("Describe 3, 4 and 9.", record(mean=NUMBER, median=NUMBER, deviation=NUMBER)),
    "numbers": Asked("List three numbers between 0 and 1.", listed(NUMBER, 3)),
    "integers": Asked("List three prime numbers.", listed(INTEGER, 3)),
    "flags": Asked("Answer three questions with true or false.", listed(BOOLEAN, 3)),
    "words": Asked("List some animals.", listed(WORD)),
    "pairs": Asked("List two points.", listed(POINT, 2, 2)),
    "person": Asked("Tell me of a person.", record(name=WORD, age=INTEGER, married=BOOLEAN)),
    "nullable": Asked("Tell me of a dog.", record(name=WORD, owner=WORD | {"nullable": True})),
    "either": Asked("Give a number or a word.", {"anyOf": [NUMBER, WORD]}),
    "nested": Asked("Describe a circle.", record(centre=POINT, radius=NUMBER, colour=COLOUR)),
    "optional": Asked("Tell me of a car.", OBJECT | {"properties": {"wheels": INTEGER, "speed": NUMBER}}),
    "scores": Asked("Rate three films.", {"type": "object", "additionalProperties": NUMBER, "maxProperties": 3}),
    "matrix": Asked("Write a matrix of two rows.", listed(listed(NUMBER, 2, 2), 2, 2)),
    "classes": Asked("Is this review good: nice!", record(good=SHARE, bad=SHARE, neutral=SHARE)),
}
