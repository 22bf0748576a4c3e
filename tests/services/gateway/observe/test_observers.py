from typing import Any

import pytest

from services.gateway.access.callers import DEFAULT_ORIGIN
from services.gateway.observe.observer import GatewayObserver, RequestInfo, RequestObserver
from services.gateway.observe.observers import GatewayObservers

INFO = RequestInfo("r", "m", DEFAULT_ORIGIN, 0.0)


def methods(kind: type) -> list[str]:
    return [name for one in kind.__mro__[:-1] for name in vars(one) if not name.startswith("_")]


class Calls:
    """Collects the calls of one method of an observer, and raises `error` at each if given."""

    def __init__(self, observer: object, method: str, error: Exception | None = None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._error = error
        setattr(observer, method, self._call)

    def _call(self, *arguments: Any, **_: Any) -> RequestObserver:
        self.seen.append(arguments)
        if self._error is not None:
            raise self._error
        return RequestObserver()


@pytest.mark.parametrize("method", methods(GatewayObserver))
def test_an_exception_in_a_gateway_observer_is_only_logged(method: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second = GatewayObserver(), GatewayObserver()
    raising, other = Calls(first, method, ValueError("secret" * 100)), Calls(second, method)
    observers = GatewayObservers(first, second)
    for _ in range(3):
        getattr(observers, method)(INFO)
    assert raising.seen == other.seen == [(INFO,)] * 3
    (message,) = [one.getMessage() for one in caplog.records]
    assert f"GatewayObserver.{method} raised ValueError: secretsecret" in message
    assert len(message) < 300


@pytest.mark.parametrize("method", methods(RequestObserver))
def test_an_exception_in_a_request_observer_is_only_logged(method: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = GatewayObserver(), GatewayObserver()
    requests = RequestObserver(), RequestObserver()
    raising, other = Calls(requests[0], method, ValueError("wrong")), Calls(requests[1], method)
    for kind, request in zip(kinds, requests, strict=True):
        kind.on_request = lambda _, request=request: request  # type: ignore[method-assign, misc]
    observers = GatewayObservers(*kinds)
    for _ in range(3):
        getattr(observers.on_request(INFO), method)(1)
    assert raising.seen == other.seen == [(1,)] * 3
    assert [one.getMessage() for one in caplog.records] == [
        f"an observer failed (logged once): RequestObserver.{method} raised ValueError: wrong"
    ]
