"""The parser of the command line: options as people write them."""

from __future__ import annotations

from typing import Any

from jsonargparse import ActionYesNo, ArgumentParser


class Parser(ArgumentParser):
    """Takes switches as `--json` or `--no-json`, a field `batch_size` as `--batch-size`, a list as several words."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        if options.get("type") is bool:
            del options["type"]
            options["action"] = ActionYesNo(yes_prefix="", no_prefix="no-")
        positional = not names[0].startswith("-")
        if positional and getattr(options.get("action"), "_typehint", None) == list[str]:
            del options["action"]  # which would take one word, and read YAML in it
            options |= {"type": str, "nargs": "+", "metavar": names[0].removesuffix("s").upper()}
        return super().add_argument(*dashed(list(names)), **options)


def dashed(args: list[str]) -> list[str]:
    """The arguments with dashes for underscores in the names of options, so that both are understood."""
    found = []
    for arg in args:
        name, equals, value = arg.partition("=")
        first, dot, rest = name.partition(".")  # the keys of `--model-options.num_slots` are not options
        if first in ("--print_config", "--print-config"):
            first = "--print_config"  # jsonargparse looks for this very name
        elif first.startswith("--"):
            first = first.replace("_", "-")
        found.append(first + dot + rest + equals + value)
    return found
