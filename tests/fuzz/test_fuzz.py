"""Fuzzing counts cases, and gives a command for every failure, also of a process that dies or hangs."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzzing

SUITE = """
import os, time
from hypothesis import given, strategies as st
from tests.examples import examples

@examples(30)
@given(st.integers())
def test_holds(number):
    assert number == number

@examples(30)
@given(st.integers())
def test_fails(number):
    assert number < 100, "too large"

@examples(1)
@given(st.none())
def test_WAY(nothing):
    DEED
"""


def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, deed: str) -> fuzzing.Outcome:
    (tmp_path / "conftest.py").write_text("from tests.examples import register_profiles\nregister_profiles()\n")
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE.replace("WAY", way).replace("DEED", deed))
    monkeypatch.setattr(fuzzing, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(fuzzing, "room_of", lambda file: "suite")
    return fuzzing.Turn(str(suite), 7).run(fuzzing.Clock(2))


def test_a_property_that_fails_and_a_process_that_dies_are_failures_with_a_command_that_repeats_them(
    tmp_path, monkeypatch
):
    found = turn(tmp_path, monkeypatch, "dies", "os._exit(3)")
    fails, dies = found.failures
    assert fails.test.endswith("::test_fails")
    assert "too large" in fails.said
    assert dies.test.endswith("::test_dies")
    assert "code 3" in dies.said
    assert found.cases["suite"] > 30
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".txt"]
    command = shlex.split(str(fails).split("repeat: ")[1])
    again = subprocess.run(command, cwd=fuzzing.TESTS.parent, capture_output=True, text=True)
    assert again.returncode == 1
    assert "too large" in again.stdout


@pytest.mark.slow
def test_a_process_that_hangs_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "HUNG", 3)
    hangs = turn(tmp_path, monkeypatch, "hangs", "time.sleep(60)").failures[-1]
    assert hangs.test.endswith("::test_hangs")
    assert "no end" in hangs.said


def test_the_table_counts_by_room():
    found = fuzzing.Outcome(tests={"tests/ops/test_a.py::test_b", "tests/test_e.py::test_f"})
    found.cases["ops"] = 1200
    found.failures.append(fuzzing.Failure("tests/data/test_c.py::test_d", 5, "wrong"))
    assert fuzzing.table(found, 2, 9).markdown().splitlines()[4:] == [
        "| data | 0 | 0 | 1 |",
        "| ops | 1 | 1,200 | 0 |",
        "| others | 1 | 0 | 0 |",
        "| all | 2 | 1,200 | 1 |",
    ]
