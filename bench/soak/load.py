"""The client processes of a soak: one that stays, and one that is killed in each round."""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

_WORKERS = 4


class Client:
    """A client process."""

    def __init__(self, addresses: list[str], urls: list[str], mix: str, seed: int) -> None:
        command = [sys.executable, "-m", "bench.soak.client", ",".join(addresses), ",".join(urls)]
        self._process = subprocess.Popen(
            [*command, mix, str(seed), str(_WORKERS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self) -> None:
        """Begin to send requests."""
        self._say("run")

    def rest(self) -> dict[str, Any]:
        """Wait for the ends of its requests, and return their counts."""
        self._say("rest")
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


class Load:
    """Both clients, and the counts of their requests."""

    def __init__(self, addresses: list[str], urls: list[str], mix: str) -> None:
        """`mix` is the name of one of `bench.soak.requests`."""
        self._addresses, self._urls, self._mix = addresses, urls, mix
        self.started = self.killed = 0
        self.counts: dict[str, Counter[str]] = {}
        self.unexpected: list[str] = []
        self._clients = [self._client() for _ in range(2)]

    def run(self) -> None:
        """Begin to send requests."""
        for one in self._clients:
            one.run()

    def rest(self) -> None:
        """Wait for the ends of all requests, and add their counts."""
        for answer in [one.rest() for one in self._clients]:
            for kind, status, count in answer["counts"]:
                self.counts.setdefault(kind, Counter())[status] += count
            self.unexpected += answer["unexpected"]

    def kill_one(self) -> None:
        """Kill a client in the middle of its requests, and start another one."""
        self._clients.pop().kill()
        self.killed += 1
        self._clients.append(self._client())
        self._clients[-1].run()

    def close(self) -> None:
        for one in self._clients:
            one.kill()

    @property
    def requests(self) -> int:
        """Number of requests that ended, without those of killed clients."""
        return sum(sum(counts.values()) for counts in self.counts.values())

    def _client(self) -> Client:
        self.started += 1
        return Client(self._addresses, self._urls, self._mix, self.started)
