"""Checks of a converted folder: its weights against the source's, and every way to read a text against the others.

All in fp32, on random tokens. Shape letters: T time, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gsa.convert.attention import Scores
from gsa.convert.mapping import HEAD, our_name
from gsa.convert.record import read_record
from gsa.convert.run import RECORD
from gsa.convert.sources import Source, open_source
from gsa.errors import GSAError
from gsa.files import named
from gsa.infer import Engine, Model
from gsa.mixers.attention import Attention
from gsa.mixers.heads import HeadMixer
from gsa.models.checkpoint import described_weights, read_model
from gsa.models.config import ModelConfig
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.sampling import Sampling
from gsa.table import Column, Table

TOLERANCE = 1e-4
"""Largest difference of logits, over the largest logit."""
LEAST, MORE = 48, 40
"""Tokens of the trial: so many, or so many more than a student sees exactly."""


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    passed: bool
    found: str
    """What was compared, or how far it is off."""


def verify_folder(folder: str | Path, source: str | Path | None = None) -> list[Check]:
    """Every check of a converted folder. Its source is the one that it was made from, unless another is given."""
    place = named(folder, "verify")
    record = read_record(place)
    model = read_model(place, dtype=torch.float32).eval().requires_grad_(False)
    if unknown := record.trained - model.state_dict().keys():
        raise GSAError(f"verify: {place / RECORD}: {min(unknown)}, which it says was trained, is not part of the model")
    if not (finite := numbers_are_finite(model)).passed:
        return [finite]  # the others would compare with nothing
    origin, trained = open_source(record.source if source is None else source), record.trained_copies
    with torch.inference_mode():
        stored = next(iter(described_weights(place).values())).dtype
        return [
            finite,
            weights_are_the_sources(model, origin, stored, trained),
            heads_are_in_order(model, origin, stored, trained),
            *identity(model, teacher_of(model, record.teacher), len(trained)),
            *ways_to_read(model),
            generated(model),
        ]


def numbers_are_finite(model: LM) -> Check:
    """No weight is NaN or infinite."""
    wrong = [name for name, x in model.state_dict().items() if not x.isfinite().all()]
    found = f"{wrong[0]} has NaN or infinity" if wrong else f"{len(model.state_dict())} tensors"
    found += f", as {len(wrong) - 1} others have" if len(wrong) > 1 else ""
    return Check("weights are finite", not wrong, found)


def teacher_of(model: LM, config: ModelConfig) -> LM:
    """The teacher, with the student's copies of its weights."""
    with without_memory():
        teacher = LM(config)
    weights = {name: x for name, x in model.state_dict().items() if name in teacher.state_dict()}
    teacher.load_state_dict(weights, assign=True)
    teacher.tie_weights()
    return teacher.eval().requires_grad_(False)


def weights_are_the_sources(model: LM, source: Source, dtype: torch.dtype, trained: Collection[str] = ()) -> Check:
    """Every tensor that both have, but for those that were trained: to the bit, in the dtype of the folder."""
    here, compared, rounded = model.state_dict(), 0, False
    for name in source.tensors:
        own = our_name(name)
        if own in here and own not in trained and not (own == HEAD and model.config.tie_word_embeddings):
            theirs = source.read(name)
            if not torch.equal(here[own], theirs.to(dtype).float()):
                return Check("weights are the source's", False, f"{name} differs")
            compared, rounded = compared + 1, rounded or not torch.equal(here[own], theirs.float())
    told = f", rounded to {str(dtype).removeprefix('torch.')}" if rounded else ""
    told += f", and {len(trained)} that were trained" if trained else ""
    return Check("weights are the source's", compared > 0, f"{compared} tensors, equal{told}")


def heads_are_in_order(model: LM, source: Source, dtype: torch.dtype, trained: Collection[str] = ()) -> Check:
    """A layer's heads: query head i belongs to key head i * H // HQ, and to the rows and columns of its number.

    For attention and hybrid, against attention written out head by head from the source's weights; those that were
    trained are the student's own. For the others,
    the keys and values of one head are changed, and just the outputs of its query heads must turn.
    """
    name, mixer = "heads are in order", model.model.layers[0].mixer
    x = torch.randn(1, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    if isinstance(mixer, Attention):
        if mixer.options.window is not None:
            x = x[:, : mixer.options.window]
        own = {name: x for name, x in model.state_dict().items() if name in trained}
        off = _off(mixer(x)[0][0], _written_out(mixer, source, dtype, x[0], own))
        return Check(name, off < TOLERANCE, f"off by {off:.1e} from attention written out")
    assert isinstance(mixer, HeadMixer)
    options = mixer.options
    readers = options.num_attention_heads // options.kv_heads
    before, wrong = _head_outputs(mixer, x), []
    for head in range(options.kv_heads):
        turned = _turned(before, _head_outputs(mixer, x, head))
        expected = [i // readers == head for i in range(options.num_attention_heads)]
        wrong += [] if turned == expected else [head]
    found = f"{options.kv_heads} key/value heads, each for {readers} query heads"
    return Check(name, not wrong, f"wrong for key/value heads {wrong}" if wrong else found)


def _written_out(mixer: Attention, source: Source, dtype: torch.dtype, x: Tensor, own: dict[str, Tensor]) -> Tensor:
    """Attention of x [T, D] by the source's first layer, one head after the other; some weights are given."""
    options, names = mixer.options, {our_name(name): name for name in source.tensors}
    K, readers = options.key_width, options.heads // options.kv_heads

    @cache
    def weight(name: str) -> Tensor:
        name = f"model.layers.0.mixer.{name}"
        return own[name] if name in own else source.read(names[name]).to(dtype).float()

    def part(name: str, head: int) -> Tensor:
        rows = slice(head * K, (head + 1) * K)
        y = x @ weight(f"{name}_proj.weight")[rows].T
        if options.qkv_bias:
            y = y + weight(f"{name}_proj.bias")[rows]
        if options.qk_norm and name != "v":
            y = y * (y.square().mean(-1, keepdim=True) + options.rms_norm_eps).rsqrt() * weight(f"{name}_norm.weight")
        return y

    one = type(options)(
        **{
            **vars(options),
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": K,
            "hidden_size": K,
        }
    )
    out, y = weight("o_proj.weight"), torch.zeros_like(x)
    for head in range(options.heads):
        q, k, v = part("q", head), part("k", head // readers), part("v", head // readers)
        p = Scores(one, q[:, None], k[:, None]).teacher()[0].softmax(-1)
        y += p @ v @ out[:, head * K : (head + 1) * K].T
    return y


def _head_outputs(mixer: HeadMixer, x: Tensor, changed: int | None = None) -> Tensor:
    """What comes before the last matrix [T, HQ, V]; with the values of one key/value head reversed, if asked for."""
    options, seen = mixer.options, list[Tensor]()
    hook = mixer.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    V, rows = options.value_width, mixer.get_parameter("v_proj.weight")
    before = rows.clone()
    try:
        if changed is not None:
            own = slice(changed * V, (changed + 1) * V)
            rows[own] = rows[own].flip(0)
        mixer(x)
    finally:
        hook.remove()
        rows.copy_(before)
    return seen[0][0].unflatten(-1, (-1, V))


def _turned(a: Tensor, b: Tensor) -> list[bool]:
    """Whether the outputs [T, HQ, V] of each head point elsewhere: a norm over all heads changes their length."""
    similar = torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-12)
    nothing = (a.abs().amax(-1) == 0) & (b.abs().amax(-1) == 0)
    return ((similar < 1 - 1e-4) & ~nothing).any(0).tolist()


def identity(model: LM, teacher: LM, trained: int) -> Iterator[Check]:
    """Within what a student sees exactly, its logits are its teacher's.

    If copied weights were trained, they are those of softmax attention with the student's weights.
    """
    exact = _exact(model)
    if exact is not None:
        ids = _ids(model, exact)
        off = _off(model(ids).logits, teacher(ids).logits)
        name = "is softmax attention" if trained else "is the teacher"
        told = f"; not the teacher's, as {trained} of its tensors were trained" if trained else ""
        name += "" if exact == LEAST else f" for {exact} tokens"
        yield Check(name, off < TOLERANCE, f"off by {off:.1e}{told}")


def _exact(model: LM) -> int | None:
    """Tokens for which a student is its teacher; None if it is for none."""
    found = []
    for options in model.config.layers:
        if options.mixer not in ("attention", "hybrid"):
            return None
        found.append(options.window + options.num_sinks if options.mixer == "hybrid" else LEAST)  # type: ignore[attr-defined]
    return min(found)


def ways_to_read(model: LM) -> Iterator[Check]:
    """A text whole, in two parts, token by token, between pads, and behind another text."""
    ids = _ids(model)
    T = ids.shape[1]
    whole = model(ids).logits

    def split() -> Tensor:
        first = model(ids[:, : T // 3])
        return torch.cat([first.logits, model(ids[:, T // 3 :], first.state).logits], 1)

    def steps() -> Tensor:
        state, parts = model.init_state(1), []
        for i in range(T):
            out = model(ids[:, i : i + 1], state)
            state = out.state
            parts.append(out.logits)
        return torch.cat(parts, 1)

    def padded() -> Tensor:
        mask = torch.tensor([[0] * 5 + [1] * T + [0] * 3])
        return model(torch.nn.functional.pad(ids, (5, 3)), mask=mask).logits[:, 5 : 5 + T]

    def packed() -> Tensor:
        both = torch.cat([ids.flip(1)[:, :-7], ids], 1)
        borders = torch.tensor([0, T - 7, 2 * T - 7], dtype=torch.int32)
        return model(both, cu_seqlens=borders).logits[:, T - 7 :]

    ways: dict[str, Callable[[], Tensor]] = {
        "whole = split": split,
        "whole = token by token": steps,
        "pads change nothing": padded,
        "a text packed before it changes nothing": packed,
    }
    for name, read in ways.items():
        off = _off(read(), whole)
        yield Check(name, off < TOLERANCE, f"off by {off:.1e}")


def generated(model: LM, count: int = 16) -> Check:
    """Tokens that the engine writes are those with the highest logits when all is read at once."""
    ids = _ids(model)
    engine = Engine(Model.load(model, "fp32", compute="fp32", device="cpu"))
    written = engine.generate(ids[0], Sampling(max_tokens=count, temperature=0)).tokens
    more = torch.tensor([written])
    logits = model(torch.cat([ids, more], 1)).logits[0, ids.shape[1] - 1 : -1]
    behind = (logits.amax(-1) - logits.gather(1, more.T)[:, 0]).max() / logits.abs().max()
    return Check("generate with a cache = whole", float(behind) < TOLERANCE, f"{count} tokens, off by {behind:.1e}")


def _ids(model: LM, count: int | None = None) -> Tensor:
    """Random tokens [1, T]: more than a student sees exactly, unless it is said how many."""
    near = max(
        (getattr(options, "window", 0) or 0) + getattr(options, "num_sinks", 0) for options in model.config.layers
    )
    T = max(LEAST, near + MORE) if count is None else count
    return torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(T))


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def table(folder: str | Path, checks: list[Check]) -> Table:
    """Pass or fail, for people."""
    columns = [
        Column("check", lambda check: check.name, left=True),
        Column("", lambda check: "pass" if check.passed else "FAIL", left=True),
        Column("found", lambda check: check.found, left=True),
    ]
    failed = sum(not check.passed for check in checks)
    return Table(
        str(folder), columns, checks, [f"{failed} of {len(checks)} checks failed." if failed else "All passed."]
    )
