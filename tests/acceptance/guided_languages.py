"""Twenty-seven JSON schemas of the kind that users write, each with a prompt."""

from typing import Any, NamedTuple

OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}


class Task(NamedTuple):
    """A prompt, and the schema of its answer; True: any JSON object."""

    prompt: str
    schema: dict[str, Any] | bool


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return OBJECT | {"properties": properties, "required": list(properties)}


def listed(items: Any, least: int = 1, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


INTEGER, NUMBER, BOOLEAN = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
WORD = {"type": "string", "maxLength": 12}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
COLOUR = {"enum": ["red", "green", "blue"]}
POINT = record(x=NUMBER, y=NUMBER)

LANGUAGES: dict[str, Task] = {
    "integer": Task("How many inhabitants has France?", INTEGER),
    "number": Task("What is a third of ten?", NUMBER),
    "share": Task("How likely is rain tomorrow, from 0 to 1?", SHARE),
    "positive": Task("How far is the sun, in km?", {"type": "number", "exclusiveMinimum": 0}),
    "negative": Task("Name a temperature below zero.", {"type": "number", "maximum": -0.5}),
    "large": Task("Name a number above a million.", {"type": "integer", "minimum": 1_000_000}),
    "boolean": Task("Is water wet?", BOOLEAN),
    "choice": Task("Which colour has the sky?", COLOUR),
    "date": Task("When did the second world war end?", {"type": "string", "format": "date"}),
    "word": Task("Name a fruit.", WORD),
    "point": Task("Give the coordinates of a point.", POINT),
    "place": Task("Where is Paris?", record(name=WORD, latitude=NUMBER, longitude=NUMBER)),
    "price": Task("What does a loaf of bread cost?", record(amount=NUMBER, currency={"enum": ["EUR", "USD"]})),
    "statistics": Task("Describe 3, 4 and 9.", record(mean=NUMBER, median=NUMBER, deviation=NUMBER)),
    "numbers": Task("List three numbers between 0 and 1.", listed(NUMBER, 3)),
    "integers": Task("List three prime numbers.", listed(INTEGER, 3)),
    "flags": Task("Answer three questions with true or false.", listed(BOOLEAN, 3)),
    "words": Task("List some animals.", listed(WORD)),
    "pairs": Task("List two points.", listed(POINT, 2, 2)),
    "person": Task("Tell me of a person.", record(name=WORD, age=INTEGER, married=BOOLEAN)),
    "nullable": Task("Tell me of a dog.", record(name=WORD, owner=WORD | {"nullable": True})),
    "either": Task("Give a number or a word.", {"anyOf": [NUMBER, WORD]}),
    "nested": Task("Describe a circle.", record(centre=POINT, radius=NUMBER, colour=COLOUR)),
    "optional": Task("Tell me of a car.", OBJECT | {"properties": {"wheels": INTEGER, "speed": NUMBER}}),
    "scores": Task("Rate three films.", {"type": "object", "additionalProperties": NUMBER, "maxProperties": 3}),
    "matrix": Task("Write a matrix of two rows.", listed(listed(NUMBER, 2, 2), 2, 2)),
    "classes": Task("Is this review good: nice!", record(good=SHARE, bad=SHARE, neutral=SHARE)),
}
