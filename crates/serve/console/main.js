/** The page's frame: which view is shown, and the question for a key. */

import { onKeyNeeded } from "./api.js";
import * as chat from "./chat.js";
import { byId } from "./dom.js";
import * as live from "./live.js";

const VIEWS = ["chat", "live"];

function showView() {
  const asked = location.hash.slice(1);
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
  document.title = shown === "chat" ? "Baton" : "Baton: live";
}

/** Asks until something is entered; the server says whether it is right. */
function askForKey(wasWrong) {
  const dialog = byId("key-dialog");
  byId("key-wrong").hidden = !wasWrong;
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const refuse = (event) => event.preventDefault();
    dialog.addEventListener("cancel", refuse);
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        dialog.removeEventListener("cancel", refuse);
        dialog.close();
        byId("prompt").focus();
        resolve(byId("key").value.trim());
      },
      { once: true },
    );
  });
}

addEventListener("hashchange", showView);
showView();
onKeyNeeded(askForKey);
live.start();
await chat.start();
