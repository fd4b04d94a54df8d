"""The picture of `gsa probe slots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gsa.chart import picture
from gsa.eval.probes.slot_use import SlotUse

MOST_LABELS = 80
"""Tokens whose texts fit beneath a heat map."""


def save_picture(
    layers: Sequence[SlotUse], chosen: SlotUse, head: int, labels: Sequence[str], path: Path, model: str
) -> None:
    """Writes a picture: tokens by slots of one query head, written and read, and the half-lives of all slots."""
    with picture(path, rows=3, size=(11, 12)) as (top, middle, bottom):
        where = f"layer {chosen.layer}, head {head} of {model}"
        _heat_map(top, chosen.writes[:, chosen.memory_of(head)], labels, f"Write strength, {where}")
        _heat_map(middle, chosen.reads[:, head], labels, f"Share of what is read, {where}")
        _half_lives(bottom, layers)


def _heat_map(axes: Any, use: Tensor, labels: Sequence[str], title: str) -> None:
    """Use [T, M] with the tokens from left to right."""
    image = axes.imshow(use.T.numpy(), aspect="auto", interpolation="nearest", cmap="magma_r", vmin=0)
    axes.figure.colorbar(image, ax=axes, pad=0.01)
    axes.set(title=title, xlabel="token", ylabel="slot")
    if len(labels) <= MOST_LABELS:
        # A dollar sign would begin a formula, and a line end would end the label.
        texts = [repr(label)[1:-1].replace("$", r"\$") for label in labels]
        axes.set_xticks(range(len(texts)), texts, rotation=90, fontsize=7, fontfamily="monospace")


def _half_lives(axes: Any, layers: Sequence[SlotUse]) -> None:
    """A dot for every slot: the heads of a layer side by side. Slots that never forget are not among them."""
    for use in layers:
        for h, lives in enumerate(use.half_lives):
            lives = lives[lives.isfinite()].clamp(min=0.1)  # full resets have 0, which a logarithmic axis lacks
            place = use.layer + 0.6 * ((h + 0.5) / use.heads - 0.5)
            axes.plot([place] * len(lives), lives.numpy(), ".", alpha=0.5, color=f"C{h % 10}")
    axes.set_yscale("log")
    axes.set_xticks([use.layer for use in layers])
    axes.set(title="Half-lives of slots by layer, a colour for each key/value head", xlabel="layer", ylabel="tokens")
    axes.grid(alpha=0.3, axis="y")
