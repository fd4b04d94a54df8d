"""What the page makes of Markdown, in node, with as much of a document as it needs. Left out where there is no node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import gsa.serve

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node here")

SCRIPT = """
class Node {
  constructor(name) { this.nodeName = name.toUpperCase(); this.childNodes = []; }
  append(...children) { for (const child of children) this.childNodes.push(child); }
  addEventListener() {}
}
globalThis.document = { createElement: (name) => new Node(name) };
const { readFileSync } = await import("node:fs");
const [source, texts] = JSON.parse(readFileSync(0, "utf8"));
const { render } = await import(`data:text/javascript;base64,${Buffer.from(source).toString("base64")}`);
const write = (node) => node.nodeName ? `<${node.nodeName.toLowerCase()}>${all(node.childNodes)}</>` : node;
const all = (nodes) => nodes.map(write).join("");
const seconds = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };
const answers = texts.map((text) => {
  const before = seconds(), nodes = render(text), after = seconds();
  return [all(nodes), after - before];
});
process.stdout.write(JSON.stringify(answers));
"""


def rendered(texts: list[str]) -> list[tuple[str, float]]:
    """What becomes of texts, with short ends of elements, and the seconds of a core that each takes."""
    source = (Path(gsa.serve.__file__).parent / "static/markdown.js").read_text()
    command = [NODE, "--input-type=module", "--eval", SCRIPT]
    told = subprocess.run(command, input=json.dumps([source, texts]), capture_output=True, text=True, timeout=900)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


READ = {
    "**a** *b* ~~c~~ `d`": "<p><strong>a</> <em>b</> <s>c</> <code>d</></>",
    "**a *b* c** ** d *": "<p><strong>a <em>b</> c</> ** d *</>",
    "``a`b`` `c": "<p><code>a`b</> `c</>",
    "a ``` b `c`": "<p>a ``` b <code>c</></>",
    "``a`": "<p>``a`</>",
    "[a](https://b.c) [d](e) [f](g": "<p><a>a</> [d](e) [f](g</>",
    "[[a](https://b.c)": "<p><a>[a</></>",
    "[a\nb](https://c.d)": "<p>[a<br></>b](https://c.d)</>",
    "## a # b ##": "<h4>a # b</>",
    "# a ## ": "<h3>a ##</>",
    "#": "<p>#</>",
    "- - -": "<hr></>",
    "- a\n- b\n  - c": "<ul><li>a</><li>b<ul><li>c</></></></>",
    "- a\u2028b\n- c\rd": "<ul><li>a\u2028b</><li>c\rd</></>",  # ends of lines to some, space to us
    "> a\n> - b": "<blockquote><p>a</><ul><li>b</></></>",
    "| a | *b* |\n|---|:-:|\n| c | d |": (
        "<table><thead><tr><th>a</><th><em>b</></></></><tbody><tr><td>c</><td>d</></></></>"
    ),
}


def test_markdown_is_read() -> None:
    assert dict(zip(READ, (text for text, _ in rendered(list(READ))), strict=True)) == READ


SIZE = 100_000
MARKS = "`*_~[]()#>|-+!\\ \n"
STARTS = ("`", "*", "~", "#", ">", "|", "-", "> ", "- ", "* ", "1. ", "  ", "\t")
OPEN = ("`a ", "``a ` ", "*a ", "**a ", "***a ", "~~a ", "*a **b ~~c ")
BRACKETS = """{[a](} {[}](https://a.b) {[}]({a} {[[]} {(}{)} {[a](https://b.c)} [{a}]({b}"""
ALMOST = ("|{|  }", "# a{ }x", "# {#}x", "# a{ #}x", "#{ }\u2028", "-{ }\u2028", "-{ -}x", "|{ |}x", "|{-}x|")
LINES = ("```", "~~~a\n```", "- a", "- a\n", "- a\n  b\n", " - a\n- b", "> - a", "| a |", "|a|\n|-|", "")
PIECES = [
    *(f"a{{{mark}}}" for mark in MARKS),  # long runs, behind a letter that makes them no block
    *(f"{{{mark}}}{end}" for mark in STARTS for end in ("", "x")),  # where a block begins
    *(f"{{{piece}}}{end}" for piece in OPEN for end in ("", "*", "**", "~~", "`")),  # closed at the very end, or never
    *BRACKETS.split(" "),
    *ALMOST,  # lines that look like a block nearly to their end
    *(f"{{{line}\n}}" for line in LINES),
    "{- > }a",
]


def grown(piece: str) -> str:
    """A text of about SIZE characters: what stands in braces is repeated."""
    parts = piece.replace("{", "\0").replace("}", "\0").split("\0")
    repeated = parts[1::2]
    return "".join(part * (SIZE // len(repeated) // len(part)) if i % 2 else part for i, part in enumerate(parts))


def test_no_text_takes_long() -> None:
    texts = {piece: grown(piece) for piece in PIECES}
    texts["runs"] = " ".join("`" * length for length in range(1, 440))  # of all lengths: none closes another
    told = rendered(list(texts.values()))
    slow = {piece: seconds for piece, (_, seconds) in zip(texts, told, strict=True) if seconds > 1}
    assert slow == {}  # most take a few milliseconds; a square of the length is 10 seconds and more
