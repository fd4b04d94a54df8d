"""`gsa doctor` tells the truth about this machine, and why something is missing."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gsa.cli import main
from gsa.ops import backends
from gsa.ops.matmul import missing_unit
from gsa.ops.native import library


def test_json(capsys: pytest.CaptureFixture) -> None:
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["engines"] == backends()
    assert report["torch"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    assert report["auto_on_cpu"] == "native"
    assert report["native"]["isa"] == library.isa()
    assert report["disk"]["free"] > 0


def test_text(capsys: pytest.CaptureFixture) -> None:
    main(["doctor"])
    out = capsys.readouterr().out
    for expected in ("processor", "torch", "engine native", f"instruction set {library.isa()}", "memory", "disk"):
        assert expected in out


def test_a_missing_engine_is_explained() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gsa", "doctor"],
        env=os.environ | {"GSA_NATIVE_LIBRARY": "no-such-file.so", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "missing: its library does not load: no-such-file.so" in run.stdout
    assert "picks chunk on the CPU" in run.stdout
    assert "not what the environment asks for" in run.stderr


def test_units(capsys: pytest.CaptureFixture) -> None:
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["units"] == {compute: missing_unit(compute) for compute in ("bf16", "int8")}
    assert report["auto_compute"]["fp32"] == "fp32"
    run = subprocess.run(
        [sys.executable, "-m", "gsa", "doctor"],
        env=os.environ | {"GSA_NATIVE_ISA": "baseline", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "products in bf16" in run.stdout
    assert "has no AVX-512 VNNI" in run.stdout
    assert all(f"{weights} weights: fp32" in run.stdout for weights in ("fp32", "bf16", "int8", "int4"))
