"""The pairs of parsers that read the same outputs, by the names that Quire and vLLM have for them."""

import re
from typing import NamedTuple

from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.dialects.selection import DialectSelection

# A mark of a dialect that a tokenizer of its models has as one token.
_MARK = re.compile(r"<\|?[^<>=\"]+\|?>|\[[A-Z_]+\]")


# `</think>` in pieces, of which the first may have a space before it.
_OLMO = ("Ġ</", "</", "think", ">")


class Profile(NamedTuple):
    """A form of calls and one of thoughts, which a server of either program is started with.

    `name` is Quire's of the calls, except where two parsers of vLLM read one form. `opens`: the models' templates begin
    the thought, so that the output begins within it. `tokens` are others than marks that a parser of vLLM looks up.
    """

    name: str
    quire_calls: str
    vllm_calls: str
    thoughts: str
    opens: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def dialect(self) -> Dialect:
        """What Quire reads with."""
        return DialectSelection(self.quire_calls, self.thoughts).applied_to(Dialect())

    @property
    def calls(self) -> CallFormat:
        """How calls are written."""
        calls = self.dialect.calls
        assert calls is not None, "every profile has calls"
        return calls

    @property
    def thought(self) -> ThoughtFormat:
        """How thoughts are written."""
        thought = self.dialect.thought
        assert thought is not None, "every profile has thoughts"
        return thought

    @property
    def marks(self) -> list[str]:
        """The texts that a tokenizer of such a model has as one token each."""
        calls, thought = self.calls, self.thought
        written = calls.section([calls.form.written(WrittenCall("f", '{"k": "v"}', ""))])
        found = [*calls.openings, calls.closing, *calls.prefixes, thought.start, thought.end, *_MARK.findall(written)]
        return sorted({mark for mark in found if mark and " " not in mark})


PROFILES = (
    Profile("qwen3-coder", "qwen3_coder", "qwen3_coder", "qwen3"),
    Profile("glm", "glm47", "glm47", "glm47", opens=True),
    Profile("glm, poolside_v1", "poolside_v1", "poolside_v1", "poolside_v1", tokens=("<assistant>",)),
    Profile("hermes", "hermes", "hermes", "qwen3"),
    Profile("hermes, granite4", "granite4", "granite4", "deepseek_r1", opens=True),
    Profile("granite", "granite", "granite", "granite"),
    Profile("seed", "seed_oss", "seed_oss", "seed_oss"),
    Profile("minimax-m2", "minimax_m2", "minimax_m2", "minimax_m2", opens=True),
    Profile("deepseek-v3", "deepseek_v3", "deepseek_v3", "deepseek_r1", opens=True),
    Profile("deepseek-v3.1", "deepseek_v31", "deepseek_v31", "deepseek_v3", opens=True),
    Profile("deepseek-v3.2", "deepseek_v32", "deepseek_v32", "deepseek_v3", opens=True),
    Profile("deepseek-v4", "deepseek_v4", "deepseek_v4", "deepseek_v4", opens=True),
    Profile("kimi-k2", "kimi_k2", "kimi_k2", "kimi_k2"),
    Profile("mistral", "mistral", "mistral", "mistral"),
    Profile("mistral-list", "mistral-list", "mistral", "deepseek_r1"),
    Profile("gemma4", "gemma4", "gemma4", "gemma4"),
    Profile("functiongemma", "functiongemma", "functiongemma", "deepseek_r1"),
    Profile("phi4", "phi4_mini_json", "phi4_mini_json", "deepseek_r1"),
    Profile("cohere", "cohere_command3", "cohere_command3", "cohere_command3"),
    Profile("tool-calls", "jamba", "jamba", "deepseek_r1"),
    Profile("internlm", "internlm", "internlm", "deepseek_r1"),
    Profile("lfm2", "lfm2", "lfm2", "deepseek_r1"),
    Profile("olmo3", "olmo3", "olmo3", "olmo3", tokens=_OLMO),
    Profile("llama3", "llama3_json", "llama3_json", "deepseek_r1", opens=True),
    Profile("pythonic", "pythonic", "pythonic", "deepseek_r1"),
)
"""Harmony is not among them: vLLM's parser of it reads tokens, by a vocabulary that it downloads."""
