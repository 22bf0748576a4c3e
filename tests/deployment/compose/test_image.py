"""What the image contains, and what it says about itself."""

import json
import re
from typing import Any

import pytest

from tests.deployment.compose.stack import ROOT, base_image, docker, image_label, run

INSTALLED = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
DEBIAN = ("dpkg-query", "--show", "--showformat", "${Package} ${Version} ${db:Status-Abbrev}\\n")
# Architectures that the page on models names as tested or served.
FAMILIES = re.compile(r"^\| [^|]+ \| `([a-z0-9_]+)` \| `", re.MULTILINE)

pytestmark = pytest.mark.timeout(3600)


def inside(program: str, *arguments: str) -> str:
    return docker("run", "--rm", "--entrypoint", program, "quire", *arguments, seconds=300)


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    """The bill of materials."""
    return json.loads(inside("cat", "/opt/quire/sbom.json"))


def test_the_bill_of_materials_lists_what_is_installed(bill: dict[str, Any]) -> None:
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"] == {
        "type": "container",
        "bom-ref": "image",
        "name": "quire",
        "version": image_label("version"),
    }
    listed = {(one["name"].lower(), one["version"]) for one in bill["components"]}
    python = {tuple(line.lower().split()) for line in inside("python", "-c", INSTALLED).splitlines()}
    debian = {tuple(line.split()[:2]) for line in inside(*DEBIAN).splitlines() if line.split()[2] == "ii"}
    assert len(python) > 50
    assert len(debian) > 50
    assert {(str(name), str(number)) for name, number in python | debian} - listed == set()
    assert len(listed) == len(python | debian)


def test_nothing_in_the_image_installs_packages() -> None:
    assert run("docker", "run", "--rm", "--entrypoint", "python", "quire", "-m", "pip").stderr.endswith(
        "No module named pip\n"
    )
    found = inside(
        "find", "/", "-xdev", "(", "-name", "pip", "-o", "-name", "pip[0-9-]*", ")", "-not", "-path", "/proc/*"
    )
    assert found == ""


def test_labels_name_version_revision_source_and_base() -> None:
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert image_label("version") == project[1]
    assert image_label("base.name") == base_image()
    assert [image_label(name) for name in ("title", "licenses")] == ["Quire", "Apache-2.0"]


def test_every_tested_family_can_be_loaded() -> None:
    """The code of transformers that no causal language model reaches is left out."""
    families = FAMILIES.findall((ROOT / "docs" / "models.md").read_text())
    assert len(families) > 10
    script = (
        "import sys, torch\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "for family in sys.argv[1:]:\n"
        "    config = AutoConfig.for_model(family)\n"
        "    with torch.device('meta'): print(type(AutoModelForCausalLM.from_config(config)).__name__)\n"
    )
    assert len(inside("python", "-c", script, *families).splitlines()) == len(families)


def test_a_model_that_is_no_language_model_is_refused_by_its_name() -> None:
    script = (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "try: AutoModelForCausalLM.from_config(AutoConfig.for_model('vit'))\n"
        "except ValueError as error: print(str(error).partition('\\n')[0])\n"
    )
    assert "ViTConfig" in inside("python", "-c", script)
