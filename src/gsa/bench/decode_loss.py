"""What each format of the weights does to the loss, decoded token by token as text is written; and what each kind of
products does to it, read as prompts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gsa.infer import Model

SEQUENCES = 16


def losses(models: dict[str, Model], ids: Tensor) -> dict[str, float]:
    """Mean loss in nats of sequences [16, T] by each model, one token at a time."""
    return {name: _loss(model, ids) for name, model in models.items()}


def _loss(model: Model, ids: Tensor) -> float:
    import torch

    from gsa.infer.runners import make_runner

    here = make_runner(model, len(ids))
    for place in range(len(ids)):
        here.put(place, model.init_state())
    total = 0.0
    for t in range(ids.shape[1] - 1):
        logits = here.step(ids[:, t].tolist(), range(len(ids)))
        total += float(torch.nn.functional.cross_entropy(logits, ids[:, t + 1], reduction="sum"))
    return total / (len(ids) * (ids.shape[1] - 1))


def prompt_losses(models: dict[str, Model], ids: Tensor) -> dict[str, float]:
    """Mean loss in nats of sequences [N, T] by each model, each read at once."""
    return {name: _prompt_loss(model, ids) for name, model in models.items()}


def _prompt_loss(model: Model, ids: Tensor) -> float:
    import torch

    total = 0.0
    with torch.inference_mode():
        for text in ids:
            x, _ = model.lm.model(text[None, :-1])
            total += float(torch.nn.functional.cross_entropy(model.lm.lm_head(x[0]), text[1:]))
    return total / len(ids)


def written_by(model: Model, length: int) -> Tensor:
    """Sequences [16, length] that a model writes by itself: a text on which random weights are at their best."""
    import torch

    from gsa.infer import Engine, Sampling

    engine = Engine(model, batch_size=SEQUENCES)
    settings = [Sampling(max_tokens=length, temperature=1.0, top_p=1.0, seed=seed) for seed in range(SEQUENCES)]
    starts = [[100 + seed] for seed in range(SEQUENCES)]
    return torch.tensor([done.tokens for done in engine.generate(starts, settings)])


def of_a_book(length: int) -> Tensor:
    """Sequences [16, length] of gsa-tiny's tokens, from all over the book in the package."""
    import torch

    from gsa import pretrained
    from gsa.data.tokenizer import load_tokenizer

    (ids,) = load_tokenizer(pretrained.folder("gsa-tiny")).encode([pretrained.book()])
    starts = range(0, len(ids) - length, (len(ids) - length) // SEQUENCES)[:SEQUENCES]
    return torch.stack([torch.from_numpy(ids[start : start + length].astype("int64")) for start in starts])
