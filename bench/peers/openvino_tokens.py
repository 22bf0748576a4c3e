"""Tokens per second of openvino-genai's continuous batching on the CPU, without prefix caching.

In bfloat16, or in float32 if it is kept to AVX2. Runs in a Python interpreter with openvino-genai and without Quire;
its first line of input is workloads as JSON, such as those of `bench cpu`. Its argument, or OPENVINO_MODEL, is a folder
with the model as exported by optimum-cli, whose weights may have 8 or 4 bits. Prints its name, then figures for each
further line.
"""

import json
import os
import sys
import time

import numpy
import openvino
import openvino_genai as genai


def main():
    workloads = json.loads(sys.stdin.readline())
    scheduler = genai.SchedulerConfig()
    model = sys.argv[1] if len(sys.argv) > 1 else os.environ["OPENVINO_MODEL"]
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 1, 2048, False
    # It has no products in bfloat16 for AVX2.
    dtype = "f32" if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" else "bf16"
    properties = {"INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    print(json.dumps({"name": f"openvino-genai {genai.__version__}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(seconds(pipeline, workloads[line.strip()])), flush=True)


def seconds(pipeline, work):
    prompts = [openvino.Tensor(numpy.array([item["prompt"]], dtype=numpy.int64)) for item in work]
    configs = []
    for item in work:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = item["tokens"], True, False
        configs.append(config)
    begun = time.perf_counter()
    answers = pipeline.generate(prompts, configs)
    spent = time.perf_counter() - begun
    assert sum(len(answer.m_generation_ids[0]) for answer in answers) == sum(item["tokens"] for item in work)
    return {"seconds": spent}


if __name__ == "__main__":
    main()
