#!/usr/bin/env python3
"""Starts the router smg in front of the engines of docker compose; with --check, reports whether it is ready.

smg asks an engine for its model once, when it starts, and serves the model "unknown" if the engine is still loading it.
So all engines must be ready first. It does not follow later ones: restart its container after a change of their number.
"""

import os
import socket
import sys
import time
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

ENGINES, GRPC_PORT, METRICS_PORT = "engine", 50052, 9152
PORT = 30000
_WAIT_SECONDS, _PAUSE_SECONDS, _ANSWER_SECONDS = 1800.0, 1.0, 3.0


def main() -> None:
    """Wait for the engines and become smg, or check it. Exits with 1 if they are not ready in time."""
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if answers("127.0.0.1", PORT, "/readiness") else 1)
    number = int(os.environ.get("QUIRE_ENGINES", "1"))
    workers = ready_engines(number, time.monotonic() + _WAIT_SECONDS)
    if not workers:
        sys.exit(f"fewer than {number} engines were ready within {_WAIT_SECONDS:g} s")
    command = command_of(workers, sys.argv[1:])
    os.execvp(command[0], command)  # noqa: S606 - signals of Docker reach smg itself


def ready_engines(number: int, until: float) -> list[str]:
    """Return the addresses of at least `number` engines when all are ready; none after the time `until`."""
    while time.monotonic() < until:
        found = addresses()
        if len(found) >= number and all(answers(one, METRICS_PORT, "/ready") for one in found):
            return found
        time.sleep(_PAUSE_SECONDS)
    return []


def command_of(engines: list[str], options: list[str]) -> list[str]:
    """Return the command line of smg for engines by their addresses."""
    urls = [f"grpc://{one}:{GRPC_PORT}" for one in engines]
    metrics = ["--prometheus-host", "127.0.0.1", "--history-backend", "none"]
    listen = ["--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104 - of the container
    return ["smg", "launch", *listen, *metrics, *options, "--worker-urls", *urls]


def addresses() -> list[str]:
    """Return the addresses of all containers with the engines' name; none if there is no such name."""
    try:
        found = socket.getaddrinfo(ENGINES, GRPC_PORT, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(place[0]) for *_, place in found})


def answers(host: str, port: int, path: str) -> bool:
    """Return True if a request is answered with status 200 in time."""
    connection = HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    main()
