"""`gsa train`."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from gsa.errors import GSAError

if TYPE_CHECKING:
    from gsa.train.position import Outcome
    from gsa.train.settings import TrainSettings


def run(settings: TrainSettings) -> None:
    """Trains, or previews; says how it went, and ends with the usual exit code if a signal stopped it."""
    from gsa.train.estimate import show
    from gsa.train.heap import keep_large_blocks
    from gsa.train.run import preview, train

    keep_large_blocks()
    if settings.dry_run:
        if os.environ.get("RANK", "0") != "0":
            return  # one of several that a launcher started tells
        plan, estimate = preview(settings)
        if settings.json:
            print(json.dumps({"model": plan.config.to_dict(), **asdict(estimate)}, indent=2))
        else:
            show(estimate)
        return
    outcome = train(settings)
    if outcome.rank == 0:
        print(json.dumps(asdict(outcome), indent=2)) if settings.json else _tell(outcome, settings)
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)


def with_recipe(args: list[str]) -> list[str]:
    """The arguments with the file of a recipe in front, for `--recipe NAME`.

    A recipe's `eval_data` belongs to its own data: where `--data` is given, it is unset, for files of settings and
    options that follow to set, and else for what `--holdout` kept of that data.
    """
    from gsa.cli.parser import taken_out
    from gsa.recipes import recipe

    named, rest = taken_out("--recipe", args)
    if not named:
        return rest
    if len(named) > 1:
        raise GSAError(f"train: --recipe is given {len(named)} times ({', '.join(named)}), expected one recipe")
    other_data = any(arg.partition("=")[0] == "--data" for arg in rest)
    return ["--config", str(recipe(named[0])), *(["--eval-data", "null"] if other_data else []), *rest]


def options_win(args: list[str]) -> list[str]:
    """The arguments, with the others of a group unset where one is given, so that it wins over a recipe's choice."""
    more: list[str] = []
    for group in (("--steps", "--tokens", "--epochs"), ("--warmup-steps", "--warmup-tokens")):
        given = {name for name in group for arg in args if arg.partition("=")[0] == name}
        if len(given) == 1:
            more += [word for name in group if name not in given for word in (name, "null")]
    return [*args, *more]


def _tell(outcome: Outcome, settings: TrainSettings) -> None:
    spent = outcome.spent
    if outcome.eval is not None:
        found = outcome.eval
        print(
            f"evaluation at step {found['step']:g}: loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}, "
            f"{found['bits_per_byte']:.4f} bits per byte"
        )
    if outcome.skipped:
        print(f"{outcome.skipped} steps were skipped: not finite")
    share = 100 * spent["compute"] / spent["total"]
    print(
        f"{spent['total']:.0f} s: {share:.1f}% forward, backward and optimiser, "
        + ", ".join(f"{100 * spent[part] / spent['total']:.1f}% {part}" for part in ("data", "evaluation", "saving"))
    )
    if outcome.reason == "stopped":
        name = signal.Signals(outcome.signal or signal.SIGINT).name
        print(
            f"stopped by {name} at step {outcome.step} of {outcome.steps}, saved in {outcome.checkpoint}; "
            "the same command goes on from there",
            file=sys.stderr,
        )
        return
    early = " early, evaluations got no better" if outcome.reason == "early" else ""
    print(f"finished{early}: step {outcome.step} of {outcome.steps}, {outcome.checkpoint}")
    print(f"gsa export {settings.out} FOLDER makes it a Hugging Face folder")
