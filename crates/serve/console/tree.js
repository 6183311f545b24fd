/**
 * A conversation as data: a tree of messages. Editing a message or asking again adds a branch beside the old one;
 * every node remembers which of its children is shown, so that one path through the tree is what people see.
 *
 * Nothing here touches the page or the server.
 */

const ROOT = "root";
/** Longer titles are cut. */
const TITLE_CHARS = 60;

const newId = () => crypto.randomUUID();

/**
 * A message is `{ role, content }` with, as they apply, `files` (`[{ name, text }]`), `reasoning`, `toolCalls`
 * (`[{ id, name, arguments }]`), `toolCallId`, `model`, `finish`, `error` and figures of how it was made.
 */
export function newConversation(now = Date.now()) {
  const root = { id: ROOT, parent: null, role: ROOT, children: [], chosen: null };
  return { id: newId(), title: "", created: now, updated: now, nodes: { [ROOT]: root } };
}

/** Adds a message below another one and shows it. */
export function add(conversation, parent, message, now = Date.now()) {
  const node = { ...message, id: newId(), parent: parent?.id ?? ROOT, created: now, children: [], chosen: null };
  const above = conversation.nodes[node.parent];
  conversation.nodes[node.id] = node;
  above.children.push(node.id);
  above.chosen = node.id;
  conversation.updated = now;
  return node;
}

/** The messages that are shown, the first one first. */
export function path(conversation) {
  const shown = [];
  for (let at = conversation.nodes[ROOT]; at.chosen; ) {
    at = conversation.nodes[at.chosen];
    shown.push(at);
  }
  return shown;
}

/** A message and those that stand in its place. */
export function siblings(conversation, node) {
  return conversation.nodes[node.parent].children.map((id) => conversation.nodes[id]);
}

/** Shows another message in the place of this one. */
export function choose(conversation, node) {
  conversation.nodes[node.parent].chosen = node.id;
}

export const parentOf = (conversation, node) => (node.parent === ROOT ? null : conversation.nodes[node.parent]);

/** A conversation of its own with the messages up to this one. */
export function branchOff(conversation, node, now = Date.now()) {
  const branch = newConversation(now);
  branch.title = `${title(conversation)} (branch)`;
  const shown = path(conversation);
  let above = null;
  for (const message of shown.slice(0, shown.indexOf(node) + 1)) {
    const { id, parent, children, chosen, ...content } = message;
    above = add(branch, above, structuredClone(content), now);
  }
  return branch;
}

/** What the person has called it, else how it begins. */
export function title(conversation) {
  if (conversation.title) {
    return conversation.title;
  }
  const first = path(conversation).find((node) => node.role === "user");
  const line = (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
  const characters = [...line];
  return (characters.length > TITLE_CHARS ? `${characters.slice(0, TITLE_CHARS).join("").trim()}…` : line) || "New chat";
}

/** An answer that says something. */
const answers = (node) => node.role === "assistant" && node.content !== "";

/** Whether the results of an answer's calls follow it. */
function isResolved(shown, index) {
  const calls = shown[index].toolCalls?.length ?? 0;
  const results = shown.slice(index + 1, index + 1 + calls);
  return calls > 0 && results.length === calls && results.every((node) => node.role === "tool");
}

/**
 * The messages that the model is not told of: turns without an answer, because it failed or was stopped before its
 * first word, and results of tools that do not belong to a call. What comes last has no answer yet and is told.
 */
export function leftOut(shown) {
  const left = new Set();
  shown.forEach((node, index) => {
    const silent = node.role === "assistant" && node.finish !== "running" && !answers(node);
    if (silent && !isResolved(shown, index)) {
      left.add(node.id);
      // Only where the question asks for nothing but this answer.
      if (shown[index - 1]?.role === "user" && index + 1 < shown.length) {
        left.add(shown[index - 1].id);
      }
    }
  });
  shown.forEach((node, index) => {
    if (node.role !== "tool") {
      return;
    }
    let call = index - 1;
    while (shown[call]?.role === "tool") {
      call -= 1;
    }
    if (!shown[call] || left.has(shown[call].id) || !isResolved(shown, call)) {
      left.add(node.id);
    }
  });
  return left;
}

/** The messages of a request, in the API's words, up to the end of what is shown. */
export function forRequest(shown, system) {
  const left = leftOut(shown);
  const messages = system ? [{ role: "system", content: system }] : [];
  shown.forEach((node, index) => {
    if (!left.has(node.id)) {
      messages.push(inApiWords(node, isResolved(shown, index)));
    }
  });
  return messages;
}

function inApiWords(node, resolved) {
  if (node.role === "tool") {
    return { role: "tool", tool_call_id: node.toolCallId, content: node.content };
  }
  if (node.role === "user" || !resolved) {
    return { role: node.role, content: withFiles(node) };
  }
  const calls = node.toolCalls.map(({ id, name, arguments: given }) => {
    return { id, type: "function", function: { name, arguments: given } };
  });
  return { role: "assistant", content: node.content || null, tool_calls: calls };
}

/** A message with its files, each fenced by more backticks than it holds. */
export function withFiles(node) {
  const files = (node.files ?? []).map(({ name, text }) => {
    const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, node.content].filter(Boolean).join("\n\n");
}

/** Where a conversation holds some words: the text around them, `null` where it does not. */
export function find(conversation, words) {
  const wanted = words.toLocaleLowerCase();
  if (title(conversation).toLocaleLowerCase().includes(wanted)) {
    return "";
  }
  for (const node of Object.values(conversation.nodes)) {
    const text = [node.content, ...(node.files ?? []).map((file) => file.text)].filter(Boolean).join("\n");
    const at = text.toLocaleLowerCase().indexOf(wanted);
    if (at >= 0) {
      return `…${text.slice(Math.max(0, at - 24), at + 60).replace(/\s+/g, " ")}…`;
    }
  }
  return null;
}

/** An answer that was coming when its page was closed is not coming any more. */
export function mend(conversation) {
  for (const node of Object.values(conversation.nodes)) {
    if (node.finish === "running") {
      node.finish = "interrupted";
    }
  }
  return conversation;
}
