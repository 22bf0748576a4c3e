"""Tokens per second of llama.cpp's server on the CPU, with continuous batching and without prefix caching.

Runs in a Python interpreter with xllamacpp and without Quire; its argument is a .gguf file, whose weights stay as they
are, and its first line of input is workloads as JSON. A workload has a server of its own, with a slot for each request
that fits the longest. Prints its name and terms, then figures for each further
line.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

F16 = 1  # of ggml_type
THREADS = len(os.sched_getaffinity(0))
# Of a file with 4 bits: rows are rounded to 8 bits for products, and the KV cache has its default type.
TERMS = {"weights": "int4", "activations": "int8", "kv_cache": "float16", "threads": THREADS, "processes": 1}
MARGIN = 64  # tokens of a slot beyond the longest request


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints to the standard output
    workloads, servers = json.loads(sys.stdin.readline()), {}
    announced = {"name": f"llama.cpp (xllamacpp {xllamacpp.__version__})", "terms": TERMS}
    print(json.dumps(announced), file=answers, flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name not in servers:
            servers[name] = server_for(workloads[name])
        print(json.dumps(seconds(servers[name], workloads[name])), file=answers, flush=True)
    os._exit(0)  # its servers end slowly


def server_for(work):
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    longest = max(len(item["prompt"]) + item["tokens"] for item in work)
    params.n_parallel, params.n_ctx = len(work), len(work) * (longest + MARGIN)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    assert params.cache_type_k == params.cache_type_v == F16, "the default type of the KV cache has changed"
    params.verbosity = 0
    return xllamacpp.Server(params)


def seconds(server, work):
    def complete(item):
        options = {"n_predict": item["tokens"], "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        answer = server.handle_completions({"prompt": item["prompt"], **options})
        return answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(work)) as pool:
        begun = time.perf_counter()
        generated = sum(pool.map(complete, work))
        spent = time.perf_counter() - begun
    assert generated == sum(item["tokens"] for item in work)
    return {"seconds": spent}


if __name__ == "__main__":
    main()
