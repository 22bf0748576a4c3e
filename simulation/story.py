"""The story of a scenario: what happened in the order of time, for people."""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from simulation.invariants.violation import Violation
from simulation.network.connections import Arrival, Status
from simulation.scenario import Scenario
from simulation.simulation import Simulation
from simulation.universe import Universe

_LONGEST_MESSAGE = 110
# Messages that come again and again, or at each start.
_BESIDE_THE_STORY = ("Serve: heartbeat", "GetEngine", "GetTokenizer")


def story_of(scenario: Scenario, folder: Path) -> list[str]:
    """Run a scenario again, and return its events as lines; the last one is its violation, if any."""
    simulation = Simulation(scenario, folder)
    universe = simulation.universe
    universe.network.on_arrival = lambda arrival: _note(universe, arrival)
    violation = None
    try:
        simulation.run()
    except Violation as found:
        violation = found
    lines = [f"{event.at:10.6f}  {event.process:10}  {event.words}" for event in universe.story]
    return [*lines, f"violation: {violation}"] if violation else lines


def _note(universe: Universe, arrival: Arrival) -> None:
    words = words_of(arrival)
    if not any(one in words for one in _BESIDE_THE_STORY):
        universe.note(arrival.receiver, words)


def words_of(arrival: Arrival) -> str:
    """Describe a message that arrives, in at most 110 characters beside its sender and method."""
    message, method = arrival.message, arrival.path.rpartition("/")[2]
    if isinstance(message, Status):
        return f"<- {arrival.sender}  {method} ends: {message.code.name} {message.details}"
    if message is None:
        return f"<- {arrival.sender}  {method}: half-closed"
    text = _text(_message_class(arrival.path, is_response=arrival.is_response).FromString(message))
    shortened = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."
    return f"<- {arrival.sender}  {method}: {shortened}"


def _text(message: Message) -> str:
    """Return a message on one line."""
    return " ".join(str(message).split()) or type(message).__name__


@cache
def _message_class(path: str, *, is_response: bool) -> Any:
    service, _, method = path.strip("/").partition("/")
    described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
    return message_factory.GetMessageClass(described.output_type if is_response else described.input_type)
