"""A tiny model that talks: random weights, a tokenizer of bytes with special tokens, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gsa.data.tokenizer import CONFIG, JSON, BytesTokenizer, config_text
from gsa.models.checkpoint import save_model
from tests.models.cases import model

BEGIN, END = "<|im_start|>", "<|im_end|>"
BEGIN_ID, END_ID = 257, 258
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str | None = CHATML, **flags: bool) -> None:
    """Bytes, and the two special tokens, with flags such as rstrip."""
    content = json.loads(BytesTokenizer().files()[JSON])
    for id_, name in ((BEGIN_ID, BEGIN), (END_ID, END)):
        content["added_tokens"].append({**content["added_tokens"][0], "id": id_, "content": name, **flags})
    config: dict[str, Any] = json.loads(config_text(eos=END)) | {"split_special_tokens": False}
    if template is not None:
        config["chat_template"] = template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(content))
    (folder / CONFIG).write_text(json.dumps(config))


def write_model(folder: Path, *, template: str | None = CHATML, case: str = "gsa") -> Path:
    """A folder with all that `gsa chat` needs."""
    write_tokenizer(folder, template=template)
    save_model(model(case, vocab_size=259), folder, eos_token_id=[END_ID, 256])
    return folder
