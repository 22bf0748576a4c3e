"""Writes the image's bill of materials in CycloneDX: the packages of its Python environment, and Debian's of its base.

`cyclonedx-py environment` lists the first; this adds what dpkg's status file lists, and names the image itself.

    python write_sbom.py PACKAGES.json DPKG_STATUS SBOM.json
"""

import json
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote


def main(packages: str, status: str, target: str) -> None:
    """Add Debian's packages and the image itself to the bill, and write it."""
    bill: dict[str, Any] = json.loads(Path(packages).read_text(encoding="utf-8"))
    (quire,) = (one for one in bill["components"] if one["name"] == "quire")
    bill["metadata"]["component"] = {
        "type": "container",
        "bom-ref": "image",
        "name": "quire",
        "version": quire["version"],
    }
    bill["components"] = [*bill["components"], *debian_components(Path(status).read_text(encoding="utf-8"))]
    Path(target).write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def debian_components(status: str) -> Iterator[dict[str, str]]:
    """Yield a component for each installed package of a dpkg status file."""
    for paragraph in status.strip().split("\n\n"):
        package = Parser().parsestr(paragraph)
        if package["Status"] != "install ok installed":
            continue
        name, version, architecture = package["Package"], package["Version"], package["Architecture"]
        where = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
        yield {"type": "library", "bom-ref": where, "name": name, "version": version, "purl": where}


if __name__ == "__main__":
    main(*sys.argv[1:])
