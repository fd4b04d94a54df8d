"""Tries every property of the tests with fresh seeds, for as long as it is told: `make fuzz MINUTES=60`.

Test files take turns, each in a process of its own, so that one that dies or hangs is a failure like any other. Prints
how many cases were tried, and for every failure a command that repeats it; what pytest said of it stays in out/fuzz/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from gsa.table import Column, Table

TESTS = Path(__file__).parent.parent
KEPT = TESTS.parent / "out" / "fuzz"
AT_ONCE = 2
"""Processes."""
HUNG = 600
"""Seconds without a test that begins or ends, after which a process is taken for hung."""
PROPERTIES = "hypothesis and not slow"
"""The mark that hypothesis itself puts on tests."""


class Clock:
    """How much time there still is."""

    def __init__(self, minutes: float):
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self._end - time.monotonic(), 0)

    def stop(self) -> None:
        self._end = 0


@dataclass(frozen=True)
class Failure:
    test: str
    seed: int
    said: str

    def __str__(self) -> str:
        pytest = f"{sys.executable} -m pytest '{self.test}' --hypothesis-profile fuzz --hypothesis-seed {self.seed}"
        return f"{self.test}: {self.said}\n    repeat: {pytest}"


@dataclass
class Outcome:
    """What came of one process."""

    cases: Counter[str] = field(default_factory=Counter)
    """By room."""
    tests: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)


class Turn:
    """One file with one seed, in a process of its own."""

    def __init__(self, file: str, seed: int):
        self.file, self.seed = file, seed
        KEPT.mkdir(parents=True, exist_ok=True)
        self.output = KEPT / f"{Path(file).stem}-{seed}.txt"
        self.report = self.output.with_suffix(".jsonl")

    def run(self, clock: Clock) -> Outcome:
        """What was found until the process ended, or the time was over."""
        options = ["--hypothesis-profile", "fuzz", "--hypothesis-seed", str(self.seed), "--fuzz-report", self.report]
        command = [sys.executable, "-m", "pytest", "-p", "tests.fuzz.report", "-m", PROPERTIES, *options, self.file]
        self.report.touch()
        with open(self.output, "w") as output:
            # In a session of its own, Ctrl-C does not reach it, which would look like a failure.
            process = subprocess.Popen(
                command, cwd=TESTS.parent, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            ended = self._wait(process, clock)
        outcome = self._outcome(ended)
        self.report.unlink()
        if not outcome.failures:
            self.output.unlink()
        return outcome

    def _wait(self, process: subprocess.Popen[bytes], clock: Clock) -> str | None:
        """How the process ended, if it was neither by itself nor for want of time."""
        try:
            while process.poll() is None:
                if not clock.left:
                    return None
                if time.time() - self.report.stat().st_mtime > HUNG:
                    return f"no end after {HUNG} s"
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what its tests have started, too
                process.wait()
        codes = (0, 1, 5)  # of pytest: all passed, some failed, none selected
        return None if process.returncode in codes else f"the process ended with code {process.returncode}"

    def _outcome(self, ended: str | None) -> Outcome:
        outcome, running = Outcome(), None
        for line in self.report.read_text().splitlines():
            event = json.loads(line)
            test = "::".join([self.file, *event["test"].split("::")[1:]])
            running = test if event["begins"] else None
            if running is None:
                outcome.tests.add(test)
                outcome.cases[room_of(self.file)] += event["cases"]
                if event["said"] is not None:
                    outcome.failures.append(Failure(test, self.seed, event["said"]))
        if ended is not None:
            outcome.failures.append(Failure(running or self.file, self.seed, ended))
        return outcome


def room_of(test: str) -> str:
    """The folder of tests that a file, or a test in it, belongs to."""
    parts = test.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "others"


def files_with_properties(chosen: str) -> list[str]:
    """Test files that have properties, whose names contain `chosen`."""
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", PROPERTIES, str(TESTS)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    files = {line.split("::")[0] for line in collected.stdout.splitlines() if "::" in line}
    found = sorted(file for file in files if chosen in file)
    if not found:
        said = collected.stdout.strip().splitlines()[-1:] if not files else []
        sys.exit(f"fuzz: no test file with properties has {chosen!r} in its name; {' '.join(said) or sorted(files)}")
    return found


def fuzz(files: list[str], clock: Clock, seeds: random.Random) -> Outcome:
    """What all turns found, in rounds over the files until the time is over, or Ctrl-C."""
    total, waiting = Outcome(), deque[str]()

    def work() -> None:
        while clock.left:
            if not waiting:
                waiting.extend(seeds.sample(files, len(files)))
            turn = Turn(waiting.popleft(), seeds.randrange(2**32))
            outcome = turn.run(clock)
            total.cases += outcome.cases
            total.tests |= outcome.tests
            total.failures += outcome.failures
            print(f"{turn.file}: {outcome.cases.total()} cases, {clock.left / 60:.0f} minutes left", flush=True)
            for failure in outcome.failures:
                print(f"FAILED {failure}\n    output: {turn.output.relative_to(TESTS.parent)}", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        workers = [pool.submit(work) for _ in range(AT_ONCE)]
        try:
            for worker in workers:
                worker.result()
        except KeyboardInterrupt:
            clock.stop()
    return total


def table(found: Outcome, minutes: float, seed: int) -> Table:
    failures = Counter(room_of(failure.test) for failure in found.failures)
    tests = Counter(room_of(test) for test in found.tests)
    rows = [(room, tests[room], found.cases[room], failures[room]) for room in sorted(tests | failures)]
    rows.append(("all", len(found.tests), found.cases.total(), len(found.failures)))
    columns = [Column("room", 0, left=True), Column("tests", 1), Column("cases", 2, "{:,}"), Column("failures", 3)]
    return Table(f"{minutes:.1f} minutes of properties with fresh seeds (seed {seed})", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only test files with this in their name")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of all seeds (default: a new one)")
    options = parser.parse_args()
    begin = time.monotonic()
    found = fuzz(files_with_properties(options.only), Clock(options.minutes), random.Random(options.seed))
    print(table(found, (time.monotonic() - begin) / 60, options.seed).markdown())
    for failure in found.failures:
        print(f"FAILED {failure}")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
