"""Settings of KV events, and what their sockets count."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.runtime import exposure
from services.runtime.addresses import check_http_listen_address
from services.runtime.settings import InvalidSetting, Requires, setting

PUBLISHED, OMITTED = "published", "omitted"
START, ZERO = "start", "zero"
_READ = "whoever connects reads the token ids of prompts"
_LISTENING = ("kv_events_listen", "kv_events_replay_listen")
_OF_EVENTS = (Requires("kv_events_listen", without=("",), because="there are no events without it"),)


class PublisherStats(NamedTuple):
    """What the sockets of KV events count.

    `overflows` counts how often a subscriber did not read until its queue was full: it misses what comes next, and
    ZeroMQ does not say how much. `connections`, `refused` and `ended` are by socket, events or replay; those that sent
    too much were ended. `requests` are those of replays by outcome, `replayed` the batches in answers.
    """

    overflows: int
    connections: Mapping[str, int]
    refused: Mapping[str, int]
    ended: Mapping[str, int]
    requests: Mapping[str, int]
    replayed: int


@dataclass(frozen=True)
class EventSettings:
    """Settings of KV events: where they are published, in which form, and who may read them."""

    kv_events_listen: str = setting(
        "",
        "Address to publish KV events at, in vLLM's format over ZeroMQ: host:port. They contain the token ids of "
        "prompts. Empty: none.",
        form=check_http_listen_address,
    )
    kv_events_replay_listen: str = setting(
        "",
        "Address where subscribers of KV events request missed batches and snapshots: host:port. Empty: none.",
        form=check_http_listen_address,
        requires=_OF_EVENTS,
    )
    kv_events_form: str = setting(
        "map",
        "Form of a KV event. map: as in vLLM since 0.24; array: as in older ones, for routers that read only that.",
        choices=("map", "array"),
    )
    kv_events_numbers: str = setting(
        START,
        "First sequence number of KV events. start: the time of the process's start, so that numbers never go back; "
        "zero: as in vLLM, for llm-d's replaySocketPort and vllm-router, which take only consecutive numbers.",
        choices=(START, ZERO),
        requires=(Requires("smg", among=(False,), because="smg continues behind numbers of an earlier process"),),
    )
    kv_events_topic: str = setting("", "Topic of KV events. llm-d expects kv@POD@MODEL, kthena kv-events.")
    kv_events_history: int = setting(
        10_000,
        "Batches of KV events that are kept for replay, with 131,072 blocks at most. A subscriber that missed an "
        "earlier one gets a snapshot.",
        least=64,
        most=1 << 20,
    )
    kv_events_queue: int = setting(
        2_000,
        "Maximum batches of KV events, of about 32 KiB at most, that wait for a slow subscriber; it misses later ones.",
        least=1,
        most=1 << 20,
    )
    kv_events_salts: str = setting(
        PUBLISHED,
        "Blocks of prompts with a salt, such as those of tenants. published: with a digest of the salt; omitted.",
        choices=(PUBLISHED, OMITTED),
    )
    kv_events_curve_key: str = setting(
        "",
        "File of the CURVE secret key that encrypts the sockets of KV events; `quire key curve` makes one. Empty: no "
        "encryption.",
        requires=_OF_EVENTS,
    )
    kv_events_curve_clients: str = setting(
        "",
        "File of the CURVE public keys, one a line, whose owners may read KV events. Empty: anyone.",
        requires=(Requires("kv_events_curve_key", without=("",), because="clients are known by their keys"),),
    )
    kv_events_insecure: bool = setting(
        False, f"Publish KV events on addresses that other machines can reach, although {_READ}."
    )
    smg: bool = setting(
        False,
        "Serve also the service VllmEngine, which the router smg calls at the engine's address: generation and KV "
        "events, which contain the token ids of prompts.",
    )

    @property
    def has_events(self) -> bool:
        """Whether changes of keys are followed."""
        return bool(self.kv_events_listen or self.smg)

    def check_event_addresses(self) -> None:
        """Raise InvalidSetting if the addresses are equal, or a topic cannot be sent."""
        first, second = self.kv_events_listen, self.kv_events_replay_listen
        if first and first == second and not first.endswith(":0"):
            raise InvalidSetting(f"kv_events_replay_listen must differ from kv_events_listen, not be {second}")
        if not self.kv_events_topic.isprintable():
            raise InvalidSetting(f"kv_events_topic must be printable text, not {self.kv_events_topic!r}")

    def check_event_exposure(self) -> None:
        """Raise InvalidSetting if other machines could read KV events without a key."""
        exposure.check_addresses(self, _LISTENING, "kv_events_curve_clients", "kv_events_insecure", _READ)
        if self.smg:
            exposure.check_addresses(self, ("listen",), "tls_client_ca", "kv_events_insecure", _READ)
