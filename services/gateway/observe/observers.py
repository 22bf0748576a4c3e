"""Several observers as one. What one of them raises reaches neither the request nor the other observers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.gateway.observe.observer import GatewayObserver, RequestInfo, RequestObserver

_MOST_CHARACTERS = 200  # of what an observer raises

log = logging.getLogger("quire.gateway")

Kind = TypeVar("Kind", bound=type)


def _passing_on(kind: Kind) -> Kind:
    """Have a class pass each call of a method that it inherits on to its observers."""
    inherited = [name for one in kind.__mro__[1:-1] for name in vars(one) if not name.startswith("_")]
    for name in inherited:
        if name not in vars(kind):
            setattr(kind, name, _passed_on(name))
    return kind


def _passed_on(name: str) -> Callable[..., None]:
    def pass_on(self: "GatewayObservers | RequestObservers", *arguments: Any, **named: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, name)(*arguments, **named)
            except Exception as error:
                self.failures.add(observer, name, error)

    return pass_on


class ObserverFailures:
    """Logs what observers raise, once for each method: some are called for every token."""

    def __init__(self) -> None:
        self._logged: set[tuple[type, str]] = set()

    def add(self, observer: object, method: str, error: Exception) -> None:
        """Log it, unless the like was logged."""
        key = (type(observer), method)
        if key not in self._logged:
            self._logged.add(key)
            what = f"{type(observer).__name__}.{method} raised {type(error).__name__}: {error}"
            log.error("an observer failed, which is logged once: %.*s", _MOST_CHARACTERS, what)


@_passing_on
class RequestObservers(RequestObserver):
    """The observers of one request."""

    def __init__(self, observers: Sequence[RequestObserver], failures: ObserverFailures) -> None:
        self.observers = observers
        self.failures = failures


@_passing_on
class GatewayObservers(GatewayObserver):
    """The observers of a gateway."""

    def __init__(self, *observers: GatewayObserver) -> None:
        self.observers = observers
        self.failures = ObserverFailures()

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """Return the observers of one request; one that raises here is not among them."""
        found = []
        for observer in self.observers:
            try:
                found.append(observer.on_request(request))
            except Exception as error:
                self.failures.add(observer, "on_request", error)
        return RequestObservers(found, self.failures)
