"""The commands that README.md and docs/ show."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "helm" / "quire" / "README.md",
)
# The first words of commands within sentences. `curl` and `grep` are commands in blocks alone.
PROGRAMS = ("quire", "make", "docker", "helm", "kubectl", "pip")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_VARIABLE = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Command:
    """A command of a page. `shown`: in a block, to be typed as it is."""

    page: Path
    text: str
    shown: bool

    @property
    def words(self) -> list[str]:
        """The words, without variables before the program and its folder."""
        words = shlex.split(self.text, comments=True)
        while _VARIABLE.fullmatch(words[0]):
            words = words[1:]
        return [words[0].removeprefix(".venv/bin/"), *words[1:]]

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.text.split())}"


def commands() -> list[Command]:
    """All commands in order, each once a page."""
    found = [command for page in PAGES for command in [*_in_blocks(page), *_in_sentences(page)]]
    return list(dict.fromkeys(found))


def unlabelled_commands() -> list[str]:
    """Lines that look like commands in blocks that are not marked as shell."""
    return [
        f"{page.name}: {line}"
        for page in PAGES
        for language, text in _BLOCK.findall(page.read_text())
        if language != "sh" and not text.startswith("$ ")  # the lines after it are output
        for line in text.splitlines()
        if re.match(rf"(\.venv/bin/)?({'|'.join((*PROGRAMS, 'curl', 'grep', 'git'))}) ", line)
    ]


def _in_blocks(page: Path) -> list[Command]:
    found = []
    for language, text in _BLOCK.findall(page.read_text()):
        if language == "sh":
            found += _whole_commands(text)
        elif not language:
            found += [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [Command(page, text, shown=True) for text in found]


def _in_sentences(page: Path) -> list[Command]:
    text = _BLOCK.sub("", page.read_text())
    spans = [Command(page, " ".join(span.split()), shown=False) for span in _SPAN.findall(text)]
    return [one for one in spans if _is_command(one)]


def _is_command(span: Command) -> bool:
    try:
        words = span.words
    except (ValueError, IndexError):
        return False
    return words[0] in PROGRAMS and len(words) > 1


def _whole_commands(text: str) -> list[str]:
    """Join the lines of a command: to a quote's end, and over backslashes."""
    found, begun = [], ""
    for line in text.splitlines():
        begun += line + "\n"
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        if not line.endswith("\\"):
            found.append(begun.rstrip("\n"))
            begun = ""
    assert not begun, f"an incomplete command: {begun}"
    return [command for command in found if shlex.split(command, comments=True)]
