"""Pages are short, and their links, pictures, files, metrics, settings, classes and messages exist.

Commands are checked by tests/test_documented_commands.py.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from tests import code_index
from tests.code_index import ROOT
from tests.documented_commands import PAGES, PROGRAMS

DECISIONS = ROOT / "docs" / "decisions"
IMAGES = ROOT / "docs" / "images"
MAX_LINES = {
    "README.md": 140,
    "docs/alerts.md": 320,
    "helm/quire/README.md": 400,
}  # the second is generated, a row for each value
MAX_LINES_OF_A_DECISION = 40
METRICS = ROOT / "docs" / "metrics.md"

_FENCE = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_PATH = re.compile(
    r"[\w.*-]*(?:/[\w.*-]+)+/?(?:::\w+)*|[\w-]+\.(?:py|md|toml|sh|yml|yaml|json|jsonl|proto|tpl|txt|env|png|svg|h|cpp)"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_DOTTED = re.compile(r"\w+(?:\.\w+)+(?::[\w.]+)?(?:\(\))?|\w+:\w[\w.]*\w")


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Quote:
    """A text in backticks and its place."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: `{self.text}`"


@cache
def prose(page: Path) -> str:
    """The text without blocks and comments, with the same line numbers."""
    return _without(_without(page.read_text(), _FENCE), _COMMENT)


def _without(text: str, part: re.Pattern[str]) -> str:
    return part.sub(lambda match: "\n" * match[0].count("\n"), text)


@cache
def quotes(page: Path) -> list[Quote]:
    text = prose(page)
    return [
        Quote(page, text.count("\n", 0, match.start()) + 1, " ".join(match[1].split()))
        for match in _SPAN.finditer(text)
    ]


def anchors(page: Path) -> set[str]:
    """The ids of headings, as GitHub makes them, and of HTML anchors."""
    text = _FENCE.sub("", page.read_text())
    found: dict[str, int] = {}
    names = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return names


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def links(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the place, the text and the target of each relative link."""
    text = prose(page)
    for match in _LINK.finditer(text):
        if not re.match(r"[a-z]+:", match[3]):
            yield f"{page.relative_to(ROOT)}:{line_of(text, match.start())}", match[2], unquote(match[3])


# Quotes that the tree does not define, by the reason why they may stay.
FOREIGN: dict[str, set[str]] = {
    "stands for a name that the reader has": {
        *("tenant/id", "org/name", "/var/cache/quire/my-model", "FILE.2", "ID-0", "ID-1", "quire.py"),
        *(
            "docs/images/bench-NAME.png",
            "bench/results/CLASS/NAME.json",
            "tls_*",
            "link_*",
            "--cap-\N{HORIZONTAL ELLIPSIS}",
        ),
        *("--max-\N{HORIZONTAL ELLIPSIS}", "quant_config.json", "api_keys.toml", "deploy/compose/api_keys/on.toml"),
    },
    "is made by installing, by a run on a GPU, or fetched for a benchmark": {
        *(".venv/bin/python", "bench/results/gpu/gpu.json", "newstest2014_en.txt", "wikitext2_valid.txt"),
    },
    "belongs to Kubernetes, Docker or Helm": {
        *("Recreate", "maxSurge: 0", "up --wait", "--wait", "device_ids"),
        *("--reuse-values", "--reset-then-reuse-values", "kubernetes.io/hostname", "node.kubernetes.io/not-ready"),
    },
    "belongs to a router of another stack, which the sentence names": {
        *("kv_aware", "power_of_two", "FlushCache", "--worker-warmup-secs 0", "--worker-warmup-divert-every 0"),
        *("--max-concurrent-requests", "--queue-size", "--prometheus-host", "--client-cert-path", "--client-key-path"),
        *("--ca-cert-paths", "Authorization"),
        *("--model-server-metrics-port", "--model-server-metrics-port=9152", "replaySocketPort"),
        *("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"),
        *("inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2"),
    },
    "belongs to a library, which the sentence names": {
        *("UnknownFieldSet", "make_asgi_app", "StreamingResponse", "QueueListener", "/docs", "/openapi.json"),
        *(
            "HF_ENDPOINT",
            "AttentionInterface",
            "AttentionInterface.register",
            "use_sliding_window",
            "max_window_layers",
        ),
        *("OTEL_RESOURCE_ATTRIBUTES", "OTEL_BSP_*", "OTEL_EXPORTER_OTLP_*"),
    },
    "belongs to a client, which the section of docs/clients.md names": {
        *("ContextOverflowError", "ContextWindowExceededError", "ModelSettings(include_usage=True)", "ThinkingPart"),
        *("hosted_vllm/", "anthropic/", "litellm.anthropic.messages", 'provider_details["raw_content"]'),
        *("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ChatOpenAI", "ChatAnthropic"),
        *("use_responses_api=True", "stream_usage=True", "ToolCallingAgent", "set_tracing_disabled(True)"),
        *("OPENAI_AGENTS_DISABLE_TRACING=1", "api_key_name"),
        *("client.beta.messages.tool_runner", "extra-openai-models.yaml", "model_id", "model_name"),
        *("api_base: http://127.0.0.1:8000/v1", "supports_tools", "supports_schema", "generateText", "streamText"),
        *("createOpenAICompatible", "supportsStructuredOutputs", "includeUsage", 'createOpenAI(...)("MODEL")'),
        *("providerOptions", "createAnthropic", "openai: { store: false }", ".chat", "config.toml", "env_key"),
    },
    "is a file of a model's folder": {
        *("config.json", "generation_config.json", "tokenizer.json", "adapter_config.json"),
    },
    "belongs to vLLM": {
        *(
            "vllm bench serve",
            "engine_sleep_state",
            "lora_requests_info",
            "spec_decode_num_accepted_tokens_per_pos",
            "mm_cache_queries",
            "ModelConfig.get_diff_sampling_param",
            "get_max_tokens",
        ),
        *("mm_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits", "external_kv_transfer"),
        *("prompt_tokens_recomputed", "num_requests_swapped", "cpu_cache_usage_perc", "corrupted_requests"),
        *("estimated_flops_*", "--max-num-batched-tokens", "--max-num-seqs", "--gpu-memory-utilization"),
        *(
            "--num-gpu-blocks-override",
            "--swap-space",
            "--disable-hybrid-kv-cache-manager",
            "--scheduling-policy",
            "--served-model-name",
        ),
        *(
            "--max-model-len",
            "--speculative-config",
            "--tensor-parallel-size",
            "--otlp-traces-endpoint",
            "--kv-cache-memory-bytes",
            "--kv-cache-dtype",
        ),
    },
    "is a program or message of the operating system": {
        *("kill -USR1 PID", "kill PID", "openssl x509 -enddate -noout -in FILE", "NVRM: Xid", "$XDG_RUNTIME_DIR"),
        *("mv", "cp"),
        "/etc/quire/tls",
    },
    "is a path that prometheus_client serves": {"/metrics"},
    "is a file of a model": {
        *("generation_config.json", "config.json"),
        *("tokenizer.json", "tokenizer.model", "vocab.json", "added_tokens.json", "special_tokens_map.json"),
        *("tokenizer_config.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/NAME.jinja"),
    },
    "is a formula or an operation of the paper": {
        *("2 x layers x KV heads x head size x bytes of an element", "RESERVE(seq, len)", "ASSIGN(seq, pos, K, V)"),
        "GATHER(seq, len)",
    },
}
_ALLOWED = frozenset[str]().union(*FOREIGN.values())


def is_value(text: str) -> bool:
    """Return True for a value of JSON, a placeholder or signs."""
    if not re.search(r"[A-Za-z]{2}", text) or re.fullmatch(r"[A-Z]+|\d\S*", text):
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return text not in ("true", "false")


def is_command(text: str) -> bool:
    words = [word for word in text.split() if not re.match(r"[A-Z_]+=", word)]
    return len(words) > 1 and words[0].removeprefix(".venv/bin/") in PROGRAMS


def wrong_path(text: str) -> str | None:
    """Check a path from any folder, with an optional test."""
    path, *tests = text.rstrip("/").split("::")
    path = path.removeprefix("./")
    if "*" in path:
        pattern = re.compile(re.escape(path).replace(r"\*", r"[^/]*"))
        return None if any(pattern.fullmatch(one) for one in code_index.tracked()) else "no file has this name"
    found = [one for one in code_index.tracked() if one == path or one.endswith(f"/{path}")]
    if not found:
        return "no file has this name"
    if tests and not any(re.search(rf"\b{tests[-1]}\b", (ROOT / one).read_text()) for one in found):
        return f"no test of that file is called {tests[-1]}"
    return None


def wrong_test(text: str) -> str | None:
    return None if text in code_index.tests() or text in code_index.words() else "no test has this name"


def wrong_script(text: str) -> str | None:
    path, _, rest = text.partition(" ")
    return wrong_path(path) or wrong_words(rest)


def wrong_flags(text: str) -> str | None:
    for flag in _FLAG.findall(text):
        if flag not in code_index.options():
            return f"no command has the option {flag}"
    for flag, value in pairwise(text.split()):
        choices = {
            choice
            for option in code_index.options().get(flag, ())
            if isinstance(option.type, click.Choice)
            for choice in option.type.choices
        }
        if choices and not value.isupper() and value not in choices:
            return f"{flag} has no choice {value}"
    return None


def wrong_variables(text: str) -> str | None:
    """Check environment variables, values of enums, and constants."""
    known = code_index.variables() | code_index.words() | {"ARGS", "PYTHON", "DRY"}
    unknown = [name for name in re.findall(r"\b[A-Z][A-Z0-9_]+(?==|$)", text.partition(" ")[0]) if name not in known]
    return f"nothing reads {', '.join(unknown)}" if unknown else None


def wrong_dotted(text: str) -> str | None:
    """Check a value of the chart, a module, a member, or a field of a message."""
    name = text.removesuffix("()")
    head, _, rest = name.replace(":", ".").partition(".")
    if name in code_index.chart_values():
        return None
    if head in code_index.PRODUCT or ":" in name:
        return wrong_module(name)
    members = code_index.classes().get(head, set()) | code_index.messages().get(head, set())
    if members or head[0].isupper():
        return None if rest.split(".")[0] in members else f"{head} has no {rest}"
    return wrong_words(name)


def wrong_module(name: str) -> str | None:
    module, _, member = name.partition(":")
    while not member and module and module not in code_index.modules():
        module = module.rpartition(".")[0]
    member = member or name.removeprefix(module).lstrip(".")
    known = module in code_index.modules() and (not member or member in code_index.definitions(module))
    return None if known else f"no {member} is defined in {module or 'the chart or a module'}"


def wrong_class(text: str) -> str | None:
    calls = (call for members in code_index.messages().values() for call in members)
    known = {*code_index.classes(), *code_index.messages(), *code_index.alerts(), *calls}
    return None if text in known else "no class, message, call or alert has this name"


def wrong_message(text: str) -> str | None:
    """Check a message; capitals, numbers and dots match any value."""
    parts = [part.strip() for part in re.split(r"\b(?:[A-Z]+|\d[\d.:]*)\b|\.\.\.", text)]
    wanted = re.compile(".*?".join(re.escape(part) for part in parts if part))
    return None if any(wanted.search(one) for one in code_index.texts()) else "no message or text of the code has it"


def wrong_route(text: str) -> str | None:
    return None if text in code_index.routes() else "nothing is served there"


def wrong_words(text: str) -> str | None:
    unknown = [word for word in re.findall(r"[A-Za-z_]\w+", text) if word not in code_index.words()]
    return f"not in the code: {', '.join(unknown)}" if unknown else None


# The first matching kind decides the check.
KINDS: list[tuple[Callable[[str], object], Callable[[str], str | None]]] = [
    (is_value, lambda _: None),
    (is_command, lambda _: None),  # tests/test_documented_commands.py checks these
    (re.compile(r"(?:quire|vllm)[_:]\S*").fullmatch, lambda _: None),  # a metric; another test checks all on a page
    (re.compile(r"/[\w./{}-]*").fullmatch, wrong_route),
    (_PATH.fullmatch, wrong_path),
    (re.compile(r"[\w./]+\.sh .*").fullmatch, wrong_script),
    (re.compile(r"test_\w+").fullmatch, wrong_test),
    (_FLAG.search, wrong_flags),
    (re.compile(r"\$?[A-Z][A-Z0-9]*_[A-Z0-9_]+\b(?:=.*)?|[A-Z]+=.*").fullmatch, wrong_variables),
    (_DOTTED.fullmatch, wrong_dotted),
    (re.compile(r"[A-Z][a-z]+(?:[A-Z0-9]\w*)?").fullmatch, wrong_class),
    (re.compile(r"[\w,:'.]+(?: [\w,:'.]+)+").fullmatch, wrong_message),
    (lambda _: True, wrong_words),
]


def wrong(quote: Quote) -> str | None:
    """Return the fault of a quote and its place, or None."""
    if quote.text in _ALLOWED:
        return None
    judge = next(judge for fits, judge in KINDS if fits(quote.text))
    fault = judge(quote.text)
    return fault and f"{quote}: {fault}"


def matches(page: Path, pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield each match in a page without comments, and its place."""
    text = _without(page.read_text(), _COMMENT)
    for match in re.finditer(pattern, text):
        yield f"{page.relative_to(ROOT)}:{line_of(text, match.start())}: {match[0]}", match


@pytest.mark.parametrize(
    "text",
    [
        *("--no-such-option", "--routing nearest", "QUIRE_ENGINE_COLOUR=red", "engine.autoscaling.colour"),
        *("engine.run.loop:Engine.jump", "engine.run.jump", "Engine.jump", "GenerateRequest.colour", "EngineJumper"),
        *("engine/jump.py", "tests/test_layout.py::test_jump", "jump_seconds", "the engine jumps", "/jump"),
    ],
)
def test_an_unknown_quote_is_a_fault(text: str) -> None:
    assert wrong(Quote(ROOT / "README.md", 7, text))


@pages
def test_quotes_of_a_page_exist(page: Path) -> None:
    faults = [fault for quote in quotes(page) if (fault := wrong(quote))]
    assert not faults, "\n".join(faults)


@pages
def test_metrics_alerts_and_variables_of_a_page_exist(page: Path) -> None:
    metrics = [
        where
        for where, match in matches(page, r"\b(?:quire_|vllm:)(\w*\*?)")
        if match[1] and not any(re.fullmatch(match[0].replace("*", r"\w+"), name) for name in code_index.metric_names())
    ]
    alerts = [
        where
        for where, match in matches(page, r"\bQuire[A-Z]\w+")
        if match[0] not in code_index.alerts() | code_index.classes().keys()
    ]
    variables = [
        where for where, match in matches(page, r"\bQUIRE_[A-Z_]+\b") if match[0] not in code_index.variables()
    ]
    faults = [*metrics, *alerts, *variables]
    assert not faults, "\n".join(faults)


@pages
def test_links_exist(page: Path) -> None:
    faults = []
    for where, text, target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        number = re.fullmatch(r"(?:decision )?(\d+)", text)
        if not linked.exists():
            faults.append(f"{where}: {target} does not exist")
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            faults.append(f"{where}: {path or page.name} has no heading #{anchor}")
        elif number and linked.parent == DECISIONS and int(number[1]) != int(linked.name[:3]):
            faults.append(f"{where}: decision {number[1]} is not {linked.name}")
    assert not faults, "\n".join(faults)


@pages
def test_a_page_is_short(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    most = MAX_LINES_OF_A_DECISION if re.match(r"docs/decisions/\d", name) else MAX_LINES.get(name, 300)
    lines = re.sub(r"(?ms)^<!-- (.*?): begin -->.*?^<!-- \1: end -->$", "", page.read_text()).count("\n")
    assert lines <= most, f"{lines} lines, at most {most}"


def test_every_picture_is_shown_by_a_page() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for _, _, target in links(page)}
    assert {path.name for path in IMAGES.iterdir() if path not in shown} == set()


def test_every_allowed_quote_is_on_a_page() -> None:
    stale = _ALLOWED - {quote.text for page in PAGES for quote in quotes(page)}
    assert not stale, f"remove from FOREIGN: {stale}"


def test_tables_of_metrics_are_complete() -> None:
    text = METRICS.read_text()
    for service, metrics in code_index.metrics().items():
        title = {"kvmanager": "KV manager", "every": "every service"}.get(service, service)
        (table,) = re.findall(rf"^\| {title} \| type \| .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE)
        expected = {
            (names[0] if kind != "info" else names[-1], "gauge" if kind == "info" else kind)
            for kind, names in metrics.values()
        }
        assert len(rows) == len(set(rows))
        assert set(rows) == expected, service
