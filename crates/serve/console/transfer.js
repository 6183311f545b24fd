/** Conversations out of the browser and back in: Markdown for people, JSON for another browser. */

import { element } from "./dom.js";
import { newConversation, path, title, withFiles } from "./tree.js";

const FORMAT = "baton conversations 1";
const SPEAKERS = { user: "You", assistant: "Answer", tool: "Tool result" };
/** What a message may bring, by its kind; the rest of a file is dropped. */
const TEXTS = ["content", "reasoning", "model", "finish", "toolCallId"];
const NUMBERS = ["created", "numTokens", "firstTokenMs", "writingMs", "thinkingMs"];
const ROLES = ["user", "assistant", "tool"];

/** The messages that are shown. */
export function toMarkdown(conversation) {
  const parts = path(conversation).map((node) => {
    const speaker = `**${SPEAKERS[node.role]}**${node.model ? ` (${node.model})` : ""}`;
    const calls = (node.toolCalls ?? []).map((call) => `Tool call: \`${call.name}(${call.arguments})\``);
    return [speaker, withFiles(node), ...calls, ...(node.error ? [`(${node.error.title})`] : [])].filter(Boolean).join("\n\n");
  });
  return `# ${title(conversation)}\n\n${parts.join("\n\n---\n\n")}\n`;
}

/** All branches. */
export function toJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, conversations }, null, 1)}\n`;
}

/** The conversations of a file, as new ones. Throws with words for people. */
export function fromJson(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (read?.format !== FORMAT || !Array.isArray(read.conversations)) {
    throw new Error("This file holds no conversations of Baton.");
  }
  return read.conversations.map(checked);
}

/** Copies what is sound: a file may come from anywhere. */
function checked(read) {
  const made = newConversation(Number.isFinite(read?.created) ? read.created : Date.now());
  made.title = typeof read?.title === "string" ? read.title.slice(0, 200) : "";
  made.updated = Number.isFinite(read?.updated) ? read.updated : made.created;
  const theirs = read?.nodes ?? {};
  // From the root down, so that no message is its own ancestor.
  const open = [["root", "root"]];
  const seen = new Set();
  while (open.length > 0) {
    const [their, our] = open.pop();
    const from = Object.hasOwn(theirs, their) ? theirs[their] : null;
    if (!from || seen.has(their)) {
      continue;
    }
    seen.add(their);
    const children = Array.isArray(from.children) ? from.children.filter((id) => isMessage(theirs, id) && !seen.has(id)) : [];
    for (const child of children) {
      const node = { ...message(theirs[child]), id: crypto.randomUUID(), parent: our, children: [], chosen: null };
      made.nodes[node.id] = node;
      made.nodes[our].children.push(node.id);
      if (child === from.chosen || made.nodes[our].chosen === null) {
        made.nodes[our].chosen = node.id;
      }
      open.push([child, node.id]);
    }
  }
  return made;
}

const isMessage = (nodes, id) => typeof id === "string" && Object.hasOwn(nodes, id) && ROLES.includes(nodes[id]?.role);

function message(read) {
  const made = { role: read.role, content: "" };
  TEXTS.filter((name) => typeof read[name] === "string").forEach((name) => (made[name] = read[name]));
  NUMBERS.filter((name) => Number.isFinite(read[name])).forEach((name) => (made[name] = read[name]));
  const texts = (list, names) =>
    (Array.isArray(list) ? list : []).map((one) => Object.fromEntries(names.map((name) => [name, String(one?.[name] ?? "")])));
  if (read.files) made.files = texts(read.files, ["name", "text"]);
  if (read.toolCalls) made.toolCalls = texts(read.toolCalls, ["id", "name", "arguments"]);
  if (read.error) [made.error] = texts([read.error], ["title", "advice", "detail"]);
  return made;
}

/** Gives a file to the browser. */
export function download(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A name that every system takes. */
export function fileName(text, ending) {
  const plain = text.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${plain || "chat"}.${ending}`;
}
