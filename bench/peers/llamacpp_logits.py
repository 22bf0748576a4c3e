"""Logits of llama.cpp for each token of a text, to compare perplexities.

Runs in a Python interpreter with xllamacpp and without Quire; its argument is a .gguf file, and its first line of input
is JSON with the name of a file. Each further line is a text as JSON, a list of token ids: it writes the logits of all
places to the file, as float32 `[tokens, vocabulary]`, and prints the sizes.

The module's servers return log-probabilities of whole characters only, so it calls the functions of llama.h in the
module's library. Structures that llama.h passes by value are opaque; the members that it sets are checked first.
"""

import ctypes
import json
import os
import sys
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_void_p
from pathlib import Path

import xllamacpp

CHUNK = 256
CORES = len(os.sched_getaffinity(0))
# Of a file with 4 bits: rows are rounded to 8 bits for products, and the KV cache has its default type.
TERMS = {"weights": "int4", "activations": "int8", "kv_cache": "float16", "threads": CORES, "processes": 1}
# The first members of llama_context_params: n_ctx, n_batch and n_ubatch; then threads.
DEFAULTS, THREADS = [512, 2048, 512], slice(7, 9)


class Parameters(ctypes.Structure):
    """llama_model_params or llama_context_params, with room for further members."""

    _fields_ = [("words", c_int32 * 256)]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embeddings", c_void_p),
        ("position", POINTER(c_int32)),
        ("sequence_count", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
FUNCTIONS = {
    "llama_log_set": (None, [LOG, c_void_p]),
    "llama_model_default_params": (Parameters, []),
    "llama_context_default_params": (Parameters, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Parameters]),
    "llama_init_from_model": (c_void_p, [c_void_p, Parameters]),
    "llama_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits": (c_void_p, [c_void_p]),
}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints to the standard output
    file = Path(json.loads(sys.stdin.readline())["file"])
    library = ctypes.CDLL(next(Path(xllamacpp.__file__).parent.glob("*.so")))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    quiet = LOG(lambda *_: None)
    library.llama_log_set(quiet, None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(sys.argv[1].encode(), library.llama_model_default_params())
    assert model, "the file is not a model"
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    announced = {"name": f"llama.cpp (xllamacpp {xllamacpp.__version__})", "terms": TERMS}
    print(json.dumps(announced), file=answers, flush=True)
    for line in sys.stdin:
        tokens = json.loads(line)
        write_logits(library, model, vocabulary, tokens, file)
        print(json.dumps({"tokens": len(tokens), "vocabulary": vocabulary}), file=answers, flush=True)


def write_logits(library, model, vocabulary, tokens, file):
    parameters = library.llama_context_default_params()
    assert parameters.words[:3] == DEFAULTS, "llama_context_params has another layout"
    parameters.words[0] = max(len(tokens), DEFAULTS[0])
    parameters.words[THREADS] = [CORES] * 2
    context = library.llama_init_from_model(model, parameters)
    assert context, "no context"
    batch = library.llama_batch_init(CHUNK, 0, 1)
    with file.open("wb") as out:
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            batch.tokens = len(part)
            for place, token in enumerate(part):
                batch.token[place], batch.position[place] = token, begin + place
                batch.sequence_count[place], batch.logits[place] = 1, 1
                batch.sequence[place][0] = 0
            assert library.llama_decode(context, batch) == 0, "llama_decode failed"
            size = len(part) * vocabulary * ctypes.sizeof(c_float)
            out.write((ctypes.c_char * size).from_address(library.llama_get_logits(context)))
    library.llama_free(context)


if __name__ == "__main__":
    main()
