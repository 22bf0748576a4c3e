"""How the structure of suspended work is written: coroutines, generators, tasks, futures and callbacks.

A suspended frame is its code, the position in it, and what its variables and its stack refer to. The garbage collector
lists these behind the code, also iterators and awaited objects that no variable has.
"""

import asyncio
import gc
import types
from typing import Any

from simulation.exhaustive.structure import Structure, register, register_names

# Of a coroutine, a generator, and an asynchronous generator.
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
# Names of types that Python does not export.
_WRAPPERS = (
    *("FutureIter", "TaskStepMethWrapper", "anext_awaitable", "async_generator_asend", "coroutine_wrapper"),
    *("dict_keys", "dict_values", "dict_items", "zip", "map", "filter", "enumerate"),
)
_ITERATORS = (
    *("list_iterator", "list_reverseiterator", "tuple_iterator", "range_iterator", "set_iterator"),
    *("dict_keyiterator", "dict_valueiterator", "dict_itemiterator"),
)


def _frame(structure: Structure, value: Any) -> None:
    if not structure.begins(value, f"frame {value.__qualname__}"):
        return
    frame = next(getattr(value, name) for name in _FRAMES if hasattr(value, name))
    if frame is None:
        structure.put("ended")
        return
    structure.put(f"at {frame.f_lasti}")
    referents = gc.get_referents(value)
    while referents[-1] is None:  # the exception being handled, which is none or missing
        referents.pop()
    structure.add_all(referents[referents.index(frame.f_code, 1) + 1 :])


def _referents(structure: Structure, value: object) -> None:
    """Write an object of C without a state of its own beside what it refers to."""
    if structure.begins(value, type(value).__name__):
        structure.add_all(gc.get_referents(value))


def _iterator(structure: Structure, value: Any) -> None:
    """Write an iterator over a container: the container and the position."""
    if structure.begins(value, type(value).__name__):
        structure.put(str(value.__length_hint__()))
        structure.add_all(gc.get_referents(value))


def _future(structure: Structure, value: Any) -> None:
    if structure.begins(value, f"future {value._state}"):
        _result(structure, value)


def _task(structure: Structure, value: Any) -> None:
    if structure.begins(value, "task"):
        write_task(structure, value)


def write_task(structure: Structure, value: Any) -> None:
    """Write the contents of a task."""
    structure.put(f"{value._state} {value._must_cancel} {value.cancelling()}")
    structure.add_all((value.get_coro(), value._fut_waiter))
    _result(structure, value)


def _result(structure: Structure, value: Any) -> None:
    structure.add_all((value._result, value._exception))
    for callback, _ in value._callbacks or ():
        structure.add(callback)


def _handle(structure: Structure, value: Any) -> None:
    """Write a callback, with its time if it is a timer."""
    if structure.begins(value, f"{type(value).__name__} {value.cancelled()}"):
        structure.add_all((getattr(value, "_when", None), value._callback, value._args))


def register_all() -> None:
    """Let structures contain suspended work."""
    frames: tuple[type, ...] = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
    register(_frame, *frames)
    register(_future, asyncio.Future)
    register(_task, asyncio.Task)
    register(_handle, asyncio.Handle, asyncio.TimerHandle)
    register_names(_referents, *_WRAPPERS)
    register_names(_iterator, *_ITERATORS)
