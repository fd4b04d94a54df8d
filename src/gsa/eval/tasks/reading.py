"""Tasks of ours, as lm-evaluation-harness knows tasks: a prompt, and a text or a choice that should follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from gsa.eval.tasks.scores import Score


class Question(TypedDict):
    """A document of such a task."""

    id: str
    prompt: str
    """All that the model reads, examples too."""
    choices: list[str]
    """What may follow, of which the likeliest is taken; none, where the model writes."""
    right: list[str]
    """The texts that would be right."""


class ReadingTask(ConfigurableTask):  # type: ignore[misc]  # the harness has no types
    """Questions with their scores. Prompts are ready made, so the harness adds nothing to them."""

    def __init__(
        self,
        name: str,
        version: str,
        questions: Sequence[Question],
        scores: Mapping[str, Score],
        *,
        max_tokens: int,
        combined: Mapping[str, Callable[[Sequence[Any]], float]] | None = None,
        per_character: bool = False,
    ) -> None:
        """Args: `combined` are metrics of all scores of a document together, with their aggregations.

        With `per_character`, the log-likelihood of a choice is divided by its length.
        """
        self._scores = scores
        self._combined = combined or {}
        self._per_character = per_character
        rows = Dataset.from_list([dict(question) for question in questions])
        metrics = [*((metric, "mean") for metric in scores), *self._combined.items()]
        super().__init__(
            config={
                "task": name,
                "custom_dataset": lambda **_: {"test": rows},
                "test_split": "test",
                "output_type": "generate_until",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": max_tokens, "do_sample": False},
                "doc_to_text": "prompt",
                "doc_to_target": lambda doc: doc["right"][0],
                "process_results": self._score,
                "metric_list": [
                    {"metric": metric, "aggregation": aggregation, "higher_is_better": True}
                    for metric, aggregation in metrics
                ],
                "num_fewshot": 0,
                "metadata": {"version": version},
            }
        )

    def construct_requests(self, doc: Question, ctx: str, **kwargs: Any) -> Any:
        if not doc["choices"]:
            return super().construct_requests(doc, ctx, **kwargs)
        for unused in ("apply_chat_template", "chat_template"):
            kwargs.pop(unused, None)
        return [
            Instance(request_type="loglikelihood", doc=doc, arguments=(ctx, f" {choice}"), idx=number, **kwargs)
            for number, choice in enumerate(doc["choices"])
        ]

    def _score(self, doc: Question, results: Sequence[Any]) -> dict[str, Any]:
        choices = doc["choices"]
        text = self._likeliest(choices, [likelihood for likelihood, _ in results]) if choices else results[0]
        found = {metric: score(text, doc["right"]) for metric, score in self._scores.items()}
        return {**found, **{metric: tuple(found.values()) for metric in self._combined}}

    def _likeliest(self, choices: Sequence[str], likelihoods: Sequence[float]) -> str:
        lengths = [len(choice) if self._per_character else 1 for choice in choices]
        return max(zip(likelihoods, lengths, choices, strict=True), key=lambda each: each[0] / each[1])[2]
