/** The page's frame: which view is shown, and what happens when the server comes and goes. */

import * as chat from "./chat.js";
import * as connection from "./connection.js";
import { byId, drawIcons } from "./dom.js";
import "./key.js";
import * as live from "./live.js";
import * as panels from "./panels.js";
import * as settings from "./settings.js";

const VIEWS = ["chat", "live"];

function showView() {
  const asked = location.hash.slice(1).split("/")[0];
  const shown = VIEWS.includes(asked) ? asked : "chat";
  for (const view of VIEWS) {
    byId(`view-${view}`).hidden = view !== shown;
    const tab = byId(`tab-${view}`);
    if (view === shown) {
      tab.setAttribute("aria-current", "page");
    } else {
      tab.removeAttribute("aria-current");
    }
  }
  for (const toggle of document.querySelectorAll(".only-chat")) {
    toggle.hidden = shown !== "chat";
  }
  document.title = shown === "chat" ? "Baton" : "Baton: live";
  panels.closeOverlays();
}

/** The models are asked for until they are known. */
async function listModels() {
  try {
    await chat.listModels();
  } catch {
    // The connection says so, and asks again.
  }
}

drawIcons();
panels.start();
showView();
await chat.start();
addEventListener("hashchange", () => {
  showView();
  if (!byId("view-chat").hidden) {
    chat.open();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    panels.reveal("sidebar");
    byId("search").focus();
  }
});
live.start();
connection.on("stats", (stats) => settings.setServer(null, stats));
connection.on("back", listModels);
connection.start();
await listModels();
