"""One version for package, command, chart and changelog."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_installed_package_and_the_chart_have_the_version_of_the_project() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "quire" / "Chart.yaml").read_text())
    assert [metadata.version("quire"), chart["version"], chart["appVersion"]] == [VERSION] * 3


def test_the_changelog_begins_with_this_version_and_has_the_commit_of_every_release_before() -> None:
    sections = re.findall(r"^## (\S+)\n\n(.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [version for version, _ in sections]
    assert versions[0] == VERSION
    numbers = [[int(part) for part in version.split(".")] for version in versions]
    assert numbers == sorted(numbers, reverse=True)
    assert len(sections) > 1
    for _, first_line in sections[1:]:
        assert re.fullmatch(r"Commit: [0-9a-f]{40}", first_line)
