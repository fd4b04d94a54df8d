"""What window, sinks and slots of a hybrid each do: the same weights read with parts of them alone.

- window: its sinks and its window, and no slots, with the teacher's weights;
- equal state: a window longer by as many tokens as there are slots, which has the same size of state;
- slots alone: nothing exact but the token itself; all others are in slots;
- slots of another text: before every piece of text, slots are replaced by what they hold of another text there.

Shape letters: N texts, T time, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsa.convert.by_position import Compared, Reading, positions
from gsa.eval.paired import Parts, mean_of, paired_difference
from gsa.mixers.hybrid import MEMORY, HybridOptions
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.models.sizes import tensor_shapes
from gsa.models.state import ModelState

SLOTS = ".mixer.slot_"
"""In the names of tensors that belong to slots."""
SWAP = 64
"""Tokens that are read between two replacements of slots."""
RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(frozen=True)
class Sizes:
    """What a hybrid sees and holds, in tokens and slots; 0 for students of other kinds."""

    window: int = 0
    sinks: int = 0
    slots: int = 0

    @classmethod
    def of(cls, model: LM) -> Sizes:
        """All layers of a converted hybrid have the same."""
        options = model.config.layers[0]
        if not isinstance(options, HybridOptions):
            return cls()
        return cls(options.window, options.num_sinks, options.num_slots)

    @property
    def near(self) -> int:
        """Tokens that are seen exactly."""
        return self.window + self.sinks


def variant(model: LM, weights: dict[str, Tensor], **options: Any) -> LM:
    """A model with some options changed and these weights, which it shares."""
    with without_memory():
        changed = LM(replace(model.config, **options))
    changed.load_state_dict(weights, assign=True)
    changed.tie_weights()
    return changed.eval().requires_grad_(False)


def window_alone(model: LM, weights: dict[str, Tensor], window: int) -> LM:
    """A hybrid's sinks and a window of this length without slots, with the weights of its teacher or its own."""
    options: dict[str, Any] = {"window": window, "num_slots": 1}
    own = {name: x for name, x in weights.items() if SLOTS not in name}
    for name, shape in tensor_shapes(replace(model.config, **options)).items():
        if SLOTS in name:  # one slot there must be: it counts for e^-inf
            own[name] = torch.full(shape, {"slot_bias": -torch.inf, "slot_mass": 1.0}.get(name.split(".")[-1], 0.0))
    return variant(model, own, **options)


def slots_alone(model: LM) -> LM:
    """A hybrid that sees nothing exactly but the token itself."""
    return variant(model, model.state_dict(), window=1, num_sinks=0)


def with_slots_of_others(model: LM, others: Sequence[int]) -> Reading:
    """How a hybrid reads with slots of other texts, whose numbers are given for each text."""
    near = Sizes.of(model).near

    def features(rows: Tensor, number: int) -> Tensor:
        both, state, parts = rows[[number, others[number]]], None, []
        T = both.shape[1]
        borders = [0, *range(near, T, SWAP), T]
        for begin, end in pairwise(borders):
            x, state = model.model(both[:, begin:end], state)
            parts.append(x[0])
            state = _first_with_slots_of_second(state)
        return torch.cat(parts)

    return Reading(features, model.lm_head)


def _first_with_slots_of_second(state: ModelState) -> ModelState:
    return ModelState(
        [{name: x[[1, 1]] if name in MEMORY else x for name, x in layer.items()} for layer in state.layers]
    )


@dataclass(frozen=True)
class Figure:
    """A figure of some positions, with its interval of confidence."""

    name: str
    """Whose it is."""
    begin: int
    end: int | None
    value: float
    low: float
    high: float

    @property
    def positions(self) -> str:
        return positions(self.begin, self.end)


def shares(compared: dict[str, Compared], window: str, near: int) -> list[Figure]:
    """What each recovers of a window's loss, in each bin of positions beyond `near` and in all of them.

    (CE of the window - CE of the other) / (CE of the window - CE of the teacher). Where the window loses nothing there
    is no share.
    """
    lost, found = compared[window], []
    for name, other in compared.items():
        for begin, end in _spans(lost, near) if name != window else ():
            parts = _parts((lost.student_ce, other.student_ce, lost.teacher_ce), begin, end, _share)
            if parts.sums[:, 0].sum() > parts.sums[:, 2].sum():
                found.append(_figure(name, begin, end, parts))
    return found


def ahead(compared: dict[str, Compared], name: str, other: str, near: int) -> list[Figure]:
    """How much less cross-entropy one has than another on the same texts, by the same positions."""
    pair = compared[other].student_ce, compared[name].student_ce
    spans = _spans(compared[name], near)
    return [_figure(name, begin, end, _parts(pair, begin, end, _less)) for begin, end in spans]


def _spans(compared: Compared, near: int) -> list[tuple[int, int | None]]:
    """The bins beyond `near`, and all of them, if there are several."""
    places = [place for place in compared.places() if place.end is None or place.end > near]
    spans = [(max(place.begin, near), place.end) for place in places]
    return [*spans, (near, None)] if len(spans) > 1 else spans


def _parts(
    figures: Sequence[Tensor], begin: int, end: int | None, form: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> Parts:
    """What is made of sums over positions of figures [N, T - 1] of texts."""
    sums = np.stack([x[:, begin:end].double().sum(1).numpy() for x in figures], 1)
    return Parts(sums, np.full(len(sums), float(figures[0][0, begin:end].numel())), form)


def _share(means: NDArray[np.float64]) -> NDArray[np.float64]:
    return (means[..., 0] - means[..., 1]) / (means[..., 0] - means[..., 2])


def _less(means: NDArray[np.float64]) -> NDArray[np.float64]:
    return means[..., 0] - means[..., 1]


def _figure(name: str, begin: int, end: int | None, parts: Parts) -> Figure:
    """With an interval from drawing texts anew."""
    nothing = mean_of(np.zeros(len(parts.sums)))  # the difference from 0 is the figure itself
    found = paired_difference(nothing, parts, resamples=RESAMPLES, confidence=CONFIDENCE, seed=0)
    return Figure(name, begin, end, found.value, found.low, found.high)
