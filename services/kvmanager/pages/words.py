"""Events in words, for a page that anyone may look at: no tenant is named in them."""

import re
from collections.abc import Sequence
from typing import Any

from blocks import FreeReason, StepItem
from kvmanager import Event, PoolChange
from services.kvmanager.pages.phrases import counted

# Where gateways ask for keys, engines know a request as tenant/id.
_TENANT_IN_WORDS = re.compile(r"\brequest [A-Za-z0-9._-]{1,64}/(?=\S)")
_MOST_RANGES = 4
_LONGEST_NAME = 12

_DONE = {
    StepItem.COMMIT: "{who} filled {blocks}, which can be found by {its} key from now on",
    StepItem.SWAP_OUT: "{who} moved to host memory, into {blocks}",
    StepItem.SWAP_IN: "{who} came back from host memory, into {blocks}",
    StepItem.EXTEND: "{who} was granted {blocks}",
}
_ENDS = {
    FreeReason.FINISHED: "finished",
    FreeReason.CANCELLED: "was cancelled",
    FreeReason.FAILED: "failed",
    FreeReason.PREEMPTED: "was preempted",
    FreeReason.PRUNED: "was pruned",
}
_CHANGES = {
    PoolChange.ATTACHED: "The engine attached its pool.",
    PoolChange.DETACHED: "The pool was dropped.",
    PoolChange.WITHHELD: "The audit withheld {blocks}.",
    PoolChange.HOST_WITHHELD: "The audit withheld {blocks} of the host tier.",
}


def request_name(request_id: str) -> str:
    """Return a request's name without its tenant's."""
    return request_id.partition("/")[2] or request_id


def without_tenants(text: str) -> str:
    """Return an explanation that names no tenants."""
    return _TENANT_IN_WORDS.sub("request ", text)


def event_json(event: Event) -> dict[str, Any]:
    """Write an event for the page: number, step, words, and the sequence that it speaks of (0: none)."""
    return {"event": event.number, "step": event.step, "sequence": event.sequence, "text": sentence(event)}


def sentence(event: Event) -> str:
    """Say in one sentence what happened."""
    if event.change:
        return _CHANGES[event.change].format(blocks=_blocks(event.ranges))
    if event.refusal:
        verb = event.item.name.lower() if event.item else "verb"
        return f"The {verb} of {_who(event)} was refused: {event.detail}."
    text = _deed(event)
    return f"{text[0].upper()}{text[1:]}{_evicted(event)}."


def _deed(event: Event) -> str:
    who, blocks = _who(event), _blocks(event.ranges)
    match event.item:
        case StepItem.ALLOCATE:
            cached = f", {event.cached_tokens} of its tokens were cached" if event.cached_tokens else ""
            return f"{who} began with {blocks}{cached}"
        case StepItem.FORK:
            return f"{who} was forked: both have {blocks}"
        case StepItem.FREE:
            end = _ENDS[event.free_reason] if event.free_reason else "ended"
            return f"{who} {end} and gave back {blocks}"
        case StepItem.PIN:
            return f"{who} was pinned: {blocks}" if event.sequence else f"pins were changed: {blocks}"
        case StepItem.COMMIT | StepItem.SWAP_OUT | StepItem.SWAP_IN | StepItem.EXTEND:
            its = "its" if _number(event.ranges) == 1 else "their"
            return _DONE[event.item].format(who=who, blocks=blocks, its=its)
        case _:
            return f"{who}: {blocks}"


def _who(event: Event) -> str:
    name = f"sequence {event.sequence}" if event.sequence else f"group {event.group}"
    request = request_name(event.request_id)
    shown = request if len(request) <= _LONGEST_NAME else f"{request[:_LONGEST_NAME]}…"
    return f"{name} ({shown})" if request else name


def _evicted(event: Event) -> str:
    if not event.evicted:
        return ""
    return f"; the contents of {counted(len(event.evicted), 'cached block')} were given up for it"


def _number(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _blocks(ranges: Sequence[tuple[int, int]]) -> str:
    if not ranges:
        return "no block"
    number = _number(ranges)
    if number == 1:
        return f"block {ranges[0][0]}"
    listed = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MOST_RANGES]]
    more = f" and {len(ranges) - _MOST_RANGES} more ranges" if len(ranges) > _MOST_RANGES else ""
    return f"{number} blocks ({', '.join(listed)}{more})"
