"""Runs a benchmark by its name: `python -m bench NAME [ARGUMENTS...]`."""

import os
import runpy
import sys
from importlib.util import find_spec

from bench.loads.class_limits import limits_of
from engine.native.cpu_class import VARIABLE

_ROOMS = ("blocks", "engine", "serving")


def module_of(name: str) -> str:
    """Return the module of a benchmark. Raises LookupError for an unknown name."""
    found = [module for room in _ROOMS if name.isidentifier() and find_spec(module := f"bench.{room}.{name}")]
    if not found:
        raise LookupError(f"no benchmark {name!r} in {', '.join(f'bench/{room}' for room in _ROOMS)}")
    return found[0]


def main(name: str = "", *arguments: str) -> None:
    """Run the benchmark as `__main__`."""
    try:
        module = module_of(name)
    except LookupError as error:
        sys.exit(str(error))
    os.environ.update(limits_of(os.environ.get(VARIABLE, "")))  # before torch is imported
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
