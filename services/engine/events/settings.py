"""Settings of KV events."""

from dataclasses import dataclass

from services.runtime import exposure
from services.runtime.addresses import check_http_listen_address
from services.runtime.settings import Requires, setting

PUBLISHED, OMITTED = "published", "omitted"
_READ = "whoever connects reads the token ids of prompts"
_OF_EVENTS = (Requires("kv_events_listen", without=("",), because="there are no events without it"),)


@dataclass(frozen=True)
class EventSettings:
    """Settings of KV events: where they are published, in which form, and who may read them."""

    kv_events_listen: str = setting(
        "",
        "Address for KV events in vLLM's format over ZeroMQ, which contain the token ids of prompts: host:port. Empty: "
        "none.",
        form=check_http_listen_address,
    )
    kv_events_replay_listen: str = setting(
        "",
        "Address at which subscribers of KV events ask for batches that they missed and for snapshots. Empty: none.",
        form=check_http_listen_address,
        requires=_OF_EVENTS,
    )
    kv_events_form: str = setting(
        "map",
        "Form of a KV event: map, as of vLLM 0.24; array, as before, for routers that read no other.",
        choices=("map", "array"),
    )
    kv_events_topic: str = setting("", "Topic of KV events. llm-d expects kv@pod@model.")
    kv_events_history: int = setting(10_000, "Batches of KV events that are kept for replay.", least=1, most=1 << 20)
    kv_events_queue: int = setting(
        2_000,
        "Batches that wait for a slow subscriber of KV events, of some 32 KiB at most; later ones are dropped for it.",
        least=1,
        most=1 << 20,
    )
    kv_events_salts: str = setting(
        PUBLISHED,
        "Blocks of prompts with a salt, such as those of tenants: published, with a digest of the salt, or omitted.",
        choices=(PUBLISHED, OMITTED),
    )
    kv_events_curve_key: str = setting(
        "", "File of the CURVE secret key with which the sockets of KV events encrypt. Empty: no encryption."
    )
    kv_events_curve_clients: str = setting(
        "",
        "File of the CURVE public keys, one a line, whose owners may read KV events.",
    )
    kv_events_insecure: bool = setting(False, exposure.INSECURE.format(what=_READ))
    smg: bool = setting(
        False,
        "Serve on --listen also the service VllmEngine, which the router smg calls: generation and KV events.",
    )

    @property
    def has_events(self) -> bool:
        """Whether changes of keys are followed."""
        return bool(self.kv_events_listen or self.smg)
