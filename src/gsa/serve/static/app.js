// The page: wires what is shown, what is stored and what is asked.

import * as api from "/static/api.js";
import * as storage from "/static/storage.js";
import * as tree from "/static/conversation.js";
import { $, announce, bytes, complain, editor, fill, showList, showMessages } from "/static/view.js";

let model = null;
let current = null;
let writing = null; // an AbortController while an answer is written
let written = null; // the conversation it is written in, which need not be the one that is shown
const conversations = new Map();
const documents = new Map();
const reading = new Map(); // AbortControllers of documents that are read, by their ids
const DEFAULTS = { temperature: 0.8, top_p: 0.95, max_tokens: 512, system: "" }; // where a model's makers advise nothing
let advised = DEFAULTS;
let settings = DEFAULTS;

const newest = (map) => [...map.values()].sort((a, b) => b.created - a.created);
const documentOf = (conversation) => documents.get(conversation.document) ?? null;
const lost = (error) => error instanceof api.ApiError && error.code === "state_not_found";

function guarded(action) {
  return async (...given) => {
    complain(null);
    try {
      await action(...given);
    } catch (error) {
      if (error.name !== "AbortError") complain(error.message);
    }
  };
}

function show() {
  const conversation = current; // the buttons belong to what is shown
  const act = (action) => guarded((...given) => action(conversation, ...given));
  showMessages(conversation, model.chat, { busy: writing !== null, turn: act(turn), again: act(again), edit: act(edit) });
  showSide();
}

function showSide() {
  showList("conversations", newest(conversations).map((one) => ({ id: one.id, title: one.title, current: one === current })), open, guarded(forget));
  showList("documents", newest(documents).map((one) => ({
    id: one.id, title: one.name, progress: one.progress, note: one.state ? `${one.tokens} tokens, state of ${bytes(one.bytes)}` : "",
  })), about, guarded(discard));
}

function open(id) {
  current = conversations.get(id);
  closeMenu();
  show();
}

function begin(document = null) {
  current = tree.newConversation(settings.system, document);
  closeMenu();
  show();
  $("message").focus();
}

function about(id) {
  if (documents.get(id).state) begin(documents.get(id));
}

async function forget(id) {
  conversations.delete(id);
  if (written?.id === id) writing.abort();
  await storage.drop("conversations", id);
  if (current.id === id) begin();
  showSide();
}

async function discard(id) {
  const { state } = documents.get(id);
  documents.delete(id);
  reading.get(id)?.abort();
  await storage.drop("documents", id);
  showSide();
  if (state) await api.remove(`/v1/states/${state}`).catch((error) => { if (error.status !== 404) throw error; });
}

async function keep(conversation) {
  conversations.set(conversation.id, conversation);
  await storage.merge(conversation);
}

/** Has the model answer a message. Other conversations can be looked at meanwhile. */
async function answer(conversation, node) {
  if (writing) return;
  const document = documentOf(conversation);
  const before = conversation.chosen[node.id];
  const reply = tree.add(conversation, node.id, "assistant", "");
  [writing, written] = [new AbortController(), conversation];
  busy(true);
  show();
  try {
    await write(conversation, node, reply, document);
    announce("The answer is complete.");
  } finally {
    if (!reply.content && !reply.state) tree.takeBack(conversation, reply, before); // nothing came: it would be told to the model as said
    try {
      if (conversations.has(conversation.id)) await keep(conversation); // else it was removed meanwhile
    } finally {
      writing = written = null;
      busy(false);
      finished(conversation);
    }
  }
}

/** Shows that an answer is written. Who reads another conversation stays at the same place in it. */
function finished(conversation) {
  const list = $("messages"), place = list.scrollTop;
  show();
  if (current !== conversation) list.scrollTop = place;
}

async function write(conversation, node, reply, document) {
  const found = tree.question(conversation, node, document);
  const ask = (question, fresh) => receive(conversation, reply, tree.body(conversation, question, fresh, document, model, settings));
  try {
    await ask(found, !found.state);
  } catch (error) {
    if (!lost(error)) throw error;
    // The server has forgotten: it is told all of it again.
    if (document) await renew(document);
    await ask({ state: document?.state ?? null, since: tree.everything(conversation, node) }, !document);
  }
}

async function receive(conversation, reply, body) {
  const route = model.chat ? "/v1/chat/completions" : "/v1/completions";
  let begun = 0, state = null;
  for await (const event of api.stream(route, body, writing.signal)) {
    const choice = event.choices[0];
    const text = (model.chat ? choice?.delta.content : choice?.text) ?? "";
    if (text) {
      begun ||= performance.now();
      reply.content += text;
      refresh(conversation, reply);
    }
    if (choice?.state) [state, reply.state] = [choice.state, choice.state.id];
    if (event.usage) {
      reply.stats = {
        tokens: event.usage.completion_tokens, seconds: begun ? (performance.now() - begun) / 1000 : 0,
        prompt: event.usage.prompt_tokens, cached: event.usage.prompt_tokens_details.cached_tokens, state: state?.bytes,
      };
    }
  }
}

let waiting = null;
/** Shows new text, once for every picture that the screen makes. */
function refresh(conversation, reply) {
  waiting ??= requestAnimationFrame(() => {
    waiting = null;
    const item = current === conversation && $("messages").querySelector(`[data-node="${reply.id}"]`);
    if (!item) return;
    const list = $("messages"), below = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
    fill(item, reply, model.chat);
    if (below) list.scrollTop = list.scrollHeight;
  });
}

async function send(text) {
  if (!text.trim() || writing) return;
  const conversation = current, last = tree.path(conversation).at(-1);
  const node = tree.add(conversation, last?.id ?? null, "user", text);
  if (!last) conversation.title = text.trim().slice(0, 60);
  await keep(conversation);
  await answer(conversation, node);
}

async function again(conversation, node) {
  await answer(conversation, node.role === "user" ? node : conversation.nodes[node.parent]);
}

async function turn(conversation, node, places) {
  tree.turn(conversation, node, places);
  await keep(conversation);
  show();
}

function edit(conversation, node) {
  editor(node, guarded(async (text) => {
    if (!text.trim()) return;
    const edited = tree.add(conversation, node.parent, "user", text);
    await keep(conversation);
    await answer(conversation, edited);
  }), show);
}

/** Has the server read a document into a state, and shows how far it is. */
async function readInto(one) {
  announce(`Reading ${one.name}.`);
  const body = model.chat ? { messages: [tree.aboutDocument(one.text)] } : { text: one.text };
  reading.set(one.id, new AbortController());
  try {
    for await (const event of api.stream("/v1/states", { ...body, name: one.name.slice(0, 200) }, reading.get(one.id).signal)) {
      if (event.object === "state.progress") one.progress = Math.max(event.read / event.tokens, 0.001);
      else [one.state, one.tokens, one.bytes, one.progress] = [event.id, event.tokens, event.bytes, null];
      showSide();
    }
  } finally {
    reading.delete(one.id);
  }
  await storage.put("documents", one);
  announce(`${one.name} is read: ${one.tokens} tokens.`);
}

async function read(file) {
  const text = await file.text();
  if (!text.trim()) throw new Error(`${file.name} is empty`);
  const one = { id: tree.uid(), created: Date.now(), name: file.name, text, state: null, progress: 0.001 };
  documents.set(one.id, one);
  showSide();
  try {
    await readInto(one);
  } catch (error) {
    if (!documents.delete(one.id)) return; // it was removed meanwhile, and files behind it are still to be read
    showSide();
    throw error;
  }
  if (!writing && documents.has(one.id)) begin(one);
}

/** Reads a document again if the server has forgotten it. */
async function renew(one) {
  try {
    await api.get(`/v1/states/${one.state}`);
  } catch (error) {
    if (!lost(error)) throw error;
    await readInto(one);
  }
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("messages").setAttribute("aria-busy", String(is));
}

function closeMenu() {
  $("side").classList.remove("open");
  $("menu").setAttribute("aria-expanded", "false");
}

function wire() {
  const submit = guarded(async () => {
    const text = $("message").value;
    if (!text.trim() || writing) return;
    $("message").value = "";
    await send(text);
  });
  $("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") { writing?.abort(); closeMenu(); } });
  $("stop").addEventListener("click", () => { writing?.abort(); $("message").focus(); });
  $("new").addEventListener("click", () => begin());
  $("menu").addEventListener("click", () => {
    const open = $("side").classList.toggle("open");
    $("menu").setAttribute("aria-expanded", String(open));
  });
  for (const name of ["temperature", "top_p", "max_tokens", "system"]) {
    $(name).value = settings[name];
    $(name).addEventListener("change", () => {
      if (!$(name).checkValidity()) return;
      // An empty field is valid, but no number: it goes back to what it was at first.
      if (name !== "system" && !$(name).value) $(name).value = advised[name];
      settings[name] = name === "system" ? $(name).value : Number($(name).value);
      storage.settings.write(settings);
    });
  }
  const readAll = guarded(async (files) => { for (const file of files) await read(file); });
  $("file").addEventListener("change", () => { readAll([...$("file").files]); $("file").value = ""; });
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    readAll([...event.dataTransfer.files]);
  });
}

await guarded(async () => {
  [model] = (await api.get("/v1/models")).data;
  advised = { ...DEFAULTS, ...model.sampling };
  settings = storage.settings.read(advised);
  $("model").textContent = `${model.id}, ${(model.parameters / 1e6).toFixed(1)}M parameters` + (model.state_bytes ? `, state of ${bytes(model.state_bytes)}` : "");
  $("system-label").hidden = !model.chat;
  if (!model.chat) $("message").placeholder = "A text to continue. Enter sends, Shift+Enter begins a new line.";
  for (const one of await storage.all("documents")) documents.set(one.id, one);
  for (const one of await storage.all("conversations")) conversations.set(one.id, one);
  wire();
  const [last] = newest(conversations);
  if (last) open(last.id);
  else begin();
})();
