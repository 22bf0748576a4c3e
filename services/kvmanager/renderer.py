"""Renders events, and the explanation of a request, as English sentences."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from blocks import CondemnReason, FreeReason, StepItem, counted
from kvmanager import Event, Explanation, PoolChange
from kvmanager.history.explanation import (
    Admitted,
    CondemnedBlocks,
    Finding,
    HistoryTruncated,
    LeftWindow,
    Refusals,
    RequestStatus,
    StateChange,
    Victim,
)

# If gateways require API keys, the request ids of engines are tenant/id.
_TENANT_PREFIX = re.compile(r"\b([Rr]equest) [A-Za-z0-9._-]{1,64}/(?=\S)")
_MAX_RANGES = 4

_EFFECTS = {
    StepItem.COMMIT: "{sequence} committed {blocks} to the prefix cache",
    StepItem.SWAP_OUT: "{sequence} was swapped out to host memory: {blocks}",
    StepItem.SWAP_IN: "{sequence} was swapped in from host memory: {blocks}",
    StepItem.EXTEND: "{sequence} was granted {blocks}",
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
_OPERATIONS = {
    StepItem.ALLOCATE: "allocation",
    StepItem.EXTEND: "extension",
    StepItem.SWAP_OUT: "swap-out",
    StepItem.SWAP_IN: "swap-in",
}
_STATUSES = {
    RequestStatus.NEVER_ADMITTED: ["It has not been scheduled: it still waits, or it ended without blocks."],
    RequestStatus.NOT_ADMITTED_AGAIN: ["It has not been scheduled again: it still waits, or it ended without blocks."],
    RequestStatus.POOL_DROPPED: ["Its pool was dropped while it held blocks."],
    RequestStatus.SWAPPED_OUT: ["It is swapped out."],
    RequestStatus.HOLDS_BLOCKS: ["It holds {blocks} now."],
    RequestStatus.ENDED: [],
}
_FAULTS = {
    CondemnReason.ADOPTION: "checksum differs after adoption",
    CondemnReason.SWAP_IN: "checksum differs after swap in",
    CondemnReason.HOST_HIT: "checksum differs after a hit in the host tier",
    CondemnReason.HIT: "checksum differs at a hit",
    CondemnReason.COPY: "a copy failed",
    CondemnReason.RECOMPUTATION: "contents differ from recomputation",
}
_CHANGES = {
    PoolChange.ATTACHED: "The engine attached its pool.",
    PoolChange.DETACHED: "The pool was dropped.",
    PoolChange.WITHHELD: "The audit withheld {blocks}.",
    PoolChange.HOST_WITHHELD: "The audit withheld {blocks} of the host tier.",
}


def request_name(request_id: str) -> str:
    """Return a request id without its tenant prefix."""
    return request_id.partition("/")[2] or request_id


def without_tenants(text: str) -> str:
    """Return an explanation without the tenant prefixes of its request ids."""
    return _TENANT_PREFIX.sub(r"\1 ", text)


def event_json(event: Event) -> dict[str, Any]:
    """Return an event for the page: number, step, text, the request's name in it, and sequence (0 if none)."""
    name = request_name(event.request_id)
    return {
        "event": event.number,
        "step": event.step,
        "sequence": event.sequence,
        "request": name,
        "text": sentence(event),
    }


def sentence(event: Event) -> str:
    """Return the sentence for an event."""
    if event.change:
        return _CHANGES[event.change].format(blocks=_blocks(event))
    if event.refusal:
        owner = f" of {_sequence(event)}" if event.sequence or event.group else ""
        return f"The {_operation(event)}{owner} was refused: {event.detail}."
    return f"{_capitalized(_effect(event))}{_evicted(event)}."


def _effect(event: Event) -> str:
    sequence, blocks = _sequence(event), _blocks(event)
    match event.item:
        case StepItem.CONDEMN:
            return _condemned(event, f", found by {sequence}" if event.sequence else "")
        case StepItem.ALLOCATE:
            cached = f", with {counted(event.cached_tokens, 'cached token')}" if event.cached_tokens else ""
            return f"{sequence} was allocated {blocks}{cached}"
        case StepItem.FORK:
            return f"{sequence} was forked: both sequences share {blocks}"
        case StepItem.FREE:
            end = _ENDS_OF_SEQUENCES[event.free_reason] if event.free_reason else "ended"
            return f"{sequence} {end} and released {blocks}"
        case StepItem.PIN:
            return _pin_change(event, sequence, blocks)
        case StepItem.TRIM:
            return f"{blocks} left the window of {sequence}"
        case StepItem.COMMIT | StepItem.SWAP_OUT | StepItem.SWAP_IN | StepItem.EXTEND:
            return _EFFECTS[event.item].format(sequence=sequence, blocks=blocks)
        case _:
            return f"{sequence}: {blocks}"


def _condemned(event: Event, how: str) -> str:
    tier = " of the host tier" if event.host else ""
    fault = _FAULTS[event.condemn_reason] if event.condemn_reason else "contents are wrong"
    return f"{_blocks(event)}{tier} {verb(_count(event.ranges))} condemned{how}: {fault}"


def _pin_change(event: Event, sequence: str, blocks: str) -> str:
    if not event.ranges:
        return "the prefix cache was reset"
    pinned = verb(_count(event.ranges))
    return f"{blocks} of {sequence} {pinned} pinned" if event.sequence else f"{blocks} {pinned} unpinned"


def _sequence(event: Event) -> str:
    name = f"sequence {event.sequence}" if event.sequence else f"group {event.group}"
    request = request_name(event.request_id)
    return f"{name} ({request})" if request else name


def _evicted(event: Event) -> str:
    if not event.evicted:
        return ""
    evicted = len(event.evicted)
    return f"; {counted(evicted, 'cached block')} {verb(evicted)} evicted for it"


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _blocks(event: Event) -> str:
    blocks = _in_ranges(event.ranges)
    return f"{blocks} of kind {event.kind}" if event.kind else blocks


def _in_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    if not ranges:
        return "no blocks"
    count = _count(ranges)
    if count == 1:
        return f"block {ranges[0][0]}"
    listed = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    others = len(ranges) - _MAX_RANGES
    more = f" and {counted(others, 'more range')}" if others > 0 else ""
    return f"{count} blocks ({', '.join(listed)}{more})"


# Explanations.


def summary(explanation: Explanation) -> str:
    """Return the explanation of a request as text."""
    sentences = [sentence for finding in explanation.findings for sentence in _sentences(finding)]
    # Events of a group repeat for each of its sequences; the sentence is written once.
    sentences = [sentence for sentence, _ in groupby(sentences)]
    windows = explanation.windows
    held = _held(explanation.blocks, [(one.kind, one.blocks) for one in windows])
    sentences += [text.format(blocks=held) for text in _STATUSES[explanation.status]]
    if explanation.max_blocks:
        most = _held(explanation.max_blocks, [(one.kind, one.max_blocks) for one in windows])
        sentences.append(f"It held at most {most}.")
    return " ".join(sentences)


def _held(blocks: int, in_windows: Sequence[tuple[str, int]]) -> str:
    """Describe held blocks, as in "38 blocks of the layers that keep all tokens, 9 of kind window-64"."""
    if not in_windows:
        return counted(blocks, "block")
    own = f"{counted(blocks, 'block')} of the layers that keep all tokens"
    return f"{own}, {joined([f'{count} of kind {kind}' for kind, count in in_windows])}"


def _sentences(finding: Finding) -> list[str]:
    match finding:
        case Admitted():
            return [_admission(finding), _prefix(finding)]
        case Refusals(events):
            return [_refusals(events)]
        case Victim(event):
            text = f"{_owner(event)} was preempted for it in step {event.step}"
            return [f"{_capitalized(text)} and released {counted(_count(event.ranges), 'block')}."]
        case LeftWindow():
            return [_left_window(finding)]
        case CondemnedBlocks(event):
            return [f"{_capitalized(_condemned(event, f' in step {event.step}'))}."]
        case HistoryTruncated(event):
            return [f"Events before number {event.number} are no longer kept."]
        case StateChange():
            return [_state_change(finding)]


def _admission(admitted: Admitted) -> str:
    event, again = admitted.event, " again" if admitted.again else ""
    parts = [f"It was scheduled{again} by engine {event.engine_id} in step {event.step}"]
    if admitted.refused_since is not None:
        parts.append(f"{counted(event.step - admitted.refused_since, 'step')} after it was first refused")
    if event.waited_seconds:
        parts.append(f"queued for {event.waited_seconds:.3g} seconds")
    if event.prefix_of:
        parts.append(f"while request {event.prefix_of} computed their common prefix")
    return f"{', '.join(parts)}."


def _prefix(admitted: Admitted) -> str:
    admission = admitted.admission
    cached, tokens = admission.cached_tokens, admission.prompt_tokens
    found = f"{cached} of its {counted(tokens, 'token')} {verb(1 if tokens == 1 else cached)} cached"
    if admission.outlived_blocks:
        found += f", {counted(admission.outlived_blocks, 'block')} of them from before the engine's last start"
    if admission.missed is None:
        return f"{found}."
    return f"{found}: {_missed_in_window(admitted) if admission.missed_kind else _missed_in_all(admitted)}."


def _missed_in_all(admitted: Admitted) -> str:
    cause = _eviction(admitted.evictor) or "not cached, and no eviction is recorded"
    return f"logical block {admitted.admission.hit_blocks} was {cause}"


def _missed_in_window(admitted: Admitted) -> str:
    tokens, kind = admitted.admission.found_tokens, admitted.missed_kind
    # The block may have been computed again after its eviction, and have lost its key when it left the window.
    eviction = _eviction(admitted.evictor)
    reason = f"; one of them was last {eviction}" if eviction else " (--retention-tokens keeps more of them)"
    return (
        f"{counted(tokens, 'token')} {verb(tokens)} cached in the layers that keep all tokens, "
        f"but blocks of kind {kind} that the next token needs were not{reason}"
    )


def _eviction(evictor: Event | None) -> str:
    if evictor is None or not evictor.item:
        return ""
    return f"evicted in step {evictor.step} for the {_operation(evictor)} of {_owner(evictor)}"


def _refusals(events: Sequence[Event]) -> str:
    first, last = events[0], events[-1]
    reason = last.refusal.name.lower() if last.refusal else ""
    when = f"{len(events)} times in steps {first.step} to {last.step}" if len(events) > 1 else f"in step {first.step}"
    return f"Its {_operation(last)} was refused as {reason} {when}: {last.detail}."


def _left_window(left: LeftWindow) -> str:
    """Name the tokens, as in "Its tokens 0 to 527 left the window of kind window-64 in step 90 (33 blocks)."."""
    (first, last), (begin, end) = left.steps, left.tokens
    steps = f"in steps {first} to {last}" if first < last else f"in step {last}"
    blocks = counted(left.entries, "block")
    if left.sequences > 1:
        blocks = f"{left.entries} table entries of {left.sequences} sequences"
    return f"Its tokens {begin} to {end} left the window of kind {left.kind} {steps} ({blocks})."


def _state_change(change: StateChange) -> str:
    event, preempted_for, swapped_since = change
    if event.item is StepItem.SWAP_OUT:
        return f"It was swapped out to host memory in step {event.step}."
    if event.item is StepItem.SWAP_IN:
        waited = f", {counted(event.step - swapped_since, 'step')} after that" if swapped_since is not None else ""
        return f"It was swapped in from host memory in step {event.step}{waited}."
    if event.free_reason is None or event.free_reason is FreeReason.PREEMPTED:
        if not event.preempted_for_group:
            return f"It was preempted in step {event.step}, because it held condemned blocks."
        other = f"request {preempted_for}" if preempted_for else f"group {event.preempted_for_group}"
        return f"It was preempted in step {event.step} for {other}."
    return f"{_ENDS_OF_REQUESTS[event.free_reason]} in step {event.step}."


def _operation(event: Event) -> str:
    return _OPERATIONS.get(event.item, event.item.name.lower()) if event.item else "operation"


def _owner(event: Event) -> str:
    return f"request {event.request_id}" if event.request_id else f"group {event.group}"


# Parts of sentences.


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def verb(count: int, singular: str = "was", plural: str = "were") -> str:
    """Return the verb form for a count."""
    return singular if count == 1 else plural


def joined(parts: list[str]) -> str:
    """Join parts with commas and a final "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def listed(blocks: Iterable[int]) -> str:
    """Return blocks by their ids, with ranges for consecutive ids."""
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
