"""The command `gsa`: verb -> function, nothing else. Help texts are the functions' docstrings."""

from __future__ import annotations

import sys
from typing import Any


def main(args: list[str] | None = None) -> None:
    """Runs the command line; errors a user can cause end in one line and exit code 2, Ctrl-C in 130."""
    from jsonargparse import ActionYesNo, ArgumentParser, auto_cli

    from gsa import __version__
    from gsa.bench.demo import demo
    from gsa.bench.linear import linear
    from gsa.bench.ops import ops
    from gsa.bench.train import train
    from gsa.cli.doctor import doctor
    from gsa.cli.models import import_, models
    from gsa.errors import GSAError

    class Parser(ArgumentParser):
        """Takes a switch as `--json` or `--no-json`, not as `--json true`."""

        def add_argument(self, *names: Any, **options: Any) -> Any:
            if options.get("type") is bool:
                del options["type"]
                options["action"] = ActionYesNo(yes_prefix="", no_prefix="no-")
            return super().add_argument(*names, **options)

    verbs: dict[str, Any] = {
        "demo": demo,
        "doctor": doctor,
        "models": models,
        "import": import_,
        "bench": {
            "_help": "Speed and memory, as ratios measured in one run.",
            "ops": ops,
            "linear": linear,
            "train": train,
        },
    }
    given = sys.argv[1:] if args is None else args
    try:
        auto_cli(
            verbs,
            args=given or ["--help"],
            prog="gsa",
            version=__version__,
            description="Sequence models with slot memory.",
            parser_class=Parser,
            allow_abbrev=False,
        )
    except GSAError as error:
        print(f"gsa: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ngsa: stopped", file=sys.stderr)
        raise SystemExit(130) from None
