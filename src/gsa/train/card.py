"""The model card: what a model is, what it was trained on, how good it is, and code that loads it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from gsa.extras import DISTRIBUTION
from gsa.files import byte_count
from gsa.models.config import ModelConfig
from gsa.models.lm import LM
from gsa.options import MOST

_SOURCES = 20  # named one by one


@dataclass(frozen=True)
class CardFacts:
    """What a card says beside what the checkpoint's state says."""

    name: str
    """Of the exported folder."""
    model: LM
    """Without memory for its weights."""
    dtype: str
    weight_bytes: int
    ema: bool
    """Whether the weights are the moving average."""
    with_tokenizer: bool
    licence: str | None


def model_card(facts: CardFacts, state: dict[str, Any]) -> str:
    """README.md in Markdown, with the front matter that the Hugging Face hub reads; what is not known is left out."""
    config = facts.model.config
    version = f" {_plain(_text(state, 'gsa'))}" if _text(state, "gsa") else ""
    parts = [
        _front_matter(facts, config),
        f"# {_plain(facts.name)}",
        f"A language model with the token mixer {_code(config.mixer)}, trained with {DISTRIBUTION}{version}.",
        _table(_model_rows(facts, config, state)),
        *_section("Training", [*_training_rows(state), *_data_rows(state)]),
        *_section("Evaluation", _evaluation_rows(facts, state)),
        "## Use",
        _code_with_transformers(facts),
        _code_with_gsa(facts),
        *_settings(state),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: CardFacts, config: ModelConfig) -> str:
    mixers = sorted({options.mixer for options in config.layers})
    lines = ["---", "library_name: gsa", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in dict.fromkeys(("gated-slot-attention", *mixers))]
    if facts.licence is not None:
        lines.append(f"license: {json.dumps(facts.licence)}")
    return "\n".join([*lines, "---"])


def _model_rows(facts: CardFacts, config: ModelConfig, state: dict[str, Any]) -> list[tuple[str, str]]:
    size = facts.model.state_size
    tokenizer = _text(state, "data", "tokenizer", "name")
    return [
        ("mixer", _code(config.mixer)),
        ("layers", str(config.num_hidden_layers)),
        ("width", str(config.hidden_size)),
        ("parameters", f"{facts.model.num_parameters:,}"),
        ("state", "grows with the sequence" if size is None else f"{size:,} numbers per sequence of any length"),
        ("vocabulary", f"{config.vocab_size:,} tokens" + (f", tokenizer {_code(tokenizer)}" if tokenizer else "")),
        ("weights", f"{facts.dtype}, {byte_count(facts.weight_bytes)}" + (", moving average" if facts.ema else "")),
    ]


def _training_rows(state: dict[str, Any]) -> list[tuple[str, str]]:
    skipped, seconds = _number(state, "skipped"), _number(state, "seconds")
    return [
        *_counted("steps", _number(state, "step")),
        *_counted("tokens seen", _number(state, "tokens")),
        *(_counted("steps skipped, not finite", skipped) if skipped else []),
        *([] if seconds is None else [("time", f"{seconds / 3600:,.2f} hours")]),
    ]


def _data_rows(state: dict[str, Any]) -> list[tuple[str, str]]:
    text_bytes = _number(state, "data", "text_bytes")
    rows = [
        *_counted("documents in the data", _number(state, "data", "documents")),
        *_counted("tokens in the data", _number(state, "data", "tokens")),
        *([] if text_bytes is None else [("text in the data", byte_count(int(text_bytes)))]),
    ]
    sources = _sources(state)
    if sources:
        more = f" and {len(sources) - _SOURCES} more" if len(sources) > _SOURCES else ""
        rows.append(("sources", ", ".join(_code(source) for source in sources[:_SOURCES]) + more))
    return rows


def _sources(state: dict[str, Any]) -> list[str]:
    """The names of the data's sources: texts, or objects with a name, path or source."""
    data = state.get("data")
    listed = data.get("sources") if isinstance(data, dict) else None
    names = []
    for source in listed if isinstance(listed, list) else []:
        given = [source.get(key) for key in ("name", "path", "source")] if isinstance(source, dict) else [source]
        names += [_without_folders(name) for name in given if isinstance(name, str)][:1]
    return names


def _evaluation_rows(facts: CardFacts, state: dict[str, Any]) -> list[tuple[str, str]]:
    loss, perplexity = _number(state, "eval", "loss"), _number(state, "eval", "perplexity")
    bits, step = _number(state, "eval", "bits_per_byte"), _number(state, "eval", "step")
    rows = [
        *([] if loss is None else [("validation loss", f"{loss:.4f} nats per token")]),
        *([] if perplexity is None else [("perplexity", f"{perplexity:.3f}")]),
        *([] if bits is None else [("bits per byte", f"{bits:.4f}")]),
    ]
    if rows and step is not None:
        averaged = _number(state, "settings", "ema") is not None
        of = ", of the weights' moving average" if averaged else ""
        rows.append(("measured", f"at step {int(step):,}{of}"))
        if averaged and not facts.ema:
            rows.append(("these weights", "are not the average but the last ones, and were not measured"))
    return rows


def _code_with_transformers(facts: CardFacts) -> str:
    lines = ["import gsa  # makes the model known to transformers"]
    folder = f"folder = {json.dumps(facts.name)}  # where this file lies"
    if facts.with_tokenizer:
        lines += [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            folder,
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            "model = AutoModelForCausalLM.from_pretrained(folder)",
            'ids = tokenizer("It was", return_tensors="pt").input_ids',
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
        ]
    else:
        lines += [
            "import torch",
            "from transformers import AutoModelForCausalLM",
            "",
            folder,
            "model = AutoModelForCausalLM.from_pretrained(folder)",
            "print(model.generate(torch.tensor([[0]]), max_new_tokens=20))",
        ]
    return _block(lines)


def _code_with_gsa(facts: CardFacts) -> str:
    if facts.with_tokenizer:
        name = json.dumps(facts.name)
        return _block(
            ["import gsa", "", f"model = gsa.load({name})", 'print("It was" + model.generate("It was", max_tokens=20))']
        )
    return _block(
        [
            "import torch",
            "import gsa",
            "",
            f"model = gsa.LM.from_pretrained({json.dumps(facts.name)}).eval()",
            "print(model(torch.tensor([[0]])).logits.shape)",
        ]
    )


def _settings(state: dict[str, Any]) -> list[str]:
    """The settings of the run as YAML, which JSON is; folders of the machine they came from are left out."""
    settings = state.get("settings")
    if not isinstance(settings, dict) or not settings:
        return []
    shown = {key: _without_folders(value) if isinstance(value, str) else value for key, value in settings.items()}
    lines = [f"{key}: {json.dumps(value)}" for key, value in shown.items() if value is not None]
    return ["## Settings", "\n".join(["```yaml", *lines, "```"])]


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"## {title}", _table(rows)] if rows else []


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _block(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _counted(name: str, count: float | None) -> list[tuple[str, str]]:
    return [] if count is None else [(name, f"{int(count):,}")]


def _without_folders(text: str) -> str:
    """A path from the root without the folders it is in, which say nothing elsewhere; any other text as it is."""
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(text).is_absolute():
            return kind(text).name
    return text


def _plain(text: object) -> str:
    """A text on one line, without what would end a cell or a code span."""
    return re.sub(r"[\s|`]+", " ", str(text)).strip()


def _code(text: object) -> str:
    return f"`{_plain(text)}`"


def _value(state: dict[str, Any], *keys: str) -> Any:
    """A value inside the state, or None."""
    value: Any = state
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(state: dict[str, Any], *keys: str) -> float | None:
    value = _value(state, *keys)
    return value if type(value) in (int, float) and abs(value) <= MOST[float] else None


def _text(state: dict[str, Any], *keys: str) -> str | None:
    value = _value(state, *keys)
    return _without_folders(value) if isinstance(value, str) and value else None
