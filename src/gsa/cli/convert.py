"""`gsa convert`."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import Any, Literal


def convert(
    source: str = "",
    out: str = "",
    to: Literal["hybrid", "gsa", "gla", "retnet", "supra", "attention"] = "hybrid",
    window: int | None = None,
    sinks: int | None = None,
    slots: int | None = None,
    slot_router: Literal["softmax", "gates"] | None = None,
    slot_positions: Literal["window", "own"] | None = None,
    feature_map: str | None = None,
    paper: bool = False,
    calibrate: str | None = None,
    calibrate_tokens: int = 8192,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    seed: int = 0,
    plan: bool = False,
    verify: str | None = None,
    text: list[str] | None = None,
    text_tokens: int | None = None,
    questions: int | None = None,
    data: str | None = None,
    json: bool = False,
) -> None:
    """Turns a pretrained Transformer into a model of ours, with its weights and its tokenizer.

    Reads Llama, Mistral, Qwen2 and Qwen3: a folder with config.json and safetensors, a name of the Hugging Face Hub, or
    a GGUF file. Embeddings, norms, projections and MLPs are copied as they are. What cannot be represented is refused
    by name, before anything is written.

    With --verify, a converted folder is checked instead, and the command fails if a check does. With --text, figures
    follow: how the student differs from its teacher by position; what window and slots of a hybrid each do, beside a
    window with as large a state; and recall of what is beyond the window.

    Args:
        source: Folder, GGUF file, or name of the Hub (owner/name).
        out: Folder to write, new or empty.
        to: Mixer of the student; attention is the same model, unchanged.
        window: Tokens that are seen exactly, for hybrid; 64 by default.
        sinks: First tokens that are kept for ever, for hybrid; 4 by default.
        slots: Memory slots of each key/value head, for hybrid and gsa; 64 by default.
        slot_router: How slots share a token, for hybrid: by a softmax, as clusters of keys, or by gates, by time.
        slot_positions: Rotary positions of what slots hold, for hybrid; own by default.
        feature_map: Applied to queries and keys, for gla, retnet and supra.
        paper: Take the plain form of the paper, for gsa and gla.
        calibrate: Text that new weights are calibrated on; a book of the package by default.
        calibrate_tokens: Tokens of that text; 0 for no calibration.
        dtype: Of the weights; by default as they are, and fp32 for GGUF files.
        seed: Of what begins at random.
        plan: Print what would be done, and change nothing.
        verify: Check this converted folder; its source is the one it was made from, unless another is named.
        text: With --verify, measure on this file or folder: text, .jsonl, .parquet, compressed or not. It should be
            nothing that was calibrated or trained on. May be given several times.
        text_tokens: About how many tokens of these texts are read, in pieces that lie far apart; 8192 by default.
        questions: How many numbers are hidden in these texts and asked for, and how many words of pairs; 16 by
            default, 0 for none.
        data: Folder with squad_dev_v1.1.json.gz; as many of its questions are asked, too.
        json: Print JSON instead of text.
    """
    from gsa.convert import Choices, prepare
    from gsa.convert import convert as convert_
    from gsa.convert.calibrate import TOKENS
    from gsa.errors import GSAError
    from gsa.table import show

    made: dict[str, tuple[Any, Any]] = {  # and what they are where nothing is said
        "to": (to, "hybrid"),
        "window": (window, None),
        "sinks": (sinks, None),
        "slots": (slots, None),
        "slot_router": (slot_router, None),
        "slot_positions": (slot_positions, None),
        "feature_map": (feature_map, None),
        "paper": (paper, False),
        "dtype": (dtype, None),
        "seed": (seed, 0),
        "calibrate": (calibrate, None),
        "calibrate_tokens": (calibrate_tokens, TOKENS),
        "plan": (plan, False),
    }
    if verify is not None:
        _refuse_beside_verify({"out": (out, ""), **made})
    figures = {"text_tokens": text_tokens, "questions": questions, "data": data}
    given = [name for name, value in figures.items() if value is not None]
    if text and verify is None:
        raise GSAError("convert: --text is for --verify, and does nothing without it")
    if given and not text:
        raise GSAError(f"convert: --{given[0].replace('_', '-')} does nothing without --text")
    if verify is not None:
        verified(verify, source, text or [], {name: figures[name] for name in given}, json)
        return
    if not source:
        raise GSAError("convert: the source is missing, expected a folder, a GGUF file, or a name of the Hub")
    choices = Choices(
        to=to,
        paper=paper,
        slots=slots,
        window=window,
        sinks=sinks,
        slot_router=slot_router,
        slot_positions=slot_positions,
        feature_map=feature_map,
        seed=seed,
    )
    if plan:
        from gsa.convert.plan import cost_table, mapping_tables, report
        from gsa.convert.run import calibration_text, check_calibration

        words = calibration_text(calibrate, calibrate_tokens)
        conversion = prepare(source, choices, dtype)
        check_calibration(conversion, words, calibrate_tokens)
        if json:
            print(json_module.dumps(report(conversion), indent=2))
        else:
            show(None, [*mapping_tables(conversion), cost_table(conversion)])
        return
    if not out:
        raise GSAError("convert: the folder to write is missing")
    done = convert_(source, out, choices, dtype, text=calibrate, tokens=calibrate_tokens)
    if json:
        print(json_module.dumps(asdict(done), indent=2, default=str))
    else:
        print(f"{to}: {done.parameters:,} parameters, {done.dtype} -> {out}, with {', '.join(done.files)}")


def _refuse_beside_verify(options: dict[str, tuple[Any, Any]]) -> None:
    """Raises for the first option that has another value than its default: it would do nothing."""
    from gsa.errors import GSAError

    for name, (value, default) in options.items():
        if value != default:
            option = "OUT" if name == "out" else f"--{name.replace('_', '-')}"
            raise GSAError(f"convert: {option} does nothing with --verify")


def verified(folder: str, source: str, text: list[str], figures: dict[str, Any], json: bool) -> None:
    """Checks a folder and, if no check has failed, measures it on texts."""
    from gsa.console import tell
    from gsa.convert.verify import table, verify_folder
    from gsa.table import show

    if text:
        from gsa.convert.report import check_wanted

        check_wanted(text, **figures)  # before the checks take their time
    checks = verify_folder(folder, source or None)
    found: dict[str, Any] = {"checks": [asdict(check) for check in checks]}
    passed = all(check.passed for check in checks)
    if not json:
        show(None, [table(folder, checks)])
    if text and passed:
        from gsa.convert.report import report_folder
        from gsa.convert.report_tables import tables

        report = report_folder(folder, text, source or None, quiet=json, **figures)
        found["report"] = report.as_json()
        if not json:
            show(None, tables(report))
    elif text:
        tell("nothing is measured on texts, since a check has failed")
    if json:
        show(found, [], json=True)
    if not passed:
        raise SystemExit(1)
