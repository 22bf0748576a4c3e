"""What compute-sanitizer and ncu print, and where they are."""

import csv
import re
import shutil
from collections import defaultdict
from pathlib import Path

_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute")


def path_of(tool: str) -> str | None:
    """Return where a tool is, on the PATH or in the usual folders."""
    if found := shutil.which(tool):
        return found
    places = [place for folder in _FOLDERS for place in (Path(folder) / tool, *Path(folder).glob(f"*/{tool}"))]
    return next((str(place) for place in places if place.is_file()), None)


def errors_of(printed: str) -> int | None:
    """Return the errors that compute-sanitizer counted, None if it was ended before."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", printed)
    return sum(int(errors or hazards) for errors, hazards in found) if found else None


def metrics_of(printed: str) -> dict[str, dict[str, float]]:
    """Return the metrics of each kernel's last launch, from ncu's output as CSV after other lines."""
    lines = printed.splitlines()
    begin = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(lines[begin:]):
        value = (row.get("Metric Value") or "").replace(",", "")
        if re.fullmatch(r"-?\d+(\.\d+)?", value):
            found[row["Kernel Name"].partition("(")[0]][row["Metric Name"]] = float(value)
    return dict(found)


def last_line(printed: str) -> str:
    """Return the last line that is not empty, for the reason of a failure."""
    return next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "it printed nothing")
