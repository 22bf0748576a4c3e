"""Prompts pinned at each engine that connects: a file of JSON Lines, one prompt a line.

Each line is an object with a `name`, one of `text`, `chat` (a list of objects with `role` and `content`) and
`token_ids`, and optionally a `salt` and a `tenant`. Empty lines are skipped.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format

from quire.v1 import gateway_pb2
from services.gateway.administration import FleetAdministration
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.request_checks import check_prompt
from services.runtime.bounded_file import read_text
from services.runtime.errors import ServiceError
from services.runtime.settings import InvalidSetting

_KINDS = ("text", "chat", "token_ids")
_MOST_BYTES = 256 << 20

log = logging.getLogger("quire.gateway")


def read(path: str) -> list[gateway_pb2.PinPrompt]:
    """Read a file; an empty path means none. Raises InvalidSetting with the invalid line and field."""
    if not path:
        return []
    try:
        lines = read_text(path, _MOST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"pinned_prompts: cannot read {path!r}: {error}") from error
    prompts: dict[str, gateway_pb2.PinPrompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt_of(json.loads(line))
            if prompt.name in prompts:
                raise ValueError(f"name must be unique, {prompt.name!r} appears twice")
        except (ValueError, RecursionError, ServiceError) as error:
            raise InvalidSetting(f"pinned_prompts: {path!r}, line {number}: {error}") from error
        prompts[prompt.name] = prompt
    return list(prompts.values())


def _prompt_of(content: Any) -> gateway_pb2.PinPrompt:
    if not isinstance(content, dict):
        raise ValueError("the line must be a JSON object")
    if unknown := sorted(content.keys() - {"name", "salt", "tenant", *_KINDS}):
        raise ValueError(f"unknown field {unknown[0]!r}")
    if len(kinds := [kind for kind in _KINDS if kind in content]) != 1:
        raise ValueError("the line must have one of text, chat and token_ids")
    for field in ("name", "salt", "tenant", "text"):
        if not isinstance(content.get(field, ""), str):
            raise ValueError(f"{field} must be a string, not {content[field]!r}")
    if not content.get("name"):
        raise ValueError("name must be given")
    (kind,) = kinds
    prompt = gateway_pb2.Prompt()
    _fill(prompt, kind, content[kind])
    check_prompt(prompt)
    salt, tenant = content.get("salt", ""), content.get("tenant", "")
    return gateway_pb2.PinPrompt(name=content["name"], prompt=prompt, salt=salt, tenant=tenant)


def _fill(prompt: gateway_pb2.Prompt, kind: str, value: Any) -> None:
    inner = {"text": value, "chat": {"messages": value}, "token_ids": {"ids": value}}[kind]
    try:
        json_format.ParseDict({kind: inner}, prompt)
    except json_format.ParseError as error:
        raise ValueError(f"{kind}: {error}") from error


async def pin_all(
    administration: FleetAdministration, link: EngineLink, prompts: Sequence[gateway_pb2.PinPrompt], timeout: float
) -> None:
    """Pin prompts at an engine one after the other. Logs each result; a failure does not stop the rest."""
    for prompt in prompts:
        try:
            pin = await administration.pin(link, prompt, timeout)
        except ServiceError as error:
            log.warning("pinning %r failed: %s", prompt.name, error)
        else:
            log.info("pinned %r: %s tokens in %s blocks", pin.name, pin.token_count, len(pin.block_ids))
