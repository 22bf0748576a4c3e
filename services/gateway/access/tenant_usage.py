"""What the requests of each tenant use: looked at where it stands, in the generations that are under way."""

from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.gateway.fleet.departures import MOST_TENANTS, SECONDS, Departures
from services.gateway.generation import Generation


@dataclass(frozen=True)
class TenantFigures:
    """One tenant's requests for one model. The kinds of tokens are computed, cached, generated and recomputed.

    `running_tokens` are those of prompts and answers of the requests that an engine has begun: what the tenant would
    hold of the pool if nothing of it were shared.
    """

    model_name: str
    tenant: str
    requests: int
    running: int
    running_tokens: int
    tokens: Counter[str]


class TenantUsage:
    """Counts requests and their tokens by tenant; a caller without a tenant counts under an empty name."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], set[int]] = {}
        self._generations: dict[int, Generation] = {}
        self._requests: Counter[tuple[str, str]] = Counter()
        self._ended: dict[tuple[str, str], Counter[str]] = {}
        self._departures = Departures[tuple[str, str]](SECONDS, most=MOST_TENANTS)

    @contextmanager
    def under_way(self, tenant: str, generation: Generation) -> Iterator[None]:
        """Count a request that an engine was given; meanwhile its tokens are looked at, at its end they are kept."""
        key, number = (generation.model.name, tenant), id(generation)
        self._requests[key] += 1
        self._ended.setdefault(key, Counter())
        self._under_way.setdefault(key, set()).add(number)
        self._generations[number] = generation
        try:
            yield
        finally:
            self._under_way[key].remove(number)
            del self._generations[number]
            self._ended[key] += tokens_by_kind(generation)

    def forget(self, models: Container[str], tenants: Container[str], now: float) -> None:
        """Forget what tenants used that are gone, or models, a while after that. `now` is in seconds."""
        present = {
            (model, tenant)
            for model, tenant in self._requests
            if (model in models and tenant in tenants) or self._under_way[model, tenant]
        }
        for key in self._departures.due(self._requests, present, now):
            del self._requests[key], self._ended[key], self._under_way[key]

    def figures(self) -> list[TenantFigures]:
        """Return how it stands, by model and tenant."""
        return [self._figures(key) for key in self._requests]

    def _figures(self, key: tuple[str, str]) -> TenantFigures:
        running = [self._generations[number] for number in self._under_way[key]]
        tokens = sum((tokens_by_kind(generation) for generation in running), Counter(self._ended[key]))
        used = sum(generation.used_tokens() for generation in running)
        return TenantFigures(*key, self._requests[key], len(running), used, tokens)


def tokens_by_kind(generation: Generation) -> Counter[str]:
    """Return what a request has used so far; no token is of two kinds, but those computed again were so before."""
    generated, cached = generation.generated_tokens, generation.cached_tokens
    return Counter(
        computed=generation.used_tokens() - generated - cached,
        cached=cached,
        generated=generated,
        recomputed=generation.recomputed_tokens,
    )
