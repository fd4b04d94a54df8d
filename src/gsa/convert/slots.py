"""How the slots of `hybrid` begin: with clusters of the teacher's keys, and the weight that its attention gives them.

A query that asks for one key asks for those like it, too. So slots share tokens by their keys: a slot is a cluster of
them, and an average of the cluster is as good as its members as far as queries cannot tell these apart. Distances of
keys are differences of scores, over the teacher's own queries. With gates instead, slots have half-lives that are
quantiles of how far back the teacher looks.

Shape letters: N texts, T time, D model width, H key/value heads, HQ query heads, K width of a head, M slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsa.convert.attention import Scores
from gsa.convert.distances import gate_bias, measured, quantiles, spread
from gsa.mixers.attention import Attention
from gsa.mixers.rotary import rotate
from gsa.mixers.slots import SlotRouter
from gsa.models.init import without_memory
from gsa.ops import joined_slots

SHARPNESS = 64.0
"""Of the softmax over clusters, by squared differences of scores: a token goes to the nearest, but for close calls."""
ROUNDS = 12
"""Of k-means."""
LARGEST_BIAS = 8.0
SMALLEST = 1e-6
"""Share of the softmax that is told from none."""

Projected = list[tuple[Tensor, Tensor, Tensor]]
"""q [1, T, HQ, K], k and v [1, T, H, K] of every text."""


def hybrid_weights(
    options: Any, mixer: Attention, x: Tensor, own: dict[str, Tensor], seed: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """New weights of a layer with these options, from its teacher's mixer and inputs x [N, T, D]; and facts of it."""
    projected = [mixer.project(row[None]) for row in x]
    attention = measured(mixer, x, options.window, options.num_sinks)
    router, facts = dict[str, Tensor](), dict[str, Any]()
    if options.slot_router == "softmax":
        router = clusters(projected, options.num_slots, seed)
    else:
        half_lives = quantiles(attention.ages, options.num_slots)
        token = torch.stack([torch.cat([k, v], -1).mean((0, 1)) for _, k, v in projected]).mean(0)  # [H, 2K]
        logits = torch.einsum("hmc,hc->hm", own["slot_router.weight"], token)
        router, facts = {"slot_router.bias": gate_bias(half_lives, options, logits)}, spread(half_lives)
    module = _router(options, {**own, **router})
    parts = [slot_parts(options, module, mixer, *(part[0] for part in parts)) for parts in projected]
    fit = SlotParts(*(torch.cat(same) for same in zip(*parts, strict=True)))
    b = fitting_bias(fit)
    facts |= {
        "beyond": [round(share, 4) for share in attention.beyond.tolist()],
        "slots": [round(share, 4) for share in torch.sigmoid(fit.logits + b).mean(0).tolist()],
        "slot_bias": [round(one, 3) for one in b.tolist()],
    }
    return {**router, "slot_bias": b}, facts


def _router(options: Any, weights: dict[str, Tensor]) -> SlotRouter:
    sizes = (options.kv_heads, options.num_slots, options.key_width)
    with without_memory():
        router = SlotRouter(options.slot_router, *sizes, options.gate_temperature)
    prefix = "slot_router."
    own = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    router.load_state_dict(own, assign=True)
    return router


def clusters(projected: Projected, count: int, seed: int) -> dict[str, Tensor]:
    """The router's weights with which each slot takes the keys of a cluster, by head."""
    K = projected[0][1].shape[-1]
    keys = torch.cat([k[0] for _, k, _ in projected]).transpose(0, 1)  # [H, tokens, K]
    queries = torch.cat([q[0] for q, *_ in projected]).unflatten(1, (len(keys), -1)).permute(1, 0, 2, 3).flatten(1, 2)
    weights, biases = [], []
    for number, (k, q) in enumerate(zip(keys, queries, strict=True)):
        # Behind this map, the squared distance of two keys is the mean square of the difference of their scores.
        values, vectors = torch.linalg.eigh(q.T @ q / (len(q) * K))
        apart = vectors * values.clamp(min=0).sqrt()
        found = centres(k @ apart, count, torch.Generator().manual_seed(seed + number))
        # -|x - c|^2 / 2, less what is the same for all clusters
        weights.append(torch.cat([SHARPNESS * found @ apart.T, torch.zeros(count, K)], 1))
        biases.append(-SHARPNESS * found.square().sum(1) / 2)
    return {"slot_router.weight": torch.stack(weights), "slot_router.bias": torch.stack(biases)}


def centres(x: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Centres [count, K] of clusters of x [tokens, K], by k-means; one that has lost all its members begins anew."""

    def drawn() -> Tensor:
        return x[torch.randint(len(x), (count,), generator=random)]

    found = x[torch.randperm(len(x), generator=random)[:count]] if len(x) >= count else drawn()
    for _ in range(ROUNDS):
        nearest = (x @ found.T - found.square().sum(1) / 2).argmax(1)
        sizes = torch.bincount(nearest, minlength=count)[:, None]
        sums = torch.zeros_like(found).index_add_(0, nearest, x)
        found = torch.where(sizes > 0, sums / sizes.clamp(min=1), drawn())
    return found


class SlotParts(NamedTuple):
    """With s = sigmoid(logits + b) the slots' share of the softmax, the squared error of outputs is a constant and
    2 s cross + s^2 square; all [T - W - S, HQ]."""

    logits: Tensor
    cross: Tensor
    square: Tensor


def slot_parts(options: Any, router: SlotRouter, mixer: Attention, q: Tensor, k: Tensor, v: Tensor) -> SlotParts:
    """Slots beside what is near and beside the teacher, for q [T, HQ, K], k and v [T, H, K] of a text."""
    W, S, T, rope = options.window, options.num_sinks, len(q), options.rope
    scores = Scores(mixer.options, q, k)
    near, near_lse = (x[W + S :] for x in scores.near(v, W, S))
    teacher = scores.outputs(scores.teacher().softmax(-1), v)[W + S :]
    positions = torch.arange(T)[None]
    own = options.slot_positions == "own"
    asked = positions if own else torch.full_like(positions, W)
    queries = rotate(q[None], asked, rope)[:, W + S :]
    held = (rotate(k[None], positions, rope) if own else k[None])[:, S : T - W]
    left_k, left_v = k[None, S : T - W], v[None, S : T - W]
    numbers = dict(zip(("slot_scale", "slot_mass", "slot_bias"), torch.tensor([[0.0], [1.0], [0.0]]), strict=True))
    g, s = router(left_k, left_v)
    # Beside nothing but zeros, slots give their share times their output; and of values that are 1, the share.
    found, _ = joined_slots(
        queries,
        held,
        torch.cat([left_v, torch.ones_like(left_v[..., :1])], -1),
        g,
        s,
        near.new_zeros(1, *near.shape[:2], near.shape[2] + 1),
        near_lse[None],
        **{name: x.repeat(options.heads) for name, x in numbers.items()},
    )
    share = found[0, :, :, -1].clamp(SMALLEST, 1 - SMALLEST)
    away = found[0, :, :, :-1] / share[..., None] - near
    return SlotParts(torch.logit(share), ((near - teacher) * away).sum(-1), away.square().sum(-1))


def fitting_bias(parts: SlotParts) -> Tensor:
    """The bias [HQ] with which outputs are closest to the teacher's."""
    tried = torch.linspace(-LARGEST_BIAS, LARGEST_BIAS, 16 * int(LARGEST_BIAS) + 1)
    errors = []
    for b in tried:
        s = torch.sigmoid(parts.logits + b)
        errors.append((2 * s * parts.cross + s.square() * parts.square).sum(0))
    return tried[torch.stack(errors).argmin(0)]
