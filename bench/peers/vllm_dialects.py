"""What vLLM's parsers of calls and thoughts find in whole outputs, as its server calls them when it does not stream.

Runs in a Python interpreter with vLLM and without Quire; its first line of input has tools and texts as JSON. Prints
its name, then what it finds in all texts for each further line. The tokenizers have the bytes and the marks of a
dialect as tokens, because some parsers look marks up.
"""

import json
import logging
import os
import sys

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

logging.disable(logging.CRITICAL)  # broken outputs are expected, and each would log a traceback


def main():
    given = json.loads(sys.stdin.readline())
    print(json.dumps({"name": f"vLLM {vllm.__version__}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"texts": [found(text, given["tools"]) for text in given["texts"]]}), flush=True)


def found(text, tools):
    """Return thought, content and calls. An error of the parser has no answer: its server reports it."""
    try:
        thought, content, calls = parsed(text, tools)
    except Exception as error:
        return {"thought": None, "content": None, "calls": [], "error": f"{type(error).__name__}: {error}"}
    return {"thought": thought, "content": content, "calls": [[one.name, one.arguments] for one in calls or ()]}


def parsed(text, tools):
    thinks = text["thoughts"] is not None
    variables = {"thinking": thinks, "enable_thinking": thinks}
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "Hello."}],
        model="any",
        tools=tools,
        tool_choice="auto",
        chat_template_kwargs=variables,
    )
    tokenizer = tokenizer_of(text["marks"], text["tokens"])
    kind = ParserManager.get_parser(
        tool_parser_name=text["calls"],
        reasoning_parser_name=text["thoughts"],
        enable_auto_tools=True,
    )
    parser = kind(tokenizer, request.tools, chat_template_kwargs=variables)
    request = parser.adjust_request(request)
    ids = tokenizer.encode(text["text"], add_special_tokens=False)
    return parser.parse(text["text"], request, enable_auto_tools=True, model_output_token_ids=ids)


def tokenizer_of(marks, tokens):
    """Return a tokenizer of bytes and marks. `tokens` are in its vocabulary only: nothing merges into them."""
    known = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *tokens])
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(known)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(marks)
    return PreTrainedTokenizerFast(tokenizer_object=made)


if __name__ == "__main__":
    main()
