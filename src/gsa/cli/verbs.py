"""The verbs of `gsa`: where each is found and its line of help. Nothing is imported before a verb runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from gsa.errors import GSAError


class Verb(NamedTuple):
    """One verb."""

    target: str
    """Module and function, or a class of settings; its docstring is the verb's help."""
    summary: str
    """The first sentence of that docstring, word for word."""


class Group(NamedTuple):
    """Verbs that stand behind one word."""

    summary: str
    verbs: dict[str, Verb | Group]


GSA = Group(
    "Sequence models with slot memory.",
    {
        "help": Verb("gsa.cli.help:show_help", "Tells what a verb does and which options it has."),
        "demo": Verb(
            "gsa.cli.demo:demo",
            "Talks with a model, has it read a book into a state, goes on from it, and shows what a token costs.",
        ),
        "doctor": Verb(
            "gsa.cli.doctor:doctor",
            "Tells what this machine offers: processor, instruction set, torch, threads, engines, memory and disk.",
        ),
        "generate": Verb("gsa.cli.generate:generate", "Continues a text, and prints the continuation as it is made."),
        "chat": Verb(
            "gsa.cli.chat:chat",
            "Talks with a model that has a chat template, a line at a time; each reply goes on from the state of the "
            "last.",
        ),
        "serve": Verb(
            "gsa.cli.serve:serve",
            "Serves a model over HTTP as OpenAI's clients speak it, with states as resources, and a page to talk with "
            "it.",
        ),
        "state": Group(
            "What a model remembers of a text, as a file.",
            {
                "save": Verb(
                    "gsa.cli.state:save",
                    "Reads a document of any length, and saves what the model remembers of it.",
                ),
                "show": Verb(
                    "gsa.cli.state:show",
                    "Tells what a saved state is, without its model; and reads all of it, to see whether it is whole.",
                ),
            },
        ),
        "models": Verb(
            "gsa.cli.models:models",
            "Lists presets and models with their parameters and the size of their state, and says which have weights "
            "here.",
        ),
        "import": Verb(
            "gsa.cli.models:import_",
            "Turns a checkpoint of flash-linear-attention into one of ours, which transformers loads too.",
        ),
        "convert": Verb(
            "gsa.cli.convert:convert",
            "Turns a pretrained Transformer into a model of ours, with its weights and its tokenizer.",
        ),
        "distill": Verb(
            "gsa.distill.settings:DistillSettings",
            "Trains a converted model to do what its teacher does; the same command again goes on where it stopped.",
        ),
        "tokenizer": Group(
            "Tokenizers of your own.",
            {
                "train": Verb(
                    "gsa.cli.data:train_tokenizer",
                    "Learns a tokenizer from text: byte-level BPE, which gives back any text as it was.",
                )
            },
        ),
        "data": Group(
            "Text to tokens that training reads.",
            {
                "prepare": Verb(
                    "gsa.cli.data:prepare",
                    "Turns text into token shards that are mapped into memory, for `gsa train`.",
                ),
                "chats": Verb(
                    "gsa.cli.data:chats",
                    "Lets a model answer questions in conversations of several turns, and writes them for `gsa data "
                    "prepare`.",
                ),
                "check": Verb(
                    "gsa.cli.data:check",
                    "Reads every byte of a prepared folder and compares it with what was written, the tokenizer too.",
                ),
            },
        ),
        "train": Verb(
            "gsa.train.settings:TrainSettings",
            "Trains a language model from prepared tokens to a checkpoint; the same command again goes on where it "
            "stopped.",
        ),
        "eval": Verb(
            "gsa.cli.eval:evaluate",
            "Evaluates a model on benchmarks, and prints the paper's tables with its row in them.",
        ),
        "export": Verb(
            "gsa.cli.export:export",
            "Writes a checkpoint of training as a folder that transformers loads, with tokenizer and model card.",
        ),
        "compare": Verb(
            "gsa.eval.compare:compare",
            "Puts results of several models side by side, with their differences to the first one.",
        ),
        "probe": Group(
            "What a model can recall, and how.",
            {
                "mqar": Verb(
                    "gsa.eval.probes.mqar:Mqar",
                    "Asks a model for values of keys that it has just read: associative recall, by the number of "
                    "pairs.",
                ),
                "phonebook": Verb(
                    "gsa.eval.probes.phonebook:Phonebook",
                    "Asks a model for numbers in a phone book that it has just read.",
                ),
                "needle": Verb(
                    "gsa.eval.probes.needle:Needle",
                    "Hides a number in a long text, and asks a model for it: a heat map of length by depth.",
                ),
                "copy": Verb(
                    "gsa.eval.probes.copy:Copy",
                    "Asks a model to repeat random words that it has just read.",
                ),
                "slots": Verb(
                    "gsa.eval.probes.slots:slots",
                    "Shows which slots the tokens of a text write to and read from, how long slots remember, and "
                    "which are dead.",
                ),
            },
        ),
        "completion": Verb(
            "gsa.cli.completion:completion",
            "Prints a script with which a shell completes verbs, options and their values.",
        ),
        "kernels": Verb(
            "gsa.bench.gpu.kernels:kernels",
            "Compiles every GPU kernel ahead of time, with no GPU present, and checks what comes out.",
        ),
        "paper": Group(
            "The paper's experiments, at the scale of this machine.",
            {
                "mqar": Verb(
                    "gsa.paper.mqar:mqar",
                    "Trains small models to recall pairs (MQAR), with every mixer, and shows accuracy against the size "
                    "of their state.",
                ),
                "ablation": Verb(
                    "gsa.paper.ablation:ablation",
                    "Trains small language models that differ in one thing each, and shows their perplexity beside the "
                    "paper's.",
                ),
                "efficiency": Verb(
                    "gsa.paper.efficiency:efficiency",
                    "Measures training throughput, memory in training and latency of decoding of the paper's systems.",
                ),
            },
        ),
        "bench": Group(
            "Speed and memory, as ratios measured in one run.",
            {
                "ops": Verb(
                    "gsa.bench.ops:ops",
                    "Speed and memory of gated slot attention, beside softmax attention and the matmul rate of this "
                    "machine.",
                ),
                "traffic": Verb(
                    "gsa.bench.gpu.traffic:traffic",
                    "Bytes that the GPU kernels move per token, beside flash-linear-attention's, and a model of the "
                    "time they take.",
                ),
                "accuracy": Verb(
                    "gsa.bench.accuracy:accuracy",
                    "Errors of gated slot attention in fp32 against the token loop in fp64, for gates from none to "
                    "full resets.",
                ),
                "linear": Verb(
                    "gsa.bench.linear:linear",
                    "Matrix-vector products over the weights of a 135M model, beside torch's and beside the memory's "
                    "rate.",
                ),
                "decode": Verb(
                    "gsa.bench.decode:decode",
                    "Decoding with gated slot attention in the shape of SmolLM2-135M, random weights.",
                ),
                "prefill": Verb(
                    "gsa.bench.prefill:prefill",
                    "Reading prompts with gated slot attention in the shape of SmolLM2-135M, random weights, in every "
                    "--compute.",
                ),
                "eval": Verb(
                    "gsa.bench.eval:evaluation",
                    "Log-likelihoods by our reader beside the harness's type `hf`, on a GSA model in the shape of "
                    "SmolLM2-135M.",
                ),
                "serve": Verb(
                    "gsa.bench.serve:serve",
                    "Many streaming clients of `gsa serve` over HTTP, beside the engine itself and beside llama.cpp's "
                    "server.",
                ),
                "busy": Verb(
                    "gsa.bench.busy:busy",
                    "Speed with the threads chosen by default, beside one thread and all of them, while other "
                    "processes are busy.",
                ),
                "train": Verb(
                    "gsa.bench.train:train",
                    "Training steps of a language model with each mixer, beside one with softmax attention.",
                ),
            },
        ),
    },
)


def find(args: list[str]) -> tuple[list[str], Verb | Group]:
    """The words that lead to a verb, and the verb; or to a group, where an option follows, or nothing."""
    path: list[str] = []
    entry: Verb | Group = GSA
    for word in args:
        if isinstance(entry, Verb) or word.startswith("-"):
            break
        if word not in entry.verbs:
            raise GSAError(_unknown(path, word, list(entry.verbs)))
        path.append(word)
        entry = entry.verbs[word]
    return path, entry


def _unknown(path: list[str], word: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    before = "".join(f"{name}: " for name in path)
    return f"{before}there is no {word!r}; {hint}expected one of {', '.join(known)}"


def load(entry: Verb | Group) -> Any:
    """The function of a verb, or those of a group as jsonargparse wants them."""
    if isinstance(entry, Verb):
        module, _, name = entry.target.partition(":")
        return getattr(import_module(module), name)
    return {
        name: load(verb) if isinstance(verb, Verb) else {"_help": verb.summary, **load(verb)}
        for name, verb in entry.verbs.items()
    }


def help_of(group: Group, command: str) -> str:
    """The help of a group, for which nothing is imported; options are those that jsonargparse adds."""
    from argparse import ArgumentParser

    usage = f"{command} VERB [OPTIONS]"
    parser = ArgumentParser(command, usage=usage, description=group.summary, add_help=False)
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="store_true", help="Show this help, and exit.")
    if group is GSA:
        options.add_argument("--version", action="store_true", help="Print the version, and exit.")
    options.add_argument("--config", help="File of settings in YAML: a verb with its options.")
    options.add_argument("--print-config", action="store_true", help="Print the settings of a verb as YAML, and exit.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", description=f"{command} VERB --help tells more of it.")
    for name, entry in group.verbs.items():
        verbs.add_parser(name, help=entry.summary.replace("%", "%%"), add_help=False)
    return parser.format_help()
