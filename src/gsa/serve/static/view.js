// What is shown. Nodes are made and filled with text; nothing is ever parsed as HTML.

import { render } from "/static/markdown.js";
import { path, siblings } from "/static/conversation.js";

export const $ = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function button(text, label, action) {
  const node = make("button", { type: "button", textContent: text });
  node.setAttribute("aria-label", label);
  node.addEventListener("click", action);
  return node;
}

export function bytes(count) {
  const units = ["bytes", "KB", "MB", "GB"];
  let unit = 0;
  while (count >= 1024 && unit < 3) [count, unit] = [count / 1024, unit + 1];
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

/** A sentence for who looks at an answer's costs. */
function costs({ tokens, seconds, prompt, cached, state }) {
  const parts = [`${tokens} tokens`];
  if (seconds > 0) parts.push(`${(tokens / seconds).toFixed(1)} tokens/s`);
  if (prompt !== undefined) parts.push(`read ${prompt - cached} of ${prompt}, ${cached} cached`);
  if (state) parts.push(`state of ${bytes(state)}`);
  return parts.join(" · ");
}

/** Shows an error until the next one, or says that there is none. */
export function complain(text) {
  $("error").textContent = text ?? "";
  $("error").hidden = !text;
}

/** Tells a screen reader something; others see it happen. */
export const announce = (text) => { $("status").textContent = text; };

/** Fills in what an answer says so far. */
export function fill(item, node, chat) {
  const content = item.querySelector(".content");
  if (!chat || node.role !== "assistant") {
    content.textContent = node.content;
    return;
  }
  const parts = document.createDocumentFragment();
  for (const part of render(node.content)) parts.append(part); // one by one: a call has no place for very many
  content.replaceChildren(parts);
}

/** Shows the chosen branches of a conversation; `act` has what its buttons do. */
export function showMessages(conversation, chat, act) {
  const list = $("messages");
  const nodes = path(conversation);
  list.replaceChildren(...nodes.map((node) => message(conversation, node, chat, act)));
  list.scrollTop = list.scrollHeight;
  $("title").textContent = conversation.title;
  document.title = `${conversation.title} – gsa`;
}

function message(conversation, node, chat, act) {
  const answers = node.role === "assistant";
  const author = make("div", { className: "author", textContent: answers ? "Model" : "You" });
  const item = make("li", { className: `${answers ? "assistant" : "user"}${chat ? "" : " plain"}` }, author, make("div", { className: "content" }));
  item.dataset.node = node.id;
  fill(item, node, chat);
  item.append(make("div", { className: "tools" }, ...tools(conversation, node, act)));
  return item;
}

function tools(conversation, node, act) {
  const all = siblings(conversation, node), place = all.indexOf(node);
  const found = [];
  if (all.length > 1) {
    const back = button("‹", "Branch before", () => act.turn(node, -1));
    const on = button("›", "Branch after", () => act.turn(node, 1));
    back.disabled = place === 0;
    on.disabled = place === all.length - 1;
    found.push(back, make("span", { textContent: `${place + 1} of ${all.length}` }), on);
  }
  if (node.role === "assistant") found.push(button("Again", "Write another answer", () => act.again(node)));
  else found.push(button("Edit", "Edit this message in a new branch", () => act.edit(node)));
  if (node.role === "user" && !conversation.chosen[node.id]) found.push(button("Again", "Ask for an answer", () => act.again(node)));
  if (act.busy) found.forEach((one) => { one.disabled = true; }); // one answer at a time
  if (node.stats) found.push(make("span", { className: "stats", textContent: costs(node.stats) }));
  return found;
}

/** Lets a message be edited in its place; the new text goes to `done`. */
export function editor(node, done, cancelled) {
  const item = $("messages").querySelector(`[data-node="${node.id}"]`);
  const field = make("textarea", { value: node.content, rows: 3 });
  field.setAttribute("aria-label", "Edited message");
  const save = button("Send", "Send the edited message", () => done(field.value));
  const cancel = button("Cancel", "Leave the message as it is", cancelled);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancelled();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(field.value); }
  });
  const form = make("div", { className: "editor" }, field, make("div", { className: "tools" }, save, cancel));
  item.replaceChildren(form);
  field.focus();
}

/** Shows the side bar: entries are {id, title, note, current, progress}. */
export function showList(id, entries, open, remove) {
  $(id).replaceChildren(...entries.map((entry) => {
    const main = make("button", { type: "button" }, entry.title);
    if (entry.note) main.append(make("small", { textContent: entry.note }));
    if (entry.current) main.setAttribute("aria-current", "true");
    main.addEventListener("click", () => open(entry.id));
    const away = button("×", `Remove ${entry.title}`, () => remove(entry.id));
    const item = make("li", {}, main, away);
    if (entry.progress) {
      const bar = make("progress", { max: 1, value: entry.progress });
      bar.setAttribute("aria-label", `Reading ${entry.title}`);
      main.append(bar);
    }
    return item;
  }));
}
