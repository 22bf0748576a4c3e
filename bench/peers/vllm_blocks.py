"""The cost of block management in vLLM: its KVCacheManager in process, prefix caching on, with its defaults.

Runs in a Python interpreter with vLLM and without Quire; its first line of input is the workload of `bench kv` as JSON.
Prints its name and terms, then figures for each further line.
"""

import gc
import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

LONGEST = 1 << 20
MICRO = 1e6


class Blocks:
    """A pool that allocates blocks in random order, as after long use."""

    def __init__(self, pool_blocks, block_size):
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        config = KVCacheConfig(pool_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # block 0 is a placeholder
        self.manager = KVCacheManager(config, LONGEST, scheduler_block_size=block_size, hash_block_size=block_size)
        pool = self.manager.block_pool
        order = pool.get_new_blocks(pool_blocks)
        random.Random(2).shuffle(order)
        pool.free_blocks(order)
        self._hasher = get_request_block_hasher(block_size, sha256)
        gc.freeze()  # as vLLM does once its engine runs

    def begin(self, request):
        """Look a prompt up, allocate all of it, and key its full blocks."""
        self._hash(request)
        found, found_tokens, _ = self.manager.get_computed_blocks(request)
        new_tokens = request.num_tokens - found_tokens
        assert self.manager.allocate_slots(request, new_tokens, found_tokens, found) is not None

    def extend(self, requests):
        """Allocate one more token for each request, and key the blocks that are full with it."""
        self.manager.new_step_starts()
        for request in requests:
            self._hash(request)
            assert self.manager.allocate_slots(request, 1) is not None

    def _hash(self, request):
        # As a Request with a hasher does for each token, so that times include the hashing but not the appending.
        request.block_hashes.extend(self._hasher(request))


def main(workload):
    init_none_hash(sha256)
    # It computes nothing: types of numbers are not stated, and one thread does all.
    print(json.dumps({"name": f"vLLM {vllm.__version__}", "terms": {"threads": 1}}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"decode_us_per_sequence": decode(workload), **prefill(workload)}), flush=True)
    os._exit(0)  # without the leak reports of some libraries


def decode(workload):
    """Return microseconds per sequence and step of a batch that decodes; blocks fill up evenly over time."""
    draw = random.Random(1)
    size, steps = workload["block_size"], workload["steps"]
    requests = [new_request(draw, number, 2 * size + number % size) for number in range(workload["sequences"])]
    blocks = Blocks(workload["pool_blocks"], size)
    for request in requests:
        blocks.begin(request)
        request.status = RequestStatus.RUNNING
    step(draw, blocks, requests)
    return sum(step(draw, blocks, requests) for _ in range(steps)) / steps / len(requests) * MICRO


def step(draw, blocks, requests):
    """Extend each request by one token; return the seconds of its block management."""
    for request in requests:
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(draw.randrange(49_000))
    return timed(lambda: blocks.extend(requests))


def prefill(workload):
    """Return microseconds per block to allocate and key an uncached prompt, and to free it; the first is a warm-up."""
    size, count = workload["block_size"], workload["prefill_blocks"]
    blocks = Blocks(workload["pool_blocks"], size)
    begin, free = [], []
    for number in range(1 + workload["prompts"]):
        request = new_request(random.Random(3 + number), number, count * size + 1)
        begin.append(timed(lambda: blocks.begin(request)))  # noqa: B023
        free.append(timed(lambda: blocks.manager.free(request)))  # noqa: B023
    blocks_in_all = count * workload["prompts"]
    return {
        "prefill_us_per_block": sum(begin[1:]) / blocks_in_all * MICRO,
        "free_us_per_block": sum(free[1:]) / blocks_in_all * MICRO,
    }


def new_request(draw, number, prompt_tokens):
    prompt = [draw.randrange(49_000) for _ in range(prompt_tokens)]
    return Request(f"r{number}", prompt, SamplingParams(max_tokens=LONGEST), pooling_params=None)


def timed(work):
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(json.loads(sys.stdin.readline()))
