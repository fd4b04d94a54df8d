"""The parser of the command line: options as people write them."""

from __future__ import annotations

from typing import Any

from jsonargparse import ActionYesNo, ArgumentParser

SHORT = {"--max_tokens": "-n"}
"""Options that have a short name too."""
MAY_BE_LEFT_OUT = "prompt"
"""The positional argument that has a default."""


class Parser(ArgumentParser):
    """Takes switches as `--json` or `--no-json`, and a field `batch_size` as `--batch-size`.

    A list is several words, or an option that may be given several times.
    """

    def add_argument(self, *names: Any, **options: Any) -> Any:
        if options.get("type") is bool:
            del options["type"]
            options["action"] = ActionYesNo(yes_prefix="", no_prefix="no-")
        if names == (f"--{MAY_BE_LEFT_OUT}",):
            names, options["nargs"] = (MAY_BE_LEFT_OUT,), "?"
        positional = not names[0].startswith("-")
        if getattr(options.get("action"), "_typehint", None) in (list[str], list[str] | None):
            options["type"] = str  # for the action would take one word, and read YAML in it
            names = tuple(name for name in names if not name.endswith("+"))  # another name for the same
            if positional:
                del options["action"]
                options |= {"nargs": "+", "metavar": names[0].removesuffix("s").upper()}
            else:
                options["action"] = "append"
        short = [SHORT[name] for name in names if name in SHORT]
        return super().add_argument(*short, *dashed(list(names)), **options)


def dashed(args: list[str]) -> list[str]:
    """The arguments with dashes for underscores in the names of options, so that both are understood."""
    end = args.index("--") if "--" in args else len(args)  # what stands behind is no option
    found = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        first, dot, rest = name.partition(".")  # the keys of `--model-options.num_slots` are not options
        if first in ("--print_config", "--print-config"):
            first = "--print_config"  # jsonargparse looks for this very name
        elif first.startswith("--"):
            first = first.replace("_", "-")
        found.append(first + dot + rest + equals + value)
    return found + args[end:]
