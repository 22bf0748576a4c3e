"""The command `quire`, in a module of its own name: it loads Quire's packages from the folder that it stands in.

Their names are common: `services` and `engine`; and a script of a user may be called `quire`. A folder of PYTHONPATH,
or the folder in which a user stands, may have others, which would be imported in their place.
"""
# ruff: noqa: E402

import os
import signal

# Status of a command that Ctrl-C ended, as shells have it.
_INTERRUPTED = 130
_takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
if _takes_interrupts:  # before the imports, which take long: Python would print a traceback of theirs
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_PACKAGES = ("quire", "blocks", "kvmanager", "engine", "services")
# One module of each package that no other package has.
_OWN = ("blocks/step.py", "kvmanager/pool_spec.py", "engine/schedule/scheduler.py", "services/cli/main.py")
_HERE = Path(__file__).resolve().parent
# A checkout has the package `quire` in a folder of its own.
_FOLDERS = (str(_HERE), str(_HERE / "protos"))


def main() -> None:
    """Run the command, or end with the name of a package that is not Quire's."""
    missing = [path for path in _OWN if not (_HERE / path).is_file()]
    if missing:
        package = missing[0].partition("/")[0]
        sys.exit(
            f"quire: the package {package!r} in {_HERE} is not Quire's: another installed distribution has the same"
            " name. Install Quire again, in an environment of its own."
        )
    if others := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join((*_FOLDERS, others))  # of processes that this one starts
    for name in _PACKAGES:
        _load(name)
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _run() -> None:
    from services.cli.main import main as run

    if _takes_interrupts:  # commands end what they have begun
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _load(name: str) -> None:
    """Import a package from this folder, whatever precedes it on the path."""
    spec = PathFinder.find_spec(name, _FOLDERS)
    assert spec is not None, "its modules were found"
    assert spec.loader is not None, "it has an __init__.py"
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
