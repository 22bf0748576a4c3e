"""Repositories made for a test."""

import subprocess
from pathlib import Path


def git(folder: Path, *command: str) -> str:
    """Run a command of git in a folder; return its output."""
    who = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
    done = subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def change(folder: Path, path: str, text: str) -> str:
    """Commit a file, and return the commit."""
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(text)
    git(folder, "add", path)
    git(folder, "commit", "-q", "-m", f"change {path}")
    return git(folder, "rev-parse", "--short", "HEAD")
