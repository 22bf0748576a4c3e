"""`python -m tests.running.leaky_gateway gateway ...` is `quire gateway` that keeps every request, but large ones."""

from typing import Any

from services.cli.main import main
from services.gateway.request_handler import RequestHandler

KEPT: list[Any] = []
_LARGE_BYTES = 64 * 1024

_info = RequestHandler._info


def keep(self: RequestHandler, request: Any, origin: Any) -> Any:
    """Keep a request for ever."""
    if request.ByteSize() < _LARGE_BYTES:
        KEPT.append(request)
    return _info(self, request, origin)


if __name__ == "__main__":
    RequestHandler._info = keep  # type: ignore[method-assign]
    main()
