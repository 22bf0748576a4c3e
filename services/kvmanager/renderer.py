"""Sentences about what happened to blocks: of one event, and of all that a request went through."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from blocks import FreeReason, StepItem
from kvmanager import Event, Explanation, PoolChange
from kvmanager.history.explanation import Admitted, Done, Finding, Forgotten, Refusals, Standing, Victim

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
_ENDS_OF_SEQUENCES = {
    FreeReason.FINISHED: "finished",
    FreeReason.CANCELLED: "was cancelled",
    FreeReason.FAILED: "failed",
    FreeReason.PREEMPTED: "was preempted",
    FreeReason.PRUNED: "was pruned",
}
_ENDS_OF_REQUESTS = {
    FreeReason.FINISHED: "It finished",
    FreeReason.CANCELLED: "It was cancelled",
    FreeReason.FAILED: "It failed",
    FreeReason.PRUNED: "Its last sequence was pruned",
}
_STANDINGS = {
    Standing.NEVER_ADMITTED: ["It has not been admitted."],
    Standing.NOT_ADMITTED_AGAIN: ["It has not been admitted again."],
    Standing.POOL_DROPPED: ["Its pool was dropped while it held blocks."],
    Standing.SWAPPED_OUT: ["It is swapped out now."],
    Standing.HOLDS_BLOCKS: ["It holds {blocks} now."],
    Standing.ENDED: [],
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
    text = _effect(event)
    return f"{text[0].upper()}{text[1:]}{_evicted(event)}."


def _effect(event: Event) -> str:
    who, blocks = _who(event), _blocks(event.ranges)
    match event.item:
        case StepItem.ALLOCATE:
            cached = f", {event.cached_tokens} of its tokens were cached" if event.cached_tokens else ""
            return f"{who} began with {blocks}{cached}"
        case StepItem.FORK:
            return f"{who} was forked: both have {blocks}"
        case StepItem.FREE:
            end = _ENDS_OF_SEQUENCES[event.free_reason] if event.free_reason else "ended"
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


# Explanations.


def summary(explanation: Explanation) -> str:
    """Say what happened to a request's blocks and why."""
    sentences = [sentence for finding in explanation.findings for sentence in _sentences(finding)]
    # What happens to a group happens to each of its sequences, and is said once.
    sentences = [sentence for sentence, _ in groupby(sentences)]
    sentences += [text.format(blocks=counted(explanation.blocks, "block")) for text in _STANDINGS[explanation.standing]]
    if explanation.most_blocks:
        sentences.append(f"It held at most {counted(explanation.most_blocks, 'block')}.")
    return " ".join(sentences)


def _sentences(finding: Finding) -> list[str]:
    match finding:
        case Admitted():
            return [_admission(finding), _prefix(finding)]
        case Refusals(events):
            return [_refusals(events)]
        case Victim(event):
            blocks = counted(_number(event.ranges), "block")
            return [f"For it {_owner(event)} was preempted in step {event.step}, which had {blocks}."]
        case Forgotten(event):
            return [f"What came before event {event.number} is no longer kept."]
        case Done(event, served):
            return [_done(event, served)]


def _admission(admitted: Admitted) -> str:
    event, again = admitted.event, " again" if admitted.again else ""
    parts = [f"It was admitted{again} by engine {event.engine_id} in step {event.step}"]
    if admitted.refused_since is not None:
        parts.append(f"{counted(event.step - admitted.refused_since, 'step')} after it was first refused")
    if event.waited_seconds:
        parts.append(f"after a wait of {event.waited_seconds:.3g} seconds")
    return f"{', '.join(parts)}."


def _prefix(admitted: Admitted) -> str:
    admission, evictor = admitted.admission, admitted.evictor
    found = f"{admission.cached_tokens} of its {counted(admission.prompt_tokens, 'prompt token')} were found"
    if admission.missed is None:
        return f"{found}."
    cause = "was not there, and no eviction is known"
    if evictor and evictor.item:
        verb = evictor.item.name.lower()
        cause = f"had been evicted in step {evictor.step} for the {verb} of {_owner(evictor)}"
    return f"{found}: block {admission.hit_blocks + 1} of its prefix {cause}."


def _refusals(events: Sequence[Event]) -> str:
    first, last = events[0], events[-1]
    verb = last.item.name.lower() if last.item else ""
    reason = last.refusal.name.lower() if last.refusal else ""
    when = f"{len(events)} times in steps {first.step} to {last.step}" if len(events) > 1 else f"in step {first.step}"
    return f"Its {verb} was refused as {reason} {when}: {last.detail}."


def _done(event: Event, served: str) -> str:
    if event.item is StepItem.SWAP_OUT:
        return f"It was swapped out to host memory in step {event.step}."
    if event.item is StepItem.SWAP_IN:
        return f"It was swapped back in in step {event.step}."
    if event.free_reason is None or event.free_reason is FreeReason.PREEMPTED:
        whom = f"request {served}" if served else f"group {event.preempted_for_group}"
        return f"It was preempted in step {event.step} for {whom}."
    return f"{_ENDS_OF_REQUESTS[event.free_reason]} in step {event.step}."


def _owner(event: Event) -> str:
    return f"request {event.request_id}" if event.request_id else f"group {event.group}"


# Parts of sentences.


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def verb(number: int, one: str = "was", more: str = "were") -> str:
    """Return the verb that goes with so many."""
    return one if number == 1 else more


def joined(parts: list[str]) -> str:
    """Join parts as in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def listed(blocks: Iterable[int]) -> str:
    """Name blocks by their ids, runs of them by their first and last."""
    ids = list(blocks)
    if len(ids) == 1:
        return f"block {ids[0]}"
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"blocks {joined(named)}"
