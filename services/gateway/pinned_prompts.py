"""Prompts that are pinned whenever an engine comes up: a file of JSON Lines, one prompt a line.

Each line is an object with a `name`, one of `text`, `chat` (a list of objects with `role` and `content`) and
`token_ids`, and perhaps a `salt` and a `tenant`. Empty lines are skipped.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from quire.v1 import gateway_pb2
from services.gateway.administration import FleetAdministration
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.parameters import check_prompt
from services.runtime.errors import ServiceError
from services.runtime.settings import InvalidSetting

_KINDS = ("text", "chat", "token_ids")

log = logging.getLogger("quire.gateway")


def read(path: str) -> list[gateway_pb2.PinPrompt]:
    """Read a file; an empty path means none. Raises InvalidSetting, naming the line and the field that is wrong."""
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"pinned_prompts is {path!r}, which cannot be read: {error}") from error
    prompts: dict[str, gateway_pb2.PinPrompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt_of(json.loads(line))
            if prompt.name in prompts:
                raise ValueError(f"name {prompt.name!r} is there already")
        except (ValueError, RecursionError, ServiceError) as error:
            raise InvalidSetting(f"pinned_prompts is {path!r}, whose line {number} is wrong: {error}") from error
        prompts[prompt.name] = prompt
    return list(prompts.values())


def _prompt_of(content: Any) -> gateway_pb2.PinPrompt:
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if unknown := sorted(content.keys() - {"name", "salt", "tenant", *_KINDS}):
        raise ValueError(f"{unknown[0]!r} is no field of it")
    if len(kinds := [kind for kind in _KINDS if kind in content]) != 1:
        raise ValueError("it must have one of text, chat and token_ids")
    for field in ("name", "salt", "tenant", "text"):
        if not isinstance(content.get(field, ""), str):
            raise ValueError(f"{field} is {content[field]!r}, it must be a string")
    if not content.get("name"):
        raise ValueError("name is missing")
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
    """Pin prompts at an engine one after the other; say of each what came of it. Nothing that goes wrong ends it."""
    for prompt in prompts:
        try:
            pin = await administration.pin(link, prompt, timeout)
        except ServiceError as error:
            log.warning("%r is not pinned: %s", prompt.name, error)
        else:
            log.info("%r is pinned: %s tokens in %s blocks", pin.name, pin.token_count, len(pin.block_ids))
