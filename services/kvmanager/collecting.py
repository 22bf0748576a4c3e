"""Keeps Python's garbage collector from walking through all tables again and again.

A full collection looks at every entry of every table: at a million held blocks that holds everybody up for ten
milliseconds and more. What has survived the young generations is here to stay, so it is set aside, once a second. It is
given back like everything else when its last reference goes; only cycles would stay, so all is looked through when no
engine is attached.
"""

import asyncio
import gc

from kvmanager import KVManager

_SECONDS = 1.0
_YOUNG = 1  # the generations up to this one are collected first


def set_survivors_aside() -> None:
    """Collect what is young, and let later collections pass over the rest."""
    gc.collect(_YOUNG)
    gc.freeze()


async def collecting(manager: KVManager) -> None:
    """Set survivors aside every second, until cancelled."""
    looked_through = True
    while True:
        if manager.sessions():
            set_survivors_aside()
            looked_through = False
        elif not looked_through:
            gc.unfreeze()
            gc.collect()
            looked_through = True
        await asyncio.sleep(_SECONDS)
