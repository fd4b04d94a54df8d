// Markdown to nodes of the page. Text only ever becomes text nodes: whatever a model writes, none of it is taken for HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const BLOCKS = [
  [/^(#{1,6})\s+(.*?)\s*#*$/, heading],
  [/^ {0,3}([-*_])(\s*\1){2,}\s*$/, rule],
  [/^\s*([-*+]|\d{1,9}[.)])\s+/, list],
  [/^\s*>/, quote],
  [/^\s*\|.*\|\s*$/, table],
];

function make(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
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
    if (paragraph.length) nodes.push(make("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; ) {
    const fence = lines[i].match(FENCE);
    const found = !fence && depth < 8 && BLOCKS.find(([pattern]) => pattern.test(lines[i]));
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
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  const head = make("div", make("span", language || "text"), copy);
  head.className = "code-head";
  const body = make("pre", make("code", text));
  body.tabIndex = 0; // so that the keyboard can scroll it
  return [[head, body], end + 1];
}

function heading(lines, i) {
  const [, marks, text] = lines[i].match(BLOCKS[0][0]);
  return [make(`h${Math.min(marks.length + 2, 6)}`, ...inline(text)), i + 1];
}

function rule(lines, i) {
  return [make("hr"), i + 1];
}

function list(lines, first, depth) {
  const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
  const [, indent, mark] = lines[first].match(item);
  const node = make(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) node.start = parseInt(mark, 10);
  let i = first;
  while (i < lines.length) {
    const found = lines[i].match(item);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== /\d/.test(mark)) break;
    const within = [found[3]];
    i += 1;
    while (i < lines.length && (lines[i].search(/\S/) > indent.length || (!lines[i].trim() && lines[i + 1]?.search(/\S/) > indent.length))) {
      within.push(lines[i].slice(Math.min(indent.length + 2, Math.max(lines[i].search(/\S/), 0))));
      i += 1;
    }
    const children = blocks(within, depth + 1);
    // A single paragraph needs no space around it.
    node.append(make("li", ...(children[0]?.nodeName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children)));
    while (i < lines.length && !lines[i].trim() && item.test(lines[i + 1] ?? "")) i += 1;
  }
  return [node, i];
}

function quote(lines, first, depth) {
  let end = first;
  while (end < lines.length && /^\s*>/.test(lines[end])) end += 1;
  const within = lines.slice(first, end).map((line) => line.replace(/^\s*> ?/, ""));
  return [make("blockquote", ...blocks(within, depth + 1)), end];
}

function table(lines, first) {
  let end = first;
  while (end < lines.length && BLOCKS[4][0].test(lines[end])) end += 1;
  const rows = lines.slice(first, end).map((line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim()));
  const divided = rows.length > 1 && rows[1].every((cell) => /^:?-+:?$/.test(cell));
  const row = (cells, name) => make("tr", ...cells.map((cell) => make(name, ...inline(cell))));
  if (!divided) return [make("table", make("tbody", ...rows.map((cells) => row(cells, "td")))), end];
  return [make("table", make("thead", row(rows[0], "th")), make("tbody", ...rows.slice(2).map((cells) => row(cells, "td")))), end];
}

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=\S)([\s\S]*?\S)\*|~~(?=\S)([\s\S]*?\S)~~|\[([^\]\n]*)\]\(([^()\s]*)\)|\n/;

function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const found = depth < 8 ? text.match(INLINE) : null;
    if (!found) return [...nodes, text];
    if (found.index) nodes.push(text.slice(0, found.index));
    text = text.slice(found.index + found[0].length);
    const [whole, , span, strong, emphasised, struck, label, address] = found;
    if (span !== undefined) nodes.push(make("code", span.trim() || span));
    else if (strong !== undefined) nodes.push(make("strong", ...inline(strong, depth + 1)));
    else if (emphasised !== undefined) nodes.push(make("em", ...inline(emphasised, depth + 1)));
    else if (struck !== undefined) nodes.push(make("s", ...inline(struck, depth + 1)));
    else if (address !== undefined) nodes.push(link(label, address) ?? whole);
    else nodes.push(make("br"));
  }
  return nodes;
}

/** A link, if it leads to the web: other addresses, as javascript:, stay text. */
function link(label, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  const node = make("a", label || address);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
