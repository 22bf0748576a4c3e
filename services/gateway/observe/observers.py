"""Combines observers. An exception in one reaches neither the request nor the other observers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.gateway.observe.observer import GatewayObserver, RequestInfo, RequestObserver

_MAX_LOGGED_CHARACTERS = 200

log = logging.getLogger("quire.gateway")

Kind = TypeVar("Kind", bound=type)


def _forwarding(kind: Kind) -> Kind:
    """Override each inherited method of a class to call the same method of its observers."""
    inherited = [name for one in kind.__mro__[1:-1] for name in vars(one) if not name.startswith("_")]
    for name in inherited:
        if name not in vars(kind):
            setattr(kind, name, _forwarded(name))
    return kind


def _forwarded(name: str) -> Callable[..., None]:
    def forward(self: "GatewayObservers | RequestObservers", *arguments: Any, **named: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, name)(*arguments, **named)
            except Exception as error:
                self.failures.add(observer, name, error)

    return forward


class ObserverFailures:
    """Logs exceptions of observers, once for each method, because some methods are called for every token."""

    def __init__(self) -> None:
        self._logged: set[tuple[type, str]] = set()

    def add(self, observer: object, method: str, error: Exception) -> None:
        """Log the first exception of a method."""
        key = (type(observer), method)
        if key not in self._logged:
            self._logged.add(key)
            what = f"{type(observer).__name__}.{method} raised {type(error).__name__}: {error}"
            log.error("an observer failed (logged once): %.*s", _MAX_LOGGED_CHARACTERS, what)


def _ignores_tokens(observer: RequestObserver) -> bool:
    return getattr(observer.on_tokens, "__func__", None) is RequestObserver.on_tokens


@_forwarding
class RequestObservers(RequestObserver):
    """The observers of one request."""

    def __init__(self, observers: Sequence[RequestObserver], failures: ObserverFailures) -> None:
        self.observers = observers
        self.failures = failures
        self._token_observers = [one for one in observers if not _ignores_tokens(one)]

    def on_tokens(self, sample: int, count: int, now: float) -> None:
        """Forward only to observers of tokens, because it is called for every token."""
        for observer in self._token_observers:
            try:
                observer.on_tokens(sample, count, now)
            except Exception as error:
                self.failures.add(observer, "on_tokens", error)


@_forwarding
class GatewayObservers(GatewayObserver):
    """The observers of a gateway."""

    def __init__(self, *observers: GatewayObserver) -> None:
        self.observers = observers
        self.failures = ObserverFailures()

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """Return the observers of one request, without those that raise here."""
        observers = []
        for observer in self.observers:
            try:
                observers.append(observer.on_request(request))
            except Exception as error:
                self.failures.add(observer, "on_request", error)
        return RequestObservers(observers, self.failures)
