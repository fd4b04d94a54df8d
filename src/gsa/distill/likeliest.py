"""The teacher's likeliest next tokens, kept on disk: computed once, and learned from by every student.

    FOLDER/KEY/about.json            what this is of: teacher, tokens, length of rows
    FOLDER/KEY/row-00000012.safetensors  of one row: ids [T, k] and log_probs [T, k], likeliest first

KEY is a hash of all that decides the numbers. A row is written when it is first asked for, whole or not at all, so that
a run that is killed, or two at once, lose and break nothing. Shape letters: T tokens, k likeliest, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gsa.data.batches import MicroBatch, Rows
from gsa.errors import GSAError
from gsa.files import byte_count, free_bytes, written
from gsa.models.checkpoint import opened
from gsa.models.lm import LM

LIKELIEST = 64
PIECE = 256
"""Tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class Likeliest:
    """Next tokens and their log-probabilities, [T, k] each."""

    ids: Tensor
    log_probs: Tensor


class TeacherRows:
    """Rows of a teacher's likeliest tokens, read from disk, or computed and kept."""

    def __init__(self, folder: Path, teacher: LM, teacher_print: str, rows: Rows, precision: torch.dtype):
        self.teacher, self.rows, self.precision = teacher, rows, precision
        self.count = min(LIKELIEST, teacher.config.vocab_size)
        about = {
            "teacher": teacher_print,
            "tokens": rows.tokens.fingerprint,
            "length": rows.length,
            "reset_at_documents": rows.reset_at_documents,
            "likeliest": self.count,
            "precision": str(precision),
        }
        text = json.dumps(about, indent=2) + "\n"
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / "about.json").exists():
                with written(self.folder / "about.json") as file:
                    file.write_text(text)
        except OSError as error:
            raise GSAError(f"distill: logits {self.folder} cannot be written: {error}") from None

    def check_space(self, tokens: int) -> None:
        """Raises unless so many tokens have room on the disk."""
        needed, free = tokens * self.count * 6, free_bytes(self.folder)
        if needed > free:
            raise GSAError(
                f"distill: logits of {tokens} tokens take {byte_count(needed)}, the disk of {self.folder} has "
                f"{byte_count(free)} free; another place is chosen with logits"
            )

    def read(self, rows: list[int]) -> Likeliest:
        """The likeliest tokens of rows, end to end."""
        found = [self._kept(row) or self._computed(row) for row in rows]
        return Likeliest(torch.cat([one.ids for one in found]), torch.cat([one.log_probs for one in found]))

    def _place(self, row: int) -> Path:
        return self.folder / f"row-{row:08d}.safetensors"

    def _kept(self, row: int) -> Likeliest | None:
        place = self._place(row)
        if not place.exists():
            return None
        with opened(place) as file:
            names = set(file.keys())
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
        shape = [self.rows.length, self.count]
        if names != {"ids", "log_probs"} or any(list(x.shape) != shape for x in tensors.values()):
            raise GSAError(f"{place}: expected ids and log_probs {shape}; remove it, and it is computed again")
        ids, log_probs = tensors["ids"].long(), tensors["log_probs"].float()
        if int(ids.min()) < 0 or int(ids.max()) >= self.teacher.config.vocab_size or not bool((log_probs <= 0).all()):
            raise GSAError(f"{place}: no tokens with log-probabilities; remove it, and it is computed again")
        return Likeliest(ids, log_probs)

    @torch.no_grad()
    def _computed(self, row: int) -> Likeliest:
        batch = on_device(self.rows.micro_batch([row]), self.teacher)
        with in_precision(self.teacher, self.precision):
            x, _ = self.teacher.model(batch.ids, cu_seqlens=batch.cu_seqlens, return_state=False)
        ids, log_probs = [], []
        for piece in x[0].float().split(PIECE):  # logits in fp32: in bf16 they would be off by 0.06
            top = torch.log_softmax(piece @ self.teacher.lm_head.weight.T, -1).topk(self.count)
            ids.append(top.indices.cpu())
            log_probs.append(top.values.cpu())
        tensors = {"ids": torch.cat(ids).int(), "log_probs": torch.cat(log_probs).half()}
        try:
            with written(self._place(row)) as file:
                save_file(tensors, file)
        except OSError as error:
            raise GSAError(f"distill: {self._place(row)} cannot be written: {error}") from None
        return Likeliest(tensors["ids"].long(), tensors["log_probs"].float())


def on_device(batch: MicroBatch, model: LM) -> MicroBatch:
    """A batch where a model is."""
    device = model.lm_head.weight.device
    cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
    return MicroBatch(batch.ids.to(device), cu_seqlens, batch.targets)


def in_precision(model: LM, precision: torch.dtype) -> torch.autocast:
    """A context in which a model computes in a precision."""
    return torch.autocast(model.lm_head.weight.device.type, precision, enabled=precision != torch.float32)


def fingerprint(model: LM) -> str:
    """A hash of a model's config and weights."""
    found = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    state: dict[str, Any] = model.state_dict()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
