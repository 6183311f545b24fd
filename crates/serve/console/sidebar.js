/** The list of conversations: search, rename, export, delete, and back in from a file. */

import { button, byId, element, icon, openMenu, toast } from "./dom.js";
import { day, plural } from "./format.js";
import * as store from "./store.js";
import { download, fileName, fromJson, toJson, toMarkdown } from "./transfer.js";
import { find, title } from "./tree.js";

let open = { current: () => null, show: () => {} };
/** The conversation whose title is being changed. */
let renaming = null;

/** `actions.current()` is the id of the shown conversation, `actions.show(id)` shows one; `null` is a new one. */
export function start(actions) {
  open = actions;
  byId("search").addEventListener("input", draw);
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && byId("search").value) {
      event.stopPropagation();
      byId("search").value = "";
      draw();
    }
  });
  byId("list-menu").addEventListener("click", () => listMenu(byId("list-menu")));
  byId("import").addEventListener("change", takeIn);
  store.onChange(draw);
  draw();
}

function listMenu(anchor) {
  const all = store.all();
  const entries = [["Import…", () => byId("import").click()]];
  if (all.length > 0) {
    entries.push(["Export all", () => download("baton-chats.json", "application/json", toJson(all))]);
    entries.push(["Delete all…", confirmAll, "danger"]);
  }
  openMenu(anchor, entries);
}

async function takeIn() {
  const [file] = byId("import").files;
  byId("import").value = "";
  try {
    const read = fromJson(await file.text());
    await Promise.all(read.map(store.save));
    toast(`${plural(read.length, "chat")} imported.`);
  } catch (error) {
    toast(error.message);
  }
}

function confirmAll() {
  const dialog = byId("confirm");
  const all = store.all();
  byId("confirm-text").textContent = `${plural(all.length, "chat")} will be deleted from this browser. This cannot be undone.`;
  dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue === "delete") {
      all.forEach(({ id }) => store.remove(id));
      open.show(null);
    }
  };
  dialog.showModal();
}

export function draw() {
  const list = byId("conversations");
  if (renaming && list.querySelector("input")) {
    // Somebody is typing.
    return;
  }
  const focused = list.contains(document.activeElement) ? document.activeElement.closest("li") : null;
  const focusedAt = focused?.querySelector("a")?.getAttribute("href");
  const words = byId("search").value.trim();
  const shown = store.all().map((conversation) => ({ conversation, found: words ? find(conversation, words) : "" }));
  const rows = shown.filter(({ found }) => found !== null);
  const parts = [];
  let heading = null;
  for (const { conversation, found } of rows) {
    const under = day(conversation.updated);
    if (under !== heading) {
      heading = under;
      parts.push(element("li", { class: "day", role: "presentation" }, heading));
    }
    parts.push(row(conversation, found));
  }
  list.replaceChildren(...parts);
  if (focusedAt) {
    list.querySelector(`a[href="${focusedAt}"]`)?.focus();
  }
  byId("no-conversations").hidden = rows.length > 0;
  byId("no-conversations").textContent = words ? `No chat holds “${words}”.` : "Your chats will be listed here.";
}

function row(conversation, found) {
  const { id } = conversation;
  if (renaming === id) {
    return element("li", {}, renameField(conversation));
  }
  const name = title(conversation);
  const current = open.current() === id;
  const snippet = found ? element("small", {}, found) : null;
  const link = element("a", { href: `#chat/${id}`, title: name, "aria-current": current ? "true" : null }, element("span", {}, name), snippet);
  const more = button("", () => rowMenu(more, conversation), { class: "icon-button", "aria-label": `More for ${name}`, "aria-haspopup": "menu" });
  more.append(icon("more"));
  link.addEventListener("dblclick", () => rename(id));
  return element("li", { class: current ? "current" : null }, link, more);
}

function rowMenu(anchor, conversation) {
  const name = title(conversation);
  openMenu(anchor, [
    ["Rename", () => rename(conversation.id)],
    ["Export as Markdown", () => download(fileName(name, "md"), "text/markdown", toMarkdown(conversation))],
    ["Export as JSON", () => download(fileName(name, "json"), "application/json", toJson([conversation]))],
    ["Delete", () => remove(conversation), "danger"],
  ]);
}

function rename(id) {
  renaming = id;
  draw();
  byId("conversations").querySelector("input")?.select();
}

function renameField(conversation) {
  const field = element("input", { type: "text", value: title(conversation), maxlength: 200, "aria-label": "Title" });
  const end = (save) => {
    if (renaming !== conversation.id) {
      return;
    }
    renaming = null;
    const text = field.value.trim();
    if (save && text !== title(conversation)) {
      conversation.title = text;
      store.save(conversation);
    }
    draw();
    byId("conversations").querySelector(`a[href="#chat/${conversation.id}"]`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) {
      end(true);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      end(false);
    }
  });
  field.addEventListener("blur", () => end(true));
  return field;
}

function remove(conversation) {
  const wasShown = open.current() === conversation.id;
  store.remove(conversation.id);
  if (wasShown) {
    open.show(null);
  }
  toast(`“${title(conversation)}” was deleted.`, {
    label: "Undo",
    run: () => {
      store.save(conversation);
      open.show(conversation.id);
    },
  });
}
