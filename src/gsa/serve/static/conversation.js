// A conversation is a tree: an edited message or another answer is a branch beside the first. Each answer has left a
// state on the server, so going on from any place in the tree reads nothing again. Where a state is gone, the messages
// since the last one that is there are told again.

export const uid = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

const ABOUT = "The user has given you this document:\n\n";

export function newConversation(system, document) {
  return {
    id: uid(), created: Date.now(), title: document ? `About ${document.name}` : "New conversation",
    system: document ? "" : system, document: document?.id ?? null, nodes: {}, chosen: {},
  };
}

/** What the model reads first of a document, as a message. */
export const aboutDocument = (text) => ({ role: "system", content: ABOUT + text });

/** The nodes from the first message to the last of the branches that are chosen. */
export function path(conversation) {
  const nodes = [];
  for (let id = conversation.chosen.root; id; id = conversation.chosen[id]) nodes.push(conversation.nodes[id]);
  return nodes;
}

/** Adds a message behind another one (none for the first), and chooses it. */
export function add(conversation, parent, role, content) {
  const node = { id: uid(), parent, role, content, state: null, stats: null };
  conversation.nodes[node.id] = node;
  conversation.chosen[parent ?? "root"] = node.id;
  return node;
}

/** Takes a message back that nothing stands behind; what was chosen before it, if anything, is chosen again. */
export function takeBack(conversation, node, before) {
  delete conversation.nodes[node.id];
  if (before) conversation.chosen[node.parent] = before;
  else delete conversation.chosen[node.parent];
}

/** A message and those that stand in its place, in the order in which they came. */
export const siblings = (conversation, node) => Object.values(conversation.nodes).filter((other) => other.parent === node.parent);

/** Chooses the branch a number of places further. */
export function turn(conversation, node, places) {
  const all = siblings(conversation, node);
  const other = all[all.indexOf(node) + places];
  if (other) conversation.chosen[node.parent ?? "root"] = other.id;
}

/** What is asked for the answer to a message: a state to go on from, and the messages since. */
export function question(conversation, node, document) {
  const since = [];
  for (let at = node; at; at = conversation.nodes[at.parent]) {
    if (at.state) return { state: at.state, since };
    since.unshift(at);
  }
  return { state: document?.state ?? null, since };
}

/** All that was said up to a message, for a server that has none of the states any more. */
export function everything(conversation, node) {
  const since = [];
  for (let at = node; at; at = conversation.nodes[at.parent]) since.unshift(at);
  return since;
}

/** The body of a request. `fresh` says that nothing stands before these messages. */
export function body(conversation, { state, since }, fresh, document, model, settings) {
  const common = {
    ...model.sampling, // what the page has no field for is as the model's makers advise
    model: model.id, temperature: settings.temperature, top_p: settings.top_p, max_tokens: Math.min(settings.max_tokens, model.max_tokens),
    return_state: "id", stream_options: { include_usage: true }, ...(state ? { state } : {}),
  };
  if (!model.chat) {
    return { ...common, prompt: (fresh && document ? document.text : "") + since.map((node) => node.content).join("") };
  }
  const first = !fresh ? [] : document ? [aboutDocument(document.text)] : conversation.system ? [{ role: "system", content: conversation.system }] : [];
  return { ...common, messages: [...first, ...since.map(({ role, content }) => ({ role, content }))] };
}
