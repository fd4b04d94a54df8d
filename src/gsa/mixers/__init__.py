"""Token mixers: every system of the paper behind one protocol."""

from gsa.mixers.base import Mixer, Options, State
from gsa.mixers.registry import MIXERS, mixer

__all__ = ["MIXERS", "Mixer", "Options", "State", "mixer"]
