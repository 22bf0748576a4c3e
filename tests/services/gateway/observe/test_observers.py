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


@pytest.mark.parametrize(
    ("kind", "method"), [(kind, method) for kind in (GatewayObserver, RequestObserver) for method in methods(kind)]
)
def test_an_exception_in_an_observer_is_only_logged_once(
    kind: type, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    observers, requests = (GatewayObserver(), GatewayObserver()), (RequestObserver(), RequestObserver())
    targets = observers if kind is GatewayObserver else requests
    raising, other = Calls(targets[0], method, ValueError("secret" * 100)), Calls(targets[1], method)
    combined: Any = GatewayObservers(*observers)
    if kind is RequestObserver:
        for observer, request in zip(observers, requests, strict=True):
            observer.on_request = lambda _, request=request: request  # type: ignore[method-assign, misc]
        combined = combined.on_request(INFO)
    arguments: tuple[object, ...] = (0, 1, 2.0) if method == "on_tokens" else (INFO,)
    for _ in range(3):
        getattr(combined, method)(*arguments)
    assert raising.seen == other.seen == [arguments] * 3
    (message,) = [one.getMessage() for one in caplog.records]
    assert f"(logged once): {kind.__name__}.{method} raised ValueError: secretsecret" in message
    assert len(message) < 300
