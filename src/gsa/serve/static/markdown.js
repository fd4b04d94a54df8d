// Markdown to nodes of the page. Text only ever becomes text nodes: whatever a model writes, none of it is taken for HTML.
// The time is linear in the text, whatever it is: an answer is shown anew for every picture while it is written.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^\s*>/;
// Patterns here have one way to match at most, and no search for their end: one that tries several ways is slow on some text.
const BLOCKS = [
  [(line) => /^#{1,6}\s/.test(line), heading],
  [(line) => /^ {0,3}[-*_]/.test(line) && /^(-{3,}|\*{3,}|_{3,})$/.test(line.replace(/\s/g, "")), rule],
  [(line) => ITEM.test(line), list],
  [(line) => QUOTE.test(line), quote],
  [isRow, table],
];

function make(name, children = []) {
  const node = document.createElement(name);
  for (const child of children) node.append(child); // one by one: a call has no place for very many
  return node;
}

/** The nodes of a text. */
export function render(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  let paragraph = [];
  const finish = () => {
    if (paragraph.length) nodes.push(make("p", inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; ) {
    const fence = lines[i].match(FENCE);
    const found = !fence && depth < 8 && BLOCKS.find(([fits]) => fits(lines[i]));
    if (fence) {
      finish();
      const [node, next] = code(lines, i, fence);
      nodes.push(...node);
      i = next;
    } else if (found) {
      finish();
      const [node, next] = found[1](lines, i, depth);
      nodes.push(node);
      i = next;
    } else {
      if (lines[i].trim()) paragraph.push(lines[i]);
      else finish();
      i += 1;
    }
  }
  finish();
  return nodes;
}

function code(lines, first, [, marks, language]) {
  let end = first + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(marks) && !lines[end].trim().replaceAll(marks[0], ""))) end += 1;
  const text = lines.slice(first + 1, end).join("\n");
  const copy = make("button", ["Copy"]);
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  const head = make("div", [make("span", [language || "text"]), copy]);
  head.className = "code-head";
  const body = make("pre", [make("code", [text])]);
  body.tabIndex = 0; // so that the keyboard can scroll it
  return [[head, body], end + 1];
}

function heading(lines, i) {
  const line = lines[i], level = line.search(/[^#]/);
  let end = line.length;
  while (end > level && line[end - 1] === "#") end -= 1; // marks may stand behind the text, too
  return [make(`h${Math.min(level + 2, 6)}`, inline(line.slice(level, end).trim())), i + 1];
}

function rule(lines, i) {
  return [make("hr"), i + 1];
}

function list(lines, first, depth) {
  const [, indent, mark] = lines[first].match(ITEM);
  const node = make(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) node.start = parseInt(mark, 10);
  let i = first;
  while (i < lines.length) {
    const found = lines[i].match(ITEM);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== /\d/.test(mark)) break;
    const within = [lines[i].slice(found[0].length)];
    i += 1;
    while (i < lines.length && (lines[i].search(/\S/) > indent.length || (!lines[i].trim() && lines[i + 1]?.search(/\S/) > indent.length))) {
      within.push(lines[i].slice(Math.min(indent.length + 2, Math.max(lines[i].search(/\S/), 0))));
      i += 1;
    }
    const children = blocks(within, depth + 1);
    // A single paragraph needs no space around it.
    node.append(make("li", children[0]?.nodeName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children));
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i += 1;
  }
  return [node, i];
}

function quote(lines, first, depth) {
  let end = first;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const within = lines.slice(first, end).map((line) => line.replace(/^\s*> ?/, ""));
  return [make("blockquote", blocks(within, depth + 1)), end];
}

function isRow(line) {
  const bare = line.trim();
  return bare.length > 1 && bare.startsWith("|") && bare.endsWith("|");
}

function table(lines, first) {
  let end = first;
  while (end < lines.length && isRow(lines[end])) end += 1;
  const rows = lines.slice(first, end).map((line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim()));
  const divided = rows.length > 1 && rows[1].every((cell) => /^:?-+:?$/.test(cell));
  const row = (cells, name) => make("tr", cells.map((cell) => make(name, inline(cell))));
  if (!divided) return [make("table", [make("tbody", rows.map((cells) => row(cells, "td")))]), end];
  return [make("table", [make("thead", [row(rows[0], "th")]), make("tbody", rows.slice(2).map((cells) => row(cells, "td")))]), end];
}

/** Finds the next place of a pattern. Places are asked for in rising order, so that the text is searched once in all. */
function finder(text, pattern) {
  let found = -1;
  return (from) => {
    if (found >= from) return found;
    pattern.lastIndex = from;
    return (found = pattern.exec(text)?.index ?? Infinity);
  };
}

/** Finds the next run of so many backticks, no more and no fewer; in rising order, too. */
function runFinder(text) {
  const runs = new Map(); // places of runs by their length, the next one last
  for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  return (length, from) => {
    const places = runs.get(length);
    while (places.at(-1) < from) places.pop();
    return places.at(-1) ?? Infinity;
  };
}

// What stands between two marks: the first may not have space behind it, the last none before it. In the order in which they are tried.
const SPANS = [["**", /(?<=\S)\*\*/g, "strong"], ["*", /(?<=\S)\*/g, "em"], ["~~", /(?<=\S)~~/g, "s"]];

/** Reads what a mark begins, as [node, where it ends]; nothing where the mark is only text. */
function reader(text, depth) {
  const run = runFinder(text), bracket = finder(text, /[\]\n]/g), stop = finder(text, /[()\s]/g);
  const spans = SPANS.map(([open, close, name]) => [open, finder(text, new RegExp(close)), name]);
  return (mark, place) => {
    const behind = place + mark.length;
    if (mark === "\n") return [make("br"), behind];
    if (mark === "[") {
      const close = bracket(behind);
      const end = text.startsWith("](", close) ? stop(close + 2) : Infinity;
      if (text[end] !== ")") return [];
      return [link(text.slice(behind, close), text.slice(close + 2, end)) ?? text.slice(place, end + 1), end + 1];
    }
    if (mark[0] === "`") {
      const close = run(mark.length, behind), span = text.slice(behind, close);
      return close < Infinity ? [make("code", [span.trim() || span]), close + mark.length] : [];
    }
    for (const [open, next, name] of spans) {
      const from = place + open.length;
      if (!text.startsWith(open, place) || !/\S/.test(text[from] ?? "")) continue;
      const close = next(from + 1);
      if (close < Infinity) return [make(name, inline(text.slice(from, close), depth + 1)), close + open.length];
    }
    return [];
  };
}

function inline(text, depth = 0) {
  const nodes = [], marks = /`+|[*~[\n]/g, read = reader(text, depth);
  let begun = 0; // where the text begins that is in no node yet
  for (let found; depth < 8 && (found = marks.exec(text)); ) {
    const [node, end] = read(found[0], found.index);
    if (!node) continue;
    if (found.index > begun) nodes.push(text.slice(begun, found.index));
    nodes.push(node);
    begun = marks.lastIndex = end;
  }
  if (begun < text.length) nodes.push(text.slice(begun));
  return nodes;
}

/** A link, if it leads to the web: other addresses, as javascript:, stay text. */
function link(label, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  const node = make("a", [label || address]);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
