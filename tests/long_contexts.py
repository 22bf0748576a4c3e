"""Requests with long contexts: their block tables and events at the KV manager, and the reference of their tokens."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from quire.v1 import decoding_pb2, gateway_pb2, kvmanager_pb2
from tests.dense_model import dense_folder
from tests.faults import Streams, prompt
from tests.reference import NEAR_TIE
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.scrape import Scrape

# Of a wait for a prompt of 100,000 tokens.
LONG_SECONDS = 600.0

Request = gateway_pb2.GenerateRequest
Event = kvmanager_pb2.Event


class LongStreams(Streams):
    """Concurrent generations with long prompts."""

    def __init__(self, quire: RunningQuire, *requests: Request) -> None:
        """Start them."""
        super().__init__(quire.gateway, requests, LONG_SECONDS)

    def wait_for_tokens_of_each(self, count: int) -> None:
        """Wait until each stream has received this many tokens."""
        self._wait(lambda: all(len(answer.token_ids) >= count for answer in self.answers))

    @property
    def received(self) -> list[int]:
        """Number of tokens that each stream has received."""
        return [len(answer.token_ids) for answer in self.answers]


def named(request_id: str, length: int, max_tokens: int, *, slow: bool = False, priority: int = 0) -> Request:
    """Build a greedy request with a random prompt, always the same for an id, that does not end before `max_tokens`."""
    request = prompt(int.from_bytes(request_id.encode()), length, max_tokens, slow=slow)
    request.request_id = request_id
    request.priority = priority
    return request


def tokens_of(request: Request) -> list[int]:
    return list(request.prompt.token_ids.ids)


# The KV manager's view.


def tables(quire: RunningQuire) -> dict[str, kvmanager_pb2.SequenceInfo]:
    """Return the live sequences by request id, all of one moment."""
    answer = quire.kvmanager.ListSequences(kvmanager_pb2.ListSequencesRequest(), timeout=CALL_SECONDS)
    assert not answer.next_page_token
    return {sequence.request_id: sequence for sequence in answer.sequences}


def events_of(quire: RunningQuire, request_id: str) -> list[Event]:
    """Return all events of a request so far, oldest first."""
    return list(
        quire.kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=request_id), timeout=CALL_SECONDS).events
    )


def watch(quire: RunningQuire, request_id: str) -> Iterator[Event]:
    """Yield the events of a request as they happen, up to the one that frees it."""
    call = quire.kvmanager.WatchEvents(kvmanager_pb2.WatchEventsRequest(), timeout=LONG_SECONDS)
    try:
        for response in call:
            assert response.HasField("event"), "the watch is too slow"
            if response.event.request_id == request_id:
                yield response.event
                if response.event.item == kvmanager_pb2.STEP_ITEM_FREE:
                    return
    finally:
        call.cancel()


def wait_for_extensions(quire: RunningQuire, request_id: str, count: int) -> None:
    """Wait until a prompt in prefill has grown this many times."""
    grown = (event for event in watch(quire, request_id) if event.item == kvmanager_pb2.STEP_ITEM_EXTEND)
    assert len(list(islice(grown, count))) == count


def of_item(events: Sequence[Event], *items: int) -> list[Event]:
    return [event for event in events if event.item in items]


def granted(events: Sequence[Event]) -> list[Event]:
    """Select the events that added blocks to a table: its allocation first."""
    grants = of_item(events, kvmanager_pb2.STEP_ITEM_ALLOCATE, kvmanager_pb2.STEP_ITEM_EXTEND)
    found = [event for event in grants if not event.refusal]
    assert found[0].item == kvmanager_pb2.STEP_ITEM_ALLOCATE
    return found


def ids(event: Event) -> list[int]:
    """List the blocks of an event."""
    ranges = zip(event.range_firsts, event.range_lasts, strict=True)
    return [block for first, last in ranges for block in range(first, last + 1)]


class EngineCounts(NamedTuple):
    """Executed steps, the sequences planned in all of them, and the generated tokens, of one moment."""

    steps: int
    planned: int
    tokens: int

    @classmethod
    def of(cls, quire: RunningQuire) -> "EngineCounts":
        page = Scrape.of(quire.metrics_urls["engine"])
        names = ("quire_step_seconds_count", "quire_num_sequences_planned_total", "quire_generation_tokens_total")
        return cls(*(int(page.value(name)) for name in names))

    def since(self, earlier: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(now - before for now, before in zip(self, earlier, strict=True)))


# The reference.


def near_ties(folder: Path, tokens: Sequence[int], answers: Sequence[range]) -> int:
    """Check that the tokens at the places of all answers are the likeliest after those before, and count near ties.

    One forward pass of transformers over all tokens; its attention never has a matrix of all scores.
    """
    count, places = 0, [place for answer in answers for place in answer]
    for place, row in zip(places, _logits(folder, tuple(tokens), tuple(places)), strict=True):
        gap = float(row.max() - row[tokens[place]])
        assert gap < NEAR_TIE, f"of {len(tokens)} tokens, that at {place} is {gap} below the likeliest"
        count += int(row.argmax()) != tokens[place]
    return count


def largest_error(
    folder: Path, tokens: Sequence[int], answer: range, logprobs: Sequence[decoding_pb2.TokenLogprobs]
) -> float:
    """Return the largest difference of an answer's log-probabilities from the reference's."""
    rows = _logits(folder, tuple(tokens), tuple(answer)).double().log_softmax(dim=-1)
    expected = rows.gather(-1, torch.tensor(tokens[answer.start : answer.stop])[:, None])[:, 0]
    return float((torch.tensor([one.logprob for one in logprobs]) - expected).abs().max())


def greedy_choices(folder: Path, tokens: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the likeliest token at each place after the tokens before it."""
    return [int(row.argmax()) for row in _logits(folder, tuple(tokens), tuple(places))]


@lru_cache(maxsize=1)
def _logits(folder: Path, tokens: tuple[int, ...], places: tuple[int, ...]) -> torch.Tensor:
    """Return logits `[places, vocabulary]` of the token at each place."""
    kept = torch.tensor(places) - 1
    with torch.inference_mode():
        rows: torch.Tensor = _model(folder)(torch.tensor([tokens]), use_cache=False, logits_to_keep=kept).logits[0]
    return rows


@cache
def _model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        dense_folder(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()
