"""The parser of the command line: options as people write them, help and errors in plain words."""

from __future__ import annotations

import inspect
from argparse import SUPPRESS, Action, _HelpAction
from typing import Any, NoReturn

from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter

from gsa.cli.mistakes import explained
from gsa.cli.settings_file import checked_settings
from gsa.cli.values import Value
from gsa.console import tell
from gsa.errors import GSAError
from gsa.options import choices
from gsa.terminal import shortened

SHORT = {"--max_tokens": "-n"}
"""Options that have a short name too."""
MAY_BE_LEFT_OUT = {"generate": ("prompt",), "evaluate": ("model",), "convert": ("source", "out"), "serve": ("model",)}
"""Positional arguments that have a default, by the function of the verb."""
WITH_RECIPES = ("TrainSettings",)
"""Classes of settings that the package has recipes for."""
_HELP_OF = {
    "--config": "File of settings in YAML; options win over it.",
    "--print-config": "Print the settings as YAML, and exit.",
}


class Formatter(DefaultHelpFormatter):
    """Help with the kind of a value in words and its default, where they tell something."""

    def _get_help_string(self, action: Action) -> str:
        if isinstance(action, _HelpAction):
            return "Show this help, and exit."
        text = next((_HELP_OF[name] for name in action.option_strings if name in _HELP_OF), None)
        if text is not None:
            return text
        facts = ["required"] if action.required and action.option_strings else []
        if isinstance(action.type, Value) and action.type.metavar and not action.type.names:
            facts.append(action.type.words.removeprefix("a "))
        if isinstance(action, ActionYesNo):
            facts += [] if action.default is None else [f"default: {'on' if action.default else 'off'}"]
        elif action.default not in (None, "", {}, SUPPRESS):
            facts.append("default: %(default)s")
        return (action.help or "").replace("%", "%%") + (f" ({', '.join(facts)})" if facts else "")

    def _expand_help(self, action: Action) -> str:
        return self._get_help_string(action) % {"default": action.default}

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(Formatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


class Parser(ArgumentParser):
    """Takes switches as `--json` or `--no-json`, and a field `batch_size` as `--batch-size`.

    A list is several words, or an option that may be given several times.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._fields: Any = None  # the class of settings whose fields are being added
        self._optional: tuple[str, ...] = ()  # positional arguments that may be left out
        self._needed: set[str] = set()  # jsonargparse takes `required` away while it parses
        super().__init__(*args, formatter_class=Formatter, print_config="--print-config", **options)

    def add_class_arguments(self, theclass: Any, *args: Any, **options: Any) -> Any:
        self._fields = theclass
        self.description = _told(theclass)
        if theclass.__name__ in WITH_RECIPES:
            self._add_recipe()
        return super().add_class_arguments(theclass, *args, **options)

    def _add_recipe(self) -> None:
        """`--recipe`, for help: by the time the parser sees the arguments, the recipe's file stands in its place."""
        from gsa.recipes import names

        help_ = f"Settings that come with the package: {', '.join(names())}."
        super().add_argument("--recipe", type=Value(str, tuple(names())), default=SUPPRESS, help=help_)
        self._option_string_actions["--recipe"].metavar = "NAME"

    def add_function_arguments(self, function: Any, *args: Any, **options: Any) -> Any:
        self.description = _told(function)
        self._optional = MAY_BE_LEFT_OUT.get(function.__name__, ())
        return super().add_function_arguments(function, *args, **options)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        if names == ("--print-config",):
            action = super().add_argument(*names, **options)
            action.metavar = ""  # its value is hardly ever of use
            return action
        hint = options.get("type") or getattr(options.get("action"), "_typehint", None)
        if hint in (bool, bool | None):
            options.pop("type", None)
            options["action"] = ActionYesNo(yes_prefix="", no_prefix="no-")
        if names[0].removeprefix("--") in self._optional:
            names, options["nargs"] = (names[0].removeprefix("--"),), "?"
        positional = not names[0].startswith("-")
        name = names[0].lstrip("-")
        if hint in (list[str], list[str] | None):
            options["type"] = str  # for jsonargparse would take one word, and read YAML in it
            names = tuple(name for name in names if not name.endswith("+"))  # another name for the same
            if positional:
                del options["action"]
                options |= {"nargs": "+", "metavar": name.removesuffix("s").upper()}
            else:
                options["action"] = "append"
        elif (value := Value.of(hint, choices(self._fields, name) if self._fields else ())) is not None:
            options.pop("action", None)
            options["type"] = value
            if value.metavar or positional:
                options["metavar"] = name.upper() if positional else value.metavar
        short = [SHORT[name] for name in names if name in SHORT]
        action = super().add_argument(*short, *dashed(list(names)), **options)
        if action.required and action.option_strings:
            self._needed.add(action.dest)
        return action

    def parse_args(self, args: Any = None, *others: Any, **options: Any) -> Any:
        args = list(args or [])
        for file in taken_out("--config", args)[0]:
            given, fault = checked_settings(file)
            if fault is not None:
                self.error(fault)
            instead = {file: given, f"--config={file}": f"--config={given}"}
            args = [instead.get(arg, arg) for arg in args]
        try:
            return super().parse_args(args, *others, **options)
        except GSAError:
            raise
        except RecursionError:
            self.error("a value is nested too deep")
        except ValueError as error:  # what the parser library does not expect: a number of thousands of digits
            self.error(str(error))

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        # argparse would set a positional argument that was left out to its default, over what a file of settings says.
        if action.nargs == "?" and not action.option_strings and not arg_strings:
            return SUPPRESS
        return super()._get_values(action, arg_strings)

    def format_help(self, *args: Any) -> str:
        self.usage = self.short_usage().replace("%", "%%")
        return super().format_help(*args)

    def short_usage(self) -> str:
        """One line: what has to be given, and that there are options."""
        words = [self.prog.replace(" [options]", "")]
        words += [f"{option_name(action)} {metavar(action)}" for action in self._actions if action.dest in self._needed]
        words += ["[OPTIONS]"]
        for action in self._actions:
            if not action.option_strings:
                name = metavar(action)
                words.append({"?": f"[{name}]", "+": f"{name} ..."}.get(str(action.nargs), name))
        return " ".join(words)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Says what is wrong, how the verb is used and where more is told; and exits."""
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "")
        tell(shortened(explained(message, parser._actions, getattr(self, "args", []))), name=command)
        tell(f"usage: {parser.short_usage()}\n{command} --help tells more", name="")
        raise SystemExit(2)


def _told(target: Any) -> str:
    """What a docstring says before it comes to the arguments."""
    return (inspect.getdoc(target) or "").partition("\nArgs:")[0].strip()


def option_name(action: Action) -> str:
    """The long name of an option, or what a positional argument is called."""
    return next((name for name in action.option_strings if name.startswith("--")), metavar(action))


def metavar(action: Action) -> str:
    """What stands for a value in help."""
    if action.dest == "subcommand":
        return "VERB"
    return action.metavar if isinstance(action.metavar, str) else action.dest.rsplit(".")[-1].upper()


def dashed(args: list[str]) -> list[str]:
    """The arguments with dashes for underscores in the names of options, so that both are understood."""
    end = args.index("--") if "--" in args else len(args)  # what stands behind is no option
    found = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        first, dot, rest = name.partition(".")  # the keys of `--model-options.num_slots` are not options
        if first.startswith("--"):
            first = first.replace("_", "-")
        found.append(first + dot + rest + equals + value)
    return found + args[end:]


def files_first(args: list[str]) -> list[str]:
    """The arguments with files of settings in front: options win over them wherever they stand."""
    files, rest = taken_out("--config", args)
    return [word for file in files for word in ("--config", file)] + rest


def taken_out(option: str, args: list[str]) -> tuple[list[str], list[str]]:
    """The values of an option that is given any number of times, and the arguments without it.

    >>> taken_out("--config", ["a", "--config", "b", "--config=c", "--", "--config=d"])
    (['b', 'c'], ['a', '--', '--config=d'])
    """
    end = args.index("--") if "--" in args else len(args)
    values, rest, place = [], [], 0
    while place < end:
        name, equals, value = args[place].partition("=")
        if name == option and (equals or place + 1 < end):
            values.append(value if equals else args[place + 1])
            place += 1 if equals else 2
        else:
            rest.append(args[place])
            place += 1
    return values, rest + args[end:]
