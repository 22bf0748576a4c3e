"""A change of one file, by which a fault is planted."""

from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """Replaces a text that occurs once in a file."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file below `root`."""
        file = root / self.path
        source = file.read_text()
        assert source.count(self.old) == 1, f"{self.path} has no single {self.old!r}"
        file.write_text(source.replace(self.old, self.new))
