"""The names that the source tree defines, to check pages that quote them."""

import ast
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import yaml

import simulation.__main__
import simulation.exhaustive.__main__
from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2, kvmanager_pb2, records_pb2
from services.cli.main import cli
from services.engine.metrics import EngineMetrics
from services.gateway.observe.metrics import GatewayMetrics
from services.kvmanager.metrics import KVManagerMetrics
from services.runtime.metrics.vllm_names import COUNTERPARTS
from tests.services.test_metrics import OF_EVERY_SERVICE, OF_TLS

ROOT = Path(__file__).parents[1]
TOP_FILES = (".dockerignore", ".env", "Dockerfile", "Makefile", "docker-compose.yml", "pyproject.toml")
PRODUCT = ("blocks", "engine", "kvmanager", "services", "simulation", "bench", "deploy", "helm")
CHART = ROOT / "helm" / "quire"
FAMILIES = "tests/engine/families.py"  # which docs/models.md lists
MODEL_TYPES = ROOT / "docs" / "model-types.json"  # which docs/model-types.md lists
PROTOS = (decoding_pb2, engine_pb2, gateway_pb2, kvmanager_pb2, records_pb2)
SAMPLES = {"gauge": ("",), "counter": ("_total",), "histogram": ("", "_bucket", "_sum", "_count"), "info": ("_info",)}
HOLE = "\N{OBJECT REPLACEMENT CHARACTER}"
_WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def tracked() -> frozenset[str]:
    """The paths of all files and folders, uncommitted ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    return frozenset(str(path) for file in files for path in (file, *file.parents))


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of the product's Python modules by dotted name."""
    found = {}
    for path in tracked():
        if path.endswith(".py") and (path.split("/")[0] in PRODUCT or path == FAMILIES):
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found[name] = ast.parse((ROOT / path).read_text())
    return found


@cache
def classes() -> dict[str, set[str]]:
    """The members of each class and its bases by class name; classes with the same name are merged."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own[node.name].update(_members(node))
                bases[node.name].update(one.id for one in map(_without_index, node.bases) if isinstance(one, ast.Name))
    return {name: members.union(*(own.get(base, set()) for base in bases[name])) for name, members in own.items()}


def _without_index(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


def _members(node: ast.ClassDef) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield one.name
        elif isinstance(one, ast.AnnAssign | ast.Assign):
            targets = [one.target] if isinstance(one, ast.AnnAssign) else one.targets
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute):
                    yield target.attr


@cache
def definitions(module: str) -> frozenset[str]:
    """The names that a module defines: `name` and `Class.member`."""
    found = set()
    for node in modules()[module].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{member}" for member in _members(node))}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return frozenset(found)


@cache
def messages() -> dict[str, set[str]]:
    """Fields of protobuf messages, methods of services and values of enums, by their names."""
    found: dict[str, set[str]] = {}
    for proto in PROTOS:
        file = proto.DESCRIPTOR
        for message in file.message_types_by_name.values():
            for one in (message, *message.nested_types):
                found.setdefault(one.name, set()).update(
                    one.fields_by_name, [nested.name for nested in one.nested_types]
                )
        for service in file.services_by_name.values():
            found.setdefault(service.name, set()).update(method.name for method in service.methods)
        for enum in file.enum_types_by_name.values():
            found.setdefault(enum.name, set()).update(enum.values_by_name)
    return found


@cache
def words() -> frozenset[str]:
    """All words of the product's code, without docstrings and comments, and the model types of transformers."""
    found = {word for one in json.loads(MODEL_TYPES.read_text())["cases"] for word in _WORD.findall(one["case"])}
    for tree in modules().values():
        found.update(word for text in _texts(tree) for word in _WORD.findall(text))
        found.update(_identifiers(tree))
    for path in tracked():
        if _is_other_code(path):
            comment = r"(?m)(?:^|\s)(?:#|//).*$"
            found.update(_WORD.findall(re.sub(comment, "", (ROOT / path).read_text())))
    return frozenset(found)


def _is_other_code(path: str) -> bool:
    no_code = path.endswith((".py", ".md", ".pyi", ".png", ".binpb"))
    if path.startswith(("tests/", "docs/")) or no_code or (ROOT / path).is_dir():
        return False
    # Users put records and models into the top folder.
    return path.startswith((*(f"{room}/" for room in PRODUCT), "protos/")) or path in TOP_FILES


def _identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from value.split(".")
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")


def _texts(tree: ast.Module) -> Iterator[str]:
    """All texts of a module except docstrings, with HOLE for the values of an f-string."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _documented(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and ast.get_docstring(node, clean=False) is not None


@cache
def texts() -> tuple[str, ...]:
    """The product's messages and other texts, with HOLE for each value."""
    found = [text for tree in modules().values() for text in _texts(tree)]
    return tuple(re.sub(r"%[sdr.\df]+|\{\w*\}", HOLE, " ".join(text.split())) for text in found if " " in text)


@cache
def tests() -> frozenset[str]:
    sources = ((ROOT / path).read_text() for path in tracked() if re.match(r"tests/.*\.py", path))
    return frozenset(name for source in sources for name in re.findall(r"def (test_\w+)\(", source))


@cache
def routes() -> frozenset[str]:
    found = {text for name, tree in modules().items() if name.startswith("services.") for text in _texts(tree)}
    return frozenset(text for text in found if text.startswith("/"))


@cache
def metrics() -> dict[str, dict[str, tuple[str, tuple[str, ...]]]]:
    """Type and sample names of each metric by service."""
    registries = {
        "gateway": GatewayMetrics().registry,
        "engine": EngineMetrics().registry,
        "kvmanager": KVManagerMetrics().registry,
    }
    found = {
        service: {family.name: _samples(family.name, family.type) for family in registry.collect()}
        for service, registry in registries.items()
    }
    found["gateway"] |= {name: _samples(name, "gauge") for name in OF_TLS}
    return found | {"every": {name: _samples(name, "counter") for name in OF_EVERY_SERVICE}}


def _samples(name: str, kind: str) -> tuple[str, tuple[str, ...]]:
    return kind, tuple(f"{name}{suffix}" for suffix in SAMPLES[kind])


@cache
def metric_names() -> frozenset[str]:
    """The names of all samples, including vLLM's names."""
    ours = {name for of_service in metrics().values() for _, names in of_service.values() for name in names}
    return frozenset(
        ours | {name + suffix for one in COUNTERPARTS for name in one.theirs for suffix in ("", *one.suffixes)}
    )


@cache
def commands() -> dict[str, click.Command]:
    """All commands by their words, such as `key create`."""

    def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        if isinstance(command, click.Group):
            for word, one in command.commands.items():
                yield from below(f"{name} {word}".strip(), one)

    return dict(below("", cli))


@cache
def options() -> dict[str, list[click.Parameter]]:
    found: dict[str, list[click.Parameter]] = defaultdict(list)
    for command in (*commands().values(), simulation.__main__.main, simulation.exhaustive.__main__.main):
        for option in command.params:
            for flag in (*option.opts, *option.secondary_opts):
                found[flag].append(option)
    scripts = {text for name, tree in modules().items() if name.startswith("bench.") for text in _texts(tree)}
    return {text: [] for text in scripts if text.startswith("--")} | found | {"--help": [], "--version": []}


@cache
def variables() -> frozenset[str]:
    """Environment variables that commands, containers and builds read."""
    found = {
        "_".join(["QUIRE", *name.upper().split(), option.name.upper()]).replace("-", "_")
        for name, command in commands().items()
        for option in command.params
        if option.name
    }
    for option in (one for command in commands().values() for one in command.params):
        found.update([option.envvar] if isinstance(option.envvar, str) else option.envvar or ())
    for path in ("docker-compose.yml", ".env", "Makefile", "Dockerfile"):
        found.update(re.findall(r"\b[A-Z][A-Z0-9_]+\b", re.sub(r"(?m)^\s*#.*$", "", (ROOT / path).read_text())))
    for path in tracked():
        if path.endswith(".py"):
            found.update(re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+)"', (ROOT / path).read_text()))
    return frozenset(found)


@cache
def chart_values() -> frozenset[str]:
    """The dotted paths of the chart's values, including the settings of its services."""
    found: set[str] = set()

    def walk(path: str, value: object) -> None:
        found.add(path)
        if isinstance(value, dict):
            for name, one in value.items():
                walk(f"{path}.{name}".lstrip("."), one)

    walk("", yaml.safe_load((CHART / "values.yaml").read_text()))
    for component in ("gateway", "engine", "kvmanager"):
        found.update(f"{component}.settings.{field}" for field in _settings_of(component))
    return frozenset(found)


def _settings_of(component: str) -> set[str]:
    return {"NAME", *(option.name or "" for option in commands()[component].params)}


@cache
def alerts() -> frozenset[str]:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    return frozenset(rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule)
