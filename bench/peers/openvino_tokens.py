"""Tokens per second of openvino-genai's continuous batching on the CPU, without prefix caching.

Runs in a Python interpreter with openvino-genai and without Quire; its first line of input is workloads as JSON, such
as those of `bench cpu`. Its argument is a folder with the model as exported by optimum-cli, whose weights may have 8 or
4 bits. Activations and KV cache are in bfloat16, with a second argument `defaults` as openvino chooses. Prints its name
and terms, then figures for each further line.
"""

import json
import os
import sys
import time
from math import prod
from pathlib import Path

import numpy
import openvino
import openvino_genai as genai

CORES = len(os.sched_getaffinity(0))
BFLOAT16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "int8", "i8": "int8", "u4": "int4", "i4": "int4"}


def main():
    workloads = json.loads(sys.stdin.readline())
    folder, chosen = sys.argv[1], sys.argv[2:]
    properties = ({} if chosen == ["defaults"] else BFLOAT16) | {"INFERENCE_NUM_THREADS": CORES}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 1, 2048, False
    stated = terms(Path(folder), properties)
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    print(json.dumps({"name": f"openvino-genai {genai.__version__}", "terms": stated}), flush=True)
    for line in sys.stdin:
        print(json.dumps(seconds(pipeline, workloads[line.strip()])), flush=True)


def terms(folder, properties):
    """Return what the model has when it is compiled with these properties, as the pipeline compiles it."""
    core = openvino.Core()
    model = core.read_model(folder / "openvino_model.xml")
    sizes = {}
    for one in model.get_ops():
        if one.get_type_name() == "Constant":
            kind = one.get_output_element_type(0).get_type_name()
            sizes[kind] = sizes.get(kind, 0) + prod(one.get_output_shape(0))
    stored = NAMES[max(sizes, key=sizes.get)]
    compiled = core.compile_model(model, "CPU", properties)
    computed = NAMES[compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()]
    coded = stored.startswith("int")
    # Rows are rounded to 8 bits for products with weights of as many or fewer, unless this is 0.
    rounds = coded and compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")
    return {
        "weights": stored if coded else computed,
        "activations": "int8" if rounds else computed,
        "kv_cache": NAMES[compiled.get_property("KV_CACHE_PRECISION").get_type_name()],
        "threads": compiled.get_property("INFERENCE_NUM_THREADS"),
        "processes": 1,
    }


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
