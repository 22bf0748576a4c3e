"""Random requests that share prefixes, and the keys of all blocks that they can leave behind.

Prompts are paths in a tree: each next block of tokens is one of a few. Answers are the token that an engine without a
model always generates.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import grpc

from blocks import block_keys, root_key
from quire.v1 import gateway_pb2, gateway_pb2_grpc

BLOCK_SIZE = 16
ANSWER_TOKEN = 100
SALTS = ("", "", "", "", "tenant-a", "tenant-b")
_TREES = 24
_CHOICES = (0, 0, 0, 1)  # of branches
_MOST_BLOCKS = 16
_MOST_ANSWER = 128
_DEADLINES = (0.02, 60.0)
_CUT_SHORT = 0.05


@dataclass(frozen=True)
class PrefixRequest:
    """A request: `token_ids` of the prompt, tokens of the answer, samples, and seconds until it is cut short."""

    number: int
    token_ids: "array[int]"
    salt: str
    max_tokens: int
    samples: int
    seconds: float

    def keys(self, fingerprint: str, resets: int) -> Iterator[bytes]:
        """Yield the keys of its blocks, each the parent of the next, if it began after this many resets."""
        root = root_key(fingerprint, self.salt.encode(), resets)
        answer = array("i", [ANSWER_TOKEN] * self.max_tokens)
        return block_keys(root, self.token_ids + answer, BLOCK_SIZE)

    def message(self) -> gateway_pb2.GenerateRequest:
        request = gateway_pb2.GenerateRequest()
        request.prompt.token_ids.ids.extend(self.token_ids)
        request.cache.salt = self.salt
        request.stopping.max_tokens = self.max_tokens
        request.sampling.sample_count = self.samples
        return request


def prefix_request(number: int, seed: int) -> PrefixRequest:
    """Return a request that depends only on its number and the seed."""
    draw = random.Random(f"{seed} {number}")
    tree, blocks = min(draw.randrange(_TREES), draw.randrange(_TREES)), draw.randint(1, _MOST_BLOCKS)
    path = (draw.choice(_CHOICES) for _ in range(blocks))
    tokens = chain.from_iterable(_tokens(tree, depth, branch) for depth, branch in enumerate(path))
    token_ids = array("i", tokens)[: -draw.randrange(BLOCK_SIZE) or None]
    samples = 2 if draw.random() < 0.1 else 1
    seconds = _DEADLINES[draw.random() >= _CUT_SHORT]
    return PrefixRequest(number, token_ids, draw.choice(SALTS), draw.randint(1, _MOST_ANSWER), samples, seconds)


def _tokens(tree: int, depth: int, branch: int) -> range:
    first = 1000 + ((tree * _MOST_BLOCKS + depth) * 2 + branch) * BLOCK_SIZE
    return range(first, first + BLOCK_SIZE)


def run(stub: gateway_pb2_grpc.GatewayStub, requests: Iterable[PrefixRequest], concurrency: int) -> Counter[str]:
    """Run requests, `concurrency` at a time, and return their numbers by status."""
    with ThreadPoolExecutor(concurrency) as clients:
        return Counter(clients.map(lambda one: _status(stub, one), requests))


def _status(stub: gateway_pb2_grpc.GatewayStub, request: PrefixRequest) -> str:
    try:
        for _ in stub.Generate(request.message(), timeout=request.seconds):
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def reachable(
    requests: Iterable[PrefixRequest], fingerprint: str, resets: int, present: dict[str, set[bytes]]
) -> dict[str, set[bytes]]:
    """Return the keys of each tier that a prompt can reach: before which none is missing in both tiers."""
    found: dict[str, set[bytes]] = {tier: set() for tier in present}
    anywhere = set().union(*present.values())
    for request in requests:
        for key in request.keys(fingerprint, resets):
            if key not in anywhere:
                break
            for tier, keys in present.items():
                if key in keys:
                    found[tier].add(key)
    return found
