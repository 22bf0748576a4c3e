"""`python -m tests.running.scripted_engine`: an engine whose answers follow from its prompts by a script.

Server, scheduler, pool, block manager and constraints are real, so that clients meet what they meet in front of a
model, and no small model's choice. The script is a JSON list of pairs: a text, and the answer to a prompt in which it
stands behind the other texts of the script. So a conversation moves on only with what was sent back.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from bench.loads.null_engine import Nothing, NullParts
from engine.schedule.capacity import Capacity
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Sampled, StepPlan, Work
from services.cli.options import options_of, settings_from
from services.engine.metrics import EngineMetrics
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.runtime.metrics.page import Exposition
from services.runtime.run_service import run_service

START, END, ROLE = "<|im_start|>", "<|im_end|>", "assistant\n"
# As a model's steps take time, streams have many chunks.
_STEP_SECONDS = 0.002
NO_ANSWER = "The script has no answer."

# Messages, thoughts, calls and results in the form of Qwen3, which many models have.
TEMPLATE = r"""
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call functions. Their signatures:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

For each call return the name and the arguments within tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'user' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Script:
    """Answers in the order in which they are written, the tokens of their language, and where prompts are recorded."""

    answers: Sequence[tuple[str, str]]
    tokenizer: Tokenizer
    prompts: Path | None = None

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        end = self.tokenizer.token_to_id(END)
        assert end is not None, "scripted_folder adds it"
        return end

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the answer to a prompt, with the end."""
        text = self._text(prompt)
        places = [(text.rfind(after), len(after), answer) for after, answer in self.answers]
        at, _, answer = max(places, default=(-1, 0, ""))
        return (*self.ids(answer if at >= 0 else NO_ANSWER), self.end)

    def record(self, prompt: Sequence[int]) -> None:
        """Append a prompt to the file of prompts."""
        if self.prompts:
            with self.prompts.open("a") as file:
                file.write(json.dumps(self._text(prompt)) + "\n")

    def _text(self, prompt: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(prompt), skip_special_tokens=False))

    def ids(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


class ScriptedRunner:
    """A model of which K and V are the tokens themselves: it reads its context from the blocks as a model does."""

    def __init__(self, script: Script, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, list[int]] = {}
        self._start = script.tokenizer.token_to_id(START)
        self._role = script.ids(ROLE)
        self._end = script.end
        self._answer = lru_cache(maxsize=64)(script.answer)
        self._record = script.record

    def launch(self, plan: StepPlan) -> Done:
        """Execute the copies, then the work in order."""
        time.sleep(_STEP_SECONDS)
        for copies in plan.copies:
            assert not copies.device_to_host + copies.host_to_device, "the engine has no host tier"
            for copy in copies.device_to_device:
                self._blocks[copy.destination] = list(self._blocks[copy.source])
        return Done([one for work in plan.work for one in self._sampled(work)])

    def _sampled(self, work: Work) -> list[Sampled]:
        for position, token in enumerate(work.token_ids, work.start):
            block = work.block_table[position // self._block_size]
            self._blocks.setdefault(block, [0] * self._block_size)[position % self._block_size] = token
        scored = [Sampled(token, 0.0) for token in work.to_score.token_ids] if work.to_score else []
        if not work.samples:
            return scored
        token = self._next([token for block in work.block_table for token in self._blocks.get(block, ())][: work.end])
        return [*scored, *[Sampled(token, None if work.logprobs is None else 0.0)] * len(work.sample_indices)]

    def _next(self, context: list[int]) -> int:
        """Return the token after a context: the start of an assistant's turn, and what of the answer is written."""
        turn = len(context) - 1 - context[::-1].index(self._start) if self._start in context else len(context)
        begun = min(turn + 1 + len(self._role), len(context))
        if begun == len(context):
            self._record(context)
        answer = self._answer(tuple(context[:begun]))
        return answer[min(len(context) - begun, len(answer) - 1)]


def scripted_folder(source: Path, folder: Path) -> Path:
    """Copy a model's tokenizer to a new folder, with the template of the scripts and its marks; return the folder."""
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def assemble(script: Script, context_tokens: int, settings: EngineSettings) -> NullParts:
    """Build an engine from a folder with a tokenizer."""
    folder = Path(settings.model)
    fingerprint = f"scripted-{TokenizerFiles(folder).digest().hex()[:16]}"
    size = script.tokenizer.get_vocab_size()
    capacity = Capacity(context_tokens, size, settings.block_size, settings.device_blocks)
    loaded = replace(Nothing(fingerprint, size), eos_token_ids=frozenset({script.end}))
    return NullParts(loaded, Scheduler(capacity, settings.limits()), ScriptedRunner(script, settings.block_size))


@click.command()
@options_of(
    EngineSettings,
    leave_out=(
        *("device", "dtype", "attention_backend", "kernels_folder"),
        *("cache_mib", "gpu_memory_utilization", "threads", "host_blocks", "speculate_ngram"),
    ),
    device_blocks=1024,
)
@click.option("--context-tokens", default=8192, show_default=True, help="Tokens of prompt and output.")
@click.option("--script", required=True, help="File with pairs of a text and the answer to a prompt that ends in it.")
@click.option("--prompts", default="", help="File to which each prompt is appended, as a line of JSON.")
@click.option("--metrics-listen", default="127.0.0.1:0", show_default=True, help="Address of the metrics.")
def main(metrics_listen: str, context_tokens: int, script: str, prompts: str, **values: Any) -> None:
    """Start an engine that answers by a script. --model is a folder with a tokenizer."""
    settings = settings_from(EngineSettings, values)
    metrics = EngineMetrics(settings.metrics_compat)
    tokenizer = Tokenizer.from_file(str(Path(settings.model) / "tokenizer.json"))
    written = Script(json.loads(Path(script).read_text()), tokenizer, Path(prompts) if prompts else None)

    def make() -> EngineService:
        return EngineService(settings, metrics, partial(assemble, written, context_tokens))

    exposition = Exposition(metrics.registry, metrics_listen, compat=settings.metrics_compat)
    sys.exit(run_service("engine", settings, exposition, lambda: make))


if __name__ == "__main__":
    main()
