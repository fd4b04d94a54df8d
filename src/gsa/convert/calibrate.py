"""What is new in a student begins with figures of its teacher, measured on a little text, layer by layer.

Half-lives of the gates of `gsa` and `gla` are quantiles of how far back the teacher looks. Norms behind linear
attention begin with the size of what the teacher's heads put out, instead of 1. For `hybrid` see gsa.convert.slots.

Shape letters: N texts, T time, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gsa import pretrained
from gsa.console import read_text
from gsa.convert.attention import Scores
from gsa.convert.distances import gate_bias, measured, quantiles, spread
from gsa.convert.slots import hybrid_weights
from gsa.data.tokenizer import JSON
from gsa.errors import GSAError, memory_errors
from gsa.eval.progress import Progress
from gsa.mixers.sequences import sequences_of
from gsa.models.backbone import Block
from gsa.models.init import without_memory

if TYPE_CHECKING:
    from gsa.convert.run import Conversion

LENGTH = 1024
"""Tokens of each piece of text, if the teacher was trained for so many and windows leave enough of them."""
BEYOND = 4
"""How many times longer than window and sinks a piece is."""
TOKENS = 8192
"""Tokens of text, by default."""
NORMED = ("retnet", "supra")
"""Students of which nothing but such a norm is calibrated."""


@dataclass(frozen=True)
class Calibration:
    """New weights by name, and what they come from."""

    weights: dict[str, Tensor]
    facts: list[dict[str, Any]]
    """Of each layer: half-lives by quantile; of a hybrid also shares of the softmax and biases."""
    text: str
    tokens: int


class Text(NamedTuple):
    """What is read to calibrate, and what it is called."""

    name: str
    content: str


def text_of(path: str | None) -> Text:
    """The text of a file, or the book of the package."""
    if path is None:
        return Text("sense-and-sensibility (in the package)", pretrained.book())
    content = read_text(path)
    if "\0" in content:
        raise GSAError(f"convert: {path} is no text: it has bytes of value 0")
    return Text(Path(path).name, content)


def pieces(conversion: Conversion, folder: Path, text: Text, tokens: int) -> Tensor:
    """Ids [N, T] of a text, by the tokenizer in a folder."""
    if not (folder / JSON).exists():
        raise GSAError(
            f"convert: {conversion.source.name} has no {JSON}, which calibration needs; --calibrate-tokens 0 goes "
            "without it"
        )
    near = _near(conversion)
    longest = max(LENGTH, BEYOND * near)
    length = min(longest, tokens, conversion.teacher.context or longest)
    if length <= near + 1:
        given = f"in texts of {length} tokens (--calibrate-tokens, or the teacher's context)"
        if not near:
            raise GSAError(f"convert: there is nothing to measure {given}")
        raise GSAError(
            f"convert: nothing lies beyond window and sinks of {near} tokens {given}: choose a smaller window, or "
            "--calibrate-tokens 0"
        )
    wanted = max(tokens // length, 1) * length
    (ids,) = conversion.tokenizer(folder).encode([text.content[: 16 * wanted]])
    if len(ids) < length:
        raise GSAError(f"convert: {text.name} has {len(ids)} tokens, calibration needs at least {length}")
    count = min(len(ids), wanted) // length
    return torch.tensor(ids[: count * length].astype("int64")).view(count, length)


def _near(conversion: Conversion) -> int:
    """Window and sinks of a student that has them."""
    options: Any = conversion.student.layers[0]
    return options.window + options.num_sinks if conversion.choices.to == "hybrid" else 0


def calibrate(conversion: Conversion, ids: Tensor, text: str, new: dict[str, Tensor]) -> Calibration:
    """The new weights that the teacher has something to say about. One layer of it is in memory at a time."""
    weights, facts = dict[str, Tensor](), list[dict[str, Any]]()
    with torch.no_grad(), memory_errors("convert"), Progress(len(conversion.student.layers), "layers") as progress:
        x = conversion.read("model.embeddings.weight", torch.float32)[ids]
        for number in range(len(conversion.student.layers)):
            block, prefix = teacher_block(conversion, number), f"model.layers.{number}.mixer."
            own = {name.removeprefix(prefix): value for name, value in new.items() if name.startswith(prefix)}
            found, fact = STUDENTS[conversion.choices.to](conversion, block.mixer, block.mixer_norm(x), own, number)
            weights |= {prefix + name: value for name, value in found.items()}
            facts.append({"layer": number, **fact})
            x, _ = block(x, None, sequences_of(x, None, "convert"), False, None)
            progress.advance()
    return Calibration(weights, facts, text, ids.numel())


def teacher_block(conversion: Conversion, number: int) -> Block:
    """A layer of the teacher, in fp32."""
    config, prefix = conversion.teacher.config, f"model.layers.{number}."
    with without_memory():
        block = Block(config, config.layers[number])
    own = [name for name in conversion.mapping.copied if name.startswith(prefix)]
    weights = {name.removeprefix(prefix): conversion.read(name, torch.float32) for name in own}
    block.load_state_dict(weights, assign=True)
    return block.eval()


def _gsa(
    conversion: Conversion, mixer: Any, x: Tensor, own: dict[str, Tensor], number: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Biases of gates from tokens: half-lives for the gates' mean logits."""
    options: Any = conversion.student.layers[number]
    half_lives = quantiles(measured(mixer, x, 0, 0).ages, options.num_slots)
    return {"f_proj.bias": gate_bias(half_lives, options, own["f_proj.weight"] @ x.mean((0, 1)))}, spread(half_lives)


def _gla(
    conversion: Conversion, mixer: Any, x: Tensor, own: dict[str, Tensor], number: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    options: Any = conversion.student.layers[number]
    width = own["gk_proj.1.bias"].numel() // options.kv_heads
    half_lives = quantiles(measured(mixer, x, 0, 0).ages, width)
    logits = own["gk_proj.1.weight"] @ (own["gk_proj.0.weight"] @ x.mean((0, 1)))
    weights, facts = _normed(conversion, mixer, x, own, number)
    return weights | {"gk_proj.1.bias": gate_bias(half_lives, options, logits)}, facts | spread(half_lives)


def _normed(
    conversion: Conversion, mixer: Any, x: Tensor, own: dict[str, Tensor], number: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weight of the norm over heads: what the teacher's heads put out, feature by feature, on average."""
    if "norm.weight" not in own:  # outputs are means of values as they are
        return {}, {}
    squares = torch.zeros_like(own["norm.weight"])
    for row in x:
        q, k, v = mixer.project(row[None])
        scores = Scores(mixer.options, q[0], k[0])
        squares += scores.outputs(scores.teacher().softmax(-1), v[0]).square().mean((0, 1))
    sizes = (squares / len(x)).sqrt()
    return {"norm.weight": sizes}, {"output_norm": round(float(sizes.mean()), 4)}


def _hybrid(
    conversion: Conversion, mixer: Any, x: Tensor, own: dict[str, Tensor], number: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return hybrid_weights(conversion.student.layers[number], mixer, x, own, conversion.choices.seed + number)


STUDENTS: dict[str, Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]] = {
    "gsa": _gsa,
    "gla": _gla,
    "retnet": _normed,
    "supra": _normed,
    "hybrid": _hybrid,
}
"""How the new weights of a layer are found: its teacher's mixer and inputs, and the weights as they begin."""
