"""`gsa serve`: what it refuses before a model is loaded. What it serves is tested in tests/serve."""

import socket

import pytest

from tests.cli.running import run


def test_refusals(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_loaded(*given: object, **named: object) -> None:
        raise AssertionError

    monkeypatch.setattr("gsa.infer.text.TextEngine.load", none_is_loaded)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "serve", "gsa-tiny", "--port", str(port))
        assert (code, out) == (2, "")
        assert f"serve: cannot listen on 127.0.0.1 port {port}" in err
    for options, expected in (
        (("--port", "70000"), "port must be"),
        (("--max-concurrency", "0"), "max_concurrency must be at least 1"),
        (("--origins", "example.org"), "an origin is like https://example.org"),
        (("--api-key", "schlüssel"), "api_key must be at least one printable ASCII character"),
    ):
        code, _, err = run(capsys, "serve", "gsa-tiny", *options)
        assert code == 2
        assert expected in err
    monkeypatch.setenv("GSA_API_KEY", "schlüssel")
    assert "api_key must be" in run(capsys, "serve")[2]
