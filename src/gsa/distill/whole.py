"""The second stage: the whole student learns its teacher's distribution of the next token."""

from __future__ import annotations

from gsa.distill.divergence import likeliest_divergence
from gsa.distill.likeliest import TeacherRows, on_device
from gsa.models.lm import LM


class Whole:
    """The divergence of a student's next tokens from its teacher's, a mean over tokens."""

    def __init__(self, student: LM, teacher_rows: TeacherRows):
        self.student, self.teacher_rows = student, teacher_rows

    def backward(self, rows: list[int], step: int, weight: float) -> float:
        """Adds the gradient of `weight` times the divergence on rows; the divergence."""
        batch = on_device(self.teacher_rows.rows.micro_batch(rows), self.student)
        teacher = self.teacher_rows.read(rows)
        x, _ = self.student.model(batch.ids, cu_seqlens=batch.cu_seqlens, return_state=False)
        head = self.student.lm_head.weight
        x = x.flatten(0, 1)
        loss = likeliest_divergence(x, head, teacher.ids.to(x.device), teacher.log_probs.to(x.device))
        (loss * weight).backward()
        return float(loss.detach())
