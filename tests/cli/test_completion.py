"""`gsa completion` prints what a shell needs, and bash completes with it; `gsa help` tells of verbs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.running import run

COMPLETED = {
    "gsa gen": ["generate"],
    "gsa data pre": ["prepare"],
    "gsa bench ": ["ops", "traffic", "accuracy", "linear", "decode", "prefill", "eval", "serve", "busy", "train"],
    "gsa generate --tem": ["--temperature"],
    "gsa generate --weights b": ["bf16"],
    "gsa generate --compute i": ["int8"],
    "gsa train --precision ": ["auto", "fp32", "bf16", "fp16"],
    "gsa state show a.st": ["a.state"],
    "gsa generate --file a.st": ["a.state"],
    "gsa completion z": ["zsh"],
}
COMPLETE = """
source "$1"
shift
for line in "$@"; do
    read -ra COMP_WORDS <<< "$line"
    [[ "$line" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMP_LINE="$line" COMP_POINT=${#line}
    $(complete -p gsa | sed -E 's/.*-F (\\S+).*/\\1/') gsa "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    code, script, err = run(capsys, "completion", "bash")
    assert (code, err) == (0, "")
    (tmp_path / "gsa.bash").write_text(script)
    (tmp_path / "a.state").touch()
    command = ["bash", "--norc", "-c", COMPLETE, "bash", "gsa.bash", *COMPLETED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = dict(zip(COMPLETED, map(str.split, done.stdout.splitlines()), strict=True))
    assert found == COMPLETED, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells(capsys: pytest.CaptureFixture, shell: str) -> None:
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    for word in ("generate", "prepare", "temperature", "bf16"):
        assert word in out


def test_help_is_a_verb(capsys: pytest.CaptureFixture) -> None:
    for words in ((), ("bench",), ("bench", "ops"), ("generate",)):
        assert run(capsys, "help", *words) == run(capsys, *words, "--help")
    assert run(capsys, "help", "genrate")[2].startswith("gsa: there is no 'genrate'; did you mean 'generate'?")
    assert run(capsys, "help", "--help")[1] == run(capsys, "--help")[1]
