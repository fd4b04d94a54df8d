"""The tokenizer of Mistral 7B (v0.1), 32000 tokens, the paper's: from `mistral-common`, as a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gsa.data.optional import optional
from gsa.data.tokenizer import config_text
from gsa.data.tokenizer_json import JsonTokenizer
from gsa.errors import GSAError


def mistral_model() -> Path:
    """The sentencepiece model that comes with `mistral-common`."""
    package = optional("mistral_common", "the tokenizer mistral")
    path = Path(str(package.__file__)).parent / "data" / "tokenizer.model.v1"
    if not path.is_file():
        raise GSAError(f"tokenizer: mistral: the installed mistral-common has no {path.name}")
    return path


def mistral_tokenizer() -> JsonTokenizer:
    """Mistral's tokenizer, with the ids that sentencepiece gives, at the speed of `tokenizers`."""
    model = optional("sentencepiece", "the tokenizer mistral").SentencePieceProcessor(model_file=str(mistral_model()))
    special = [model.unk_id(), model.bos_id(), model.eos_id()]
    unk, bos, eos = (model.id_to_piece(id_) for id_ in special)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id_,
                "content": model.id_to_piece(id_),
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for id_ in special
        ],
        # A space in front of the text, and all spaces as U+2581.
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {model.id_to_piece(id_): id_ for id_ in range(model.vocab_size())},
            "merges": _merges(model),
        },
    }
    config = json.loads(config_text(eos=eos, bos=bos, unk=unk))
    return JsonTokenizer("mistral", json.dumps(content, ensure_ascii=False) + "\n", config, model.eos_id())


def _merges(model: Any) -> list[list[str]]:
    """Which pairs of pieces become one, the best first.

    Sentencepiece joins whatever neighbours make the piece with the best score; `tokenizers` wants each such pair.
    Bytes and special tokens are made of nothing: their names in a text are text.
    """
    made = {
        model.id_to_piece(id_): id_
        for id_ in range(model.vocab_size())
        if not (model.is_byte(id_) or model.is_control(id_) or model.is_unknown(id_))
    }
    merges = []
    for piece, _ in sorted(made.items(), key=lambda entry: -model.get_score(entry[1])):
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in made and piece[i:] in made]
        merges += [list(pair) for pair in sorted(pairs, key=lambda pair: (made[pair[0]], made[pair[1]]))]
    return merges
