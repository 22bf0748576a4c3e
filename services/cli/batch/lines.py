"""Lines of a batch: requests in OpenAI's format, each with the key that finds its answer again."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from services.runtime.http.json_body import MAX_DEPTH, MalformedJson
from services.runtime.http.json_body import parse as parse_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# A request has at most 4 MiB, its line a little more.
_MAX_LINE_BYTES = 5 * 1024 * 1024
_MAX_ID_CHARACTERS = 512
_MAX_LEVELS = MAX_DEPTH + 1  # of a body, and the object around it
_FIELDS = ("custom_id", "method", "url", "body")
_SHOWN = 60
_PLACE_IN_TEXT = re.compile(r": line \d+ column (\d+) \(char \d+\)")
_FINGERPRINT_DIGITS = 32
_KEY_BYTES = 8


@dataclass(frozen=True)
class Line:
    """A line that is not blank. `fault` says why it is no request; then `url` and `body` are empty."""

    number: int
    custom_id: str | None
    url: str
    body: dict[str, Any]
    content: bytes
    fault: str = ""

    @property
    def key(self) -> int:
        """Identifies the line among those of its file: a hash of its id, or of its number if it has none."""
        return key_of(self.custom_id, self.number)

    @cached_property
    def answer_id(self) -> str:
        """The id of its answer: a hash of the request, so that a changed request is detected."""
        content = self.content if self.fault else _canonical([self.custom_id, self.url, self.body])
        return f"batch_req_{hashlib.sha256(content).hexdigest()[:_FINGERPRINT_DIGITS]}"

    @property
    def sequences(self) -> int:
        """Number of sequences generated at the same time: prompts times samples."""
        prompt, count = self.body.get("prompt"), self.body.get("n")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return prompts * (count if isinstance(count, int) and count > 1 else 1)


def key_of(custom_id: str | None, number: int) -> int:
    """Return the key of a line with this id, or of this number if it has none."""
    name = f"line {number}" if custom_id is None else f"id {custom_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=_KEY_BYTES).digest())


def fingerprint_of(answer_id: str) -> int:
    """Return a number that differs for different answer ids."""
    return int.from_bytes(hashlib.blake2b(answer_id.encode(errors="replace"), digest_size=_KEY_BYTES).digest())


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, one at a time, without blank ones."""
    with path.open("rb") as file:
        number = 0
        while content := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(content) > _MAX_LINE_BYTES:
                _skip_rest(file, content)
                yield _faulty(number, None, content, f"it has more than {_MAX_LINE_BYTES} bytes")
            elif not content.isspace():
                yield parse(number, content)


def parse(number: int, content: bytes) -> Line:
    """Read one line."""
    try:
        value = parse_json(content, "it", _MAX_LEVELS)
    except MalformedJson as error:
        fault = _PLACE_IN_TEXT.sub(r" at column \1", str(error))  # the place in the line: its number is in the message
        return _faulty(number, _readable_id(content), content, fault)
    if not isinstance(value, dict):
        return _faulty(number, None, content, "it is not a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_ID_CHARACTERS:
        bounds = f"a text of 1 to {_MAX_ID_CHARACTERS} characters"
        return _faulty(number, None, content, f"custom_id must be {bounds}, not {_shown(custom_id)}")
    if fault := _fault(value):
        return _faulty(number, custom_id, content, fault)
    return Line(number, custom_id, value["url"], value["body"], content)


def _fault(value: dict[str, Any]) -> str:
    if unknown := sorted(value.keys() - set(_FIELDS)):
        return f"it has the unknown field {_shown(unknown[0])}"
    if value.get("method") != "POST":
        return f"method must be POST, not {_shown(value.get('method'))}"
    if value.get("url") not in URLS:
        return f"url must be one of {', '.join(URLS)}, not {_shown(value.get('url'))}"
    body = value.get("body")
    if not isinstance(body, dict):
        return f"body must be a JSON object, not {_shown(body)}"
    return "body.stream must not be true: an answer is one line" if body.get("stream") else ""


def _readable_id(content: bytes) -> str | None:
    """Return the id of a line that is malformed elsewhere, if it can be read and written."""
    try:
        custom_id = json.loads(content.decode("utf-8-sig"))["custom_id"]
        custom_id.encode()
        return custom_id if 1 <= len(custom_id) <= _MAX_ID_CHARACTERS else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _faulty(number: int, custom_id: str | None, content: bytes, fault: str) -> Line:
    return Line(number, custom_id, "", {}, content, fault)


def _skip_rest(file: BinaryIO, content: bytes) -> None:
    while content and not content.endswith(b"\n"):
        content = file.readline(_MAX_LINE_BYTES)


def _canonical(value: Sequence[Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
