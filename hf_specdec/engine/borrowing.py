"""Stand in for functions of the host's modules while a call of ours runs, and leave them as they were."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Function = Callable[..., Any]
_lock = threading.Lock()
# Users of each function of each module, and what it is when nobody uses it.
_users: dict[tuple[str, str], int] = {}
_originals: dict[tuple[str, str], Function] = {}


@contextmanager
def replaced(modules: Iterable[str], wrappers: Mapping[str, Callable[[Function], Function]]) -> Iterator[None]:
    """Within this, functions of the named modules are wrapped; several calls may overlap.

    Args:
        modules: Names of imported modules.
        wrappers: What makes the stand-in of each function, by its name; a module may lack some of them.
    """
    keys = [(module, name) for module in modules for name in wrappers if hasattr(sys.modules[module], name)]
    if not keys:
        # Most models need no stand-in, and every forward comes by here.
        yield
        return
    with _lock:
        for key in keys:
            _users[key] = _users.get(key, 0) + 1
            if _users[key] == 1:
                module, name = key
                _originals[key] = getattr(sys.modules[module], name)
                setattr(sys.modules[module], name, wrappers[name](_originals[key]))
    try:
        yield
    finally:
        with _lock:
            for key in keys:
                _users[key] -= 1
                if not _users[key]:
                    module, name = key
                    setattr(sys.modules[module], name, _originals.pop(key))
