"""The command `gsa`: verb -> function, nothing else. Help texts are the functions' docstrings."""

from __future__ import annotations

import signal
import sys
from typing import Any

from gsa.cli.console import tell
from gsa.errors import GSAError


def main(args: list[str] | None = None) -> None:
    """Runs the command line; errors a user can cause end in one line and exit code 2, Ctrl-C in 130."""
    try:
        try:
            _run(sys.argv[1:] if args is None else args)
        finally:
            if args is None:  # the process ends here, and another Ctrl-C would only disturb that
                signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        tell("stopped", begin="\n")
        raise SystemExit(130) from None
    except GSAError as error:
        tell(error)
        raise SystemExit(2) from None


def _run(args: list[str]) -> None:
    """Does what the arguments ask for."""
    from jsonargparse import auto_cli, set_parsing_settings

    from gsa import __version__
    from gsa.bench.accuracy import accuracy
    from gsa.bench.decode import decode
    from gsa.bench.gpu.kernels import kernels
    from gsa.bench.gpu.traffic import traffic
    from gsa.bench.linear import linear
    from gsa.bench.ops import ops
    from gsa.bench.train import train as bench_train
    from gsa.cli.chat import chat
    from gsa.cli.data import check, prepare, train_tokenizer
    from gsa.cli.demo import demo
    from gsa.cli.doctor import doctor
    from gsa.cli.export import export
    from gsa.cli.generate import generate
    from gsa.cli.models import import_, models
    from gsa.cli.parser import Parser, dashed
    from gsa.cli.state import save, show
    from gsa.cli.train import options_win, run
    from gsa.train.settings import TrainSettings

    verbs: dict[str, Any] = {
        "demo": demo,
        "doctor": doctor,
        "generate": generate,
        "chat": chat,
        "state": {"_help": "What a model remembers of a text, as a file.", "save": save, "show": show},
        "models": models,
        "import": import_,
        "tokenizer": {"_help": "Tokenizers of your own.", "train": train_tokenizer},
        "data": {"_help": "Text to tokens that training reads.", "prepare": prepare, "check": check},
        "train": TrainSettings,
        "export": export,
        "kernels": kernels,
        "bench": {
            "_help": "Speed and memory, as ratios measured in one run.",
            "ops": ops,
            "traffic": traffic,
            "accuracy": accuracy,
            "linear": linear,
            "decode": decode,
            "train": bench_train,
        },
    }
    # Help texts are the docstrings of fields; and a file of settings makes no objects.
    set_parsing_settings(docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False)
    given = dashed(args)
    if given[:1] == ["train"]:
        given = options_win(given)
    done = auto_cli(
        verbs,
        args=given or ["--help"],
        prog="gsa",
        version=__version__,
        description="Sequence models with slot memory.",
        parser_class=Parser,
        allow_abbrev=False,
    )
    if isinstance(done, TrainSettings):
        run(done)
