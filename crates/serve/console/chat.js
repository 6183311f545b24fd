/** The chat: what is shown of a conversation, and what a person does to it. */

import { models } from "./api.js";
import * as attach from "./attach.js";
import { announce, byId } from "./dom.js";
import { MessageView } from "./message.js";
import { closeOverlays, reveal } from "./panels.js";
import { Run } from "./run.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";
import { add, branchOff, choose, forRequest, leftOut, newConversation, parentOf, path, siblings } from "./tree.js";

/** An answer that is coming is written to the store this often. */
const SAVE_MS = 2000;

/** The conversation that is shown; it is kept from its first message on. */
let current = newConversation();
/** The answers that are coming, by conversation. */
const runs = new Map();
/** The messages on the page, in order. */
let views = [];

export async function start() {
  const kept = await store.open();
  byId("not-kept").hidden = kept;
  settings.start();
  attach.start(updateButtons);
  sidebar.start({ current: () => current.id, show });
  store.onChange(changedElsewhere);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", promptKey);
  byId("prompt").addEventListener("input", updateButtons);
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", () => show(null));
  byId("to-end").addEventListener("click", () => scroll(true));
  byId("log").addEventListener("scroll", () => (byId("to-end").hidden = isAtEnd()), { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      stop();
    }
  });
  addEventListener("pagehide", () => [...runs.values()].forEach((run) => saveIfKept(run.conversation)));
  for (const idea of document.querySelectorAll("[data-prompt]")) {
    idea.addEventListener("click", () => {
      byId("prompt").value = idea.dataset.prompt;
      send();
    });
  }
  open();
}

/** Asks what is served; also when the server was away. */
export async function listModels() {
  settings.setServer(await models(), null);
}

function promptKey(event) {
  // Enter that ends an input method's composition belongs to the input method.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && byId("prompt").value === "") {
    const last = views.filter((view) => view.node.role === "user").at(-1);
    if (last && !runs.has(current.id)) {
      event.preventDefault();
      last.edit();
    }
  }
}

/**
 * Shows a conversation by its address, so that the browser's way back works. It is shown at once: the browser tells of a new
 * address some time later, and what is typed and sent until then belongs to what was asked for, not to what was shown before.
 */
function show(id) {
  const wanted = id ? `#chat/${id}` : "#chat";
  if (location.hash !== wanted && (id || location.hash !== "")) {
    location.hash = wanted;
  }
  open();
}

/** Shows what the address names; a name that is not known is a new conversation. */
export function open() {
  const id = location.hash.match(/^#chat\/(.+)$/)?.[1];
  const found = id ? (runs.get(id)?.conversation ?? store.get(id)) : null;
  if (found && found.id === current.id && views.length > 0) {
    return;
  }
  current = found ?? newConversation();
  views = [];
  sync();
  scroll(true);
  sidebar.draw();
  closeOverlays();
  if (!byId("view-chat").hidden && matchMedia("(hover: hover)").matches) {
    byId("prompt").focus();
  }
}

function changedElsewhere(id, fromElsewhere) {
  const run = runs.get(id);
  const kept = store.get(id);
  if (!kept) {
    // Deleted: nobody waits for its answer.
    run?.stop();
  } else if (run) {
    // The answer is written into the run's own copy; of the other page's, the new name is taken over.
    run.conversation.title = kept.title;
  }
  if (fromElsewhere && id === current.id && !runs.has(id)) {
    current = store.get(id) ?? newConversation();
    views = [];
    sync();
  }
}

/** Brings the page in line with the conversation; messages that stay keep their place. */
function sync() {
  const shown = path(current);
  const same = shown.findIndex((node, at) => views[at]?.node !== node);
  const from = same < 0 ? shown.length : same;
  views = [...views.slice(0, from), ...shown.slice(from).map((node) => new MessageView(node, ACTIONS))];
  const left = leftOut(shown);
  views.forEach((view, at) => {
    const beside = siblings(current, view.node);
    const place = { index: beside.indexOf(view.node), count: beside.length, leftOut: left.has(view.node.id), isLast: at + 1 === views.length };
    if (at >= from || JSON.stringify(place) !== JSON.stringify(view.place)) {
      view.draw(place);
    }
  });
  const log = byId("log");
  const wanted = new Set(views.map((view) => view.shown));
  [...log.querySelectorAll(".message")].filter((message) => !wanted.has(message)).forEach((message) => message.remove());
  log.append(...views.slice(from).map((view) => view.shown));
  byId("welcome").hidden = views.length > 0;
  // The way back from another view.
  byId("tab-chat").href = store.get(current.id) ? `#chat/${current.id}` : "#chat";
  updateButtons();
}

function updateButtons() {
  const busy = runs.has(current.id);
  const empty = byId("prompt").value.trim() === "" && attach.count() === 0;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("send").disabled = empty;
}

function stop() {
  runs.get(current.id)?.stop();
}

function send() {
  const prompt = byId("prompt");
  const content = prompt.value.trim();
  if ((!content && attach.count() === 0) || runs.has(current.id) || !isReady()) {
    return;
  }
  prompt.value = "";
  const files = attach.take();
  const last = path(current).at(-1);
  const node = add(current, last, { role: "user", content, ...(files.length > 0 ? { files } : {}) });
  prompt.focus();
  answer(node);
}

/** Whether the settings can be sent; shows the one that cannot. */
function isReady() {
  const { wrong } = settings.read();
  if (wrong) {
    reveal("settings");
    byId("fields-more-details").open = true;
    byId(wrong).focus();
  }
  return !wrong;
}

/** Streams an answer to a message. */
async function answer(above) {
  const conversation = current;
  const shown = path(conversation);
  const { body, system } = settings.read();
  const messages = forRequest(shown.slice(0, shown.indexOf(above) + 1), system);
  const node = add(conversation, above, { role: "assistant", content: "", finish: "running", model: body.model ?? "" });
  const run = new Run(conversation, node, { ...body, messages }, progress);
  runs.set(conversation.id, run);
  const isNew = location.hash !== `#chat/${conversation.id}`;
  store.save(conversation);
  if (isNew && !byId("view-chat").hidden) {
    history.replaceState(null, "", `#chat/${conversation.id}`);
    sidebar.draw();
  }
  sync();
  scroll(true);
  announce("The answer is being written.");
  await run.go();
}

/** An answer has grown or ended. */
function progress(run) {
  const { conversation, node } = run;
  const view = views.find((one) => one.node === node);
  if (!run.ended) {
    view?.schedule(following);
    if (performance.now() - (run.savedAt ?? run.started) > SAVE_MS) {
      run.savedAt = performance.now();
      saveIfKept(conversation);
    }
    return;
  }
  runs.delete(conversation.id);
  conversation.updated = Date.now();
  saveIfKept(conversation);
  if (view) {
    following(() => {
      view.draw();
      sync();
    });
    announce(node.error ? `${node.error.title} ${node.error.advice}` : "The answer is complete.");
  }
  updateButtons();
}

/** It may have been deleted meanwhile. */
function saveIfKept(conversation) {
  if (store.get(conversation.id)) {
    store.save(conversation);
  }
}

/** Draws and follows the answer, unless the reader has scrolled back. */
function following(draw) {
  const follow = isAtEnd();
  draw();
  scroll(follow);
}

function isAtEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function scroll(follow) {
  if (follow) {
    byId("log").scrollTop = byId("log").scrollHeight;
  }
  byId("to-end").hidden = isAtEnd();
}

/** What a person may do to a message. */
const ACTIONS = {
  /** A changed question is asked; a changed answer stands beside the old one. */
  edit(node, content) {
    if (runs.has(current.id) || (node.role === "user" && !isReady())) {
      return;
    }
    const above = parentOf(current, node);
    if (node.role === "user") {
      answer(add(current, above, { role: "user", content, ...(node.files ? { files: node.files } : {}) }));
      byId("prompt").focus();
    } else {
      add(current, above, { role: "assistant", content, model: node.model, finish: "edited" });
      store.save(current);
      sync();
    }
  },
  /** Asks the same once more. The old answer stays beside the new one. */
  retry(node) {
    if (!runs.has(current.id) && isReady()) {
      answer(parentOf(current, node));
    }
  },
  choose(node, by) {
    const beside = siblings(current, node);
    choose(current, beside[beside.indexOf(node) + by]);
    store.save(current);
    sync();
    const shown = views.find((view) => view.node === beside[beside.indexOf(node) + by]);
    shown?.shown.querySelector(".switcher button:not(:disabled)")?.focus();
  },
  branch(node) {
    const branch = branchOff(current, node);
    store.save(branch);
    show(branch.id);
  },
  results(node, texts) {
    if (runs.has(current.id) || !isReady()) {
      return;
    }
    let above = node;
    node.toolCalls.forEach((call, at) => {
      above = add(current, above, { role: "tool", toolCallId: call.id, content: texts[at] });
    });
    answer(above);
  },
};
