"""The story of a scenario: what happened in the order of time, for people."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from simulation.network.connections import Arrival, Status
from simulation.scenario import Scenario
from simulation.simulation import Simulation, violation_of
from simulation.universe import Universe

_LONGEST_MESSAGE = 300
# Messages that come again and again, or at each start.
_BESIDE_THE_STORY = ("Serve: heartbeat", "GetEngine", "GetTokenizer")
# A field of numbers that is repeated, and bytes.
_REPEATED = re.compile(r"\b(\w+: )(-?\d+)((?: \1-?\d+)+)")
_BYTES = re.compile(r'"(?:[^"\\]|\\.){17,}"')


def story_of(scenario: Scenario, folder: Path, *, whole: bool = False) -> list[str]:
    """Run a scenario again, and return its events as lines; the last one is its violation, if any.

    `whole`: messages are not shortened.
    """
    simulation = Simulation(scenario, folder)
    universe = simulation.universe
    universe.network.on_arrival = lambda arrival: _note(universe, arrival, whole=whole)
    violation = violation_of(simulation)
    if violation is not None:
        universe.note("violation", str(violation))
    return [f"{event.at:10.6f}  {event.process:10}  {event.words}" for event in universe.story]


def _note(universe: Universe, arrival: Arrival, *, whole: bool) -> None:
    words = words_of(arrival, whole=whole)
    if not any(one in words for one in _BESIDE_THE_STORY):
        universe.note(arrival.receiver, words)


def words_of(arrival: Arrival, *, whole: bool = False) -> str:
    """Describe a message that arrives or is lost, with at most 300 characters of it unless `whole`."""
    message, method = arrival.message, arrival.path.rpartition("/")[2]
    begin = f"<- {arrival.sender}  {'lost: ' if arrival.lost else ''}{method}"
    if isinstance(message, Status):
        return f"{begin} ends: {message.code.name} {message.details}"
    if message is None:
        return f"{begin}: half-closed"
    text = _text(_message_class(arrival.path, is_response=arrival.is_response).FromString(message))
    if not whole:
        text = shortened(text)
    return f"{begin}: {text}"


def shortened(text: str) -> str:
    """Return a message without the names of repeated numbers, without the middle of long bytes, and without its end."""
    text = _REPEATED.sub(lambda found: f"{found[1]}{found[2]}{found[3].replace(' ' + found[1], ' ')}", text)
    text = _BYTES.sub(lambda found: f'{found[0][:9]}.."', text)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _text(message: Message) -> str:
    """Return a message on one line."""
    return " ".join(str(message).split()) or type(message).__name__


@cache
def _message_class(path: str, *, is_response: bool) -> Any:
    service, _, method = path.strip("/").partition("/")
    described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
    return message_factory.GetMessageClass(described.output_type if is_response else described.input_type)
