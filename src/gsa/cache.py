"""The user's cache folder: for what can be made again from what is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "GSA_CACHE"
"""The environment variable that names another folder."""


def cache_folder() -> Path:
    """Where files are kept that can be made again. It may not be there yet, and may be removed at any time.

    It is $GSA_CACHE; without that, the folder `gsa` in $XDG_CACHE_HOME, or where the system keeps caches.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and os.path.isabs(shared):  # the standard has others ignored
        return Path(shared) / "gsa"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "gsa" / "Cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "gsa"
