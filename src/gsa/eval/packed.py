"""PackedModel: sequences of any lengths end to end through a model of ours, each from a state of its own.

There are no pads, and logits are computed only where something is asked. A sequence's answers do not depend on its
company: where products of few tokens would be computed in other numbers than those of many, they get company too. Shape
letters: T tokens of all sequences, R rows, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from gsa.eval.scoring import Job
from gsa.infer.model import Model
from gsa.models.state import ModelState
from gsa.ops.linear import MAX_COLUMNS
from gsa.ops.native import rows as native_rows

PIECE = 2048
"""Tokens of one sequence that are read at once; longer ones are read alone, in pieces, until so many are left."""
LOGITS_AT_ONCE = 2**24


class Start(NamedTuple):
    """Where a sequence goes on: one of the sequences of a state."""

    states: ModelState
    number: int


class PackedModel:
    """Reads jobs with a model."""

    def __init__(self, model: Model) -> None:
        self.model, self._lm = model, model.lm

    @torch.inference_mode()
    def read(self, jobs: Sequence[Job[Start]], keep: bool = False) -> tuple[list[Tensor], ModelState | None]:
        """What each job asked: log-probabilities and whether each is the highest [asked, 2]; and all states behind."""
        answers: list[list[Tensor]] = [[] for _ in jobs]
        short = []
        for job, answer in zip(jobs, answers, strict=True):
            while len(job.ids) > PIECE:
                piece, job = job.cut(PIECE)
                part, states = self._pass([piece], keep=True)
                assert states is not None
                answer += part
                job.start = Start(states, 0)
            short.append(job)
        last, states = self._pass(short, keep)
        return [torch.cat([*answer, part]) for answer, part in zip(answers, last, strict=True)], states

    def _pass(self, jobs: Sequence[Job[Start]], keep: bool) -> tuple[list[Tensor], ModelState | None]:
        """The same for jobs that are short enough to be read at once."""
        lengths = [len(job.ids) for job in jobs]
        starts = [job.start for job in jobs]
        ids = [id_ for job in jobs for id_ in job.ids]
        if len(ids) <= MAX_COLUMNS:  # so few would be multiplied in other numbers: they get company
            lengths.append(MAX_COLUMNS + 1 - len(ids))
            starts.append(None)
            ids += [0] * lengths[-1]
        device = self.model.device
        borders = pad(torch.tensor(lengths).cumsum(0), (1, 0))
        packed, cu_seqlens = torch.tensor([ids], device=device), borders.to(device)
        x, after = self._lm.model(packed, self._states(starts), cu_seqlens=cu_seqlens, return_state=keep)
        begins = zip(jobs, borders.tolist(), strict=False)
        asked = [(begin + place, token) for job, begin in begins for place, token, _ in job.asked]
        return list(self._asked(x[0], asked).split([len(job.asked) for job in jobs])), after

    def _states(self, starts: Sequence[Start | None]) -> ModelState | None:
        """The states of sequences as those of one batch; None if none has begun."""
        if all(start is None for start in starts):
            return None
        fresh = Start(self._lm.init_state(1), 0)
        parts = []
        for _, run in groupby((start or fresh for start in starts), lambda start: id(start.states)):
            members = list(run)
            parts.append(members[0].states.select(torch.tensor([start.number for start in members])))
        return parts[0] if len(parts) == 1 else ModelState.cat(parts)

    def _asked(self, x: Tensor, asked: list[tuple[int, int]]) -> Tensor:
        """What stands behind features x [T, D]: log-probability of tokens, and whether each is the highest [R, 2]."""
        if not asked:
            return torch.empty(0, 2)
        places, tokens = torch.tensor(asked, device=x.device).T
        rows, row_of = places.unique_consecutive(return_inverse=True)
        count = len(rows)
        if count <= MAX_COLUMNS:
            rows = pad(rows, (0, MAX_COLUMNS + 1 - count))
        most = max(LOGITS_AT_ONCE // self.model.vocab_size, 4 * MAX_COLUMNS)
        found, begin = [], 0
        for piece in rows.tensor_split(-(-len(rows) // most)):
            logits = self._lm.lm_head(x[piece])
            best = logits.argmax(-1)
            here = (row_of >= begin) & (row_of < begin + len(piece))
            own, token = row_of[here] - begin, tokens[here]
            top = logits.gather(1, best[:, None])[:, 0]
            log_probs = logits[own, token] - top[own] - _losses(logits, best)[own]
            found.append(torch.stack([log_probs, (best[own] == token).float()], 1))
            begin += len(piece)
        return torch.cat(found).cpu()


def _losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of logits [R, V] [R], in fp32."""
    if native_rows.usable(logits):
        return native_rows.cross_entropy(logits, tokens, gradient=False)
    return cross_entropy(logits.float(), tokens, reduction="none")
