"""What a model in training writes, to be read at evaluations."""

from __future__ import annotations

import torch

from gsa.data.tokenizer import Tokenizer
from gsa.models.lm import LM


def sample(model: LM, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The likeliest continuation of a prompt, up to `count` tokens or the end of the text.

    Nothing is drawn at random and no weight is touched, so training goes on as if it had not been.
    """
    (encoded,) = tokenizer.encode([prompt])
    ids = torch.tensor([[int(id_) for id_ in encoded] or [tokenizer.eos_id]], device=model.lm_head.weight.device)
    written: list[int] = []
    # Compiled blocks would be compiled anew for single tokens.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        state = None
        while len(written) < count:
            output = model(ids, state)
            state = output.state
            best = int(output.logits[0, -1, : tokenizer.vocab_size].argmax())
            if best == tokenizer.eos_id:
                break
            written.append(best)
            ids = torch.full_like(ids[:, :1], best)
    return tokenizer.decode(written)
