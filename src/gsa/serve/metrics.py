"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gsa.infer.requests import Generation

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counters of one server. They have a registry of their own, so that servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("gsa_requests", "Requests by route and status.", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "gsa_request_seconds", "Time of whole requests by route.", ["route"], buckets=_SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "gsa_first_token_seconds", "Time from a request to its first token.", buckets=_SECONDS, registry=registry
        )
        self.between_tokens = Histogram(
            "gsa_between_tokens_seconds", "Time between two tokens of an answer.", buckets=_SECONDS, registry=registry
        )
        self.answers = Counter("gsa_answers", "Answers by why they ended.", ["reason"], registry=registry)
        self.prompt_tokens = Counter("gsa_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.cached_tokens = Counter(
            "gsa_cached_tokens", "Tokens of prompts that did not have to be read: a state had them.", registry=registry
        )
        self.written_tokens = Counter("gsa_written_tokens", "Tokens of answers.", registry=registry)

    def gauge(self, name: str, what: str) -> Gauge:
        """A number that is looked up when it is asked for: see `Gauge.set_function`."""
        return Gauge(name, what, registry=self.registry)

    def finished(self, generation: Generation) -> None:
        """Counts an answer that has ended."""
        self.answers.labels(generation.reason).inc()
        self.prompt_tokens.inc(generation.prompt_tokens)
        self.cached_tokens.inc(generation.cached_tokens)
        self.written_tokens.inc(len(generation.tokens))

    def text(self) -> bytes:
        """All of it in Prometheus' own format."""
        return generate_latest(self.registry)
