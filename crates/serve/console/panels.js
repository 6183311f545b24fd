/**
 * The panels at the sides: conversations and settings. In a wide window they stand beside the chat and their state is
 * kept; in a narrow one they lie over it, one at a time, and close when something else is touched.
 */

import { byId } from "./dom.js";

const KEY = "baton.panels";
const PANELS = { sidebar: "toggle-sidebar", settings: "toggle-settings" };
const wide = matchMedia("(min-width: 64.01rem)");

let open = { sidebar: true, settings: true };

export function start() {
  try {
    open = { ...open, ...JSON.parse(localStorage.getItem(KEY)) };
  } catch {
    // Then as they are at first.
  }
  for (const [name, toggle] of Object.entries(PANELS)) {
    byId(toggle).addEventListener("click", () => set(name, !isOpen(name)));
    byId(`close-${name}`).addEventListener("click", () => set(name, false));
    byId(name).addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !wide.matches) {
        event.stopPropagation();
        set(name, false);
      }
    });
  }
  byId("backdrop").addEventListener("click", closeOverlays);
  wide.addEventListener("change", arrange);
  arrange();
}

const isOpen = (name) => byId(PANELS[name]).getAttribute("aria-expanded") === "true";

/** As the width of the window wants it. */
function arrange() {
  for (const name of Object.keys(PANELS)) {
    show(name, wide.matches && open[name]);
  }
}

function show(name, isShown) {
  byId(name).dataset.open = String(isShown);
  byId(name).inert = !isShown;
  byId(PANELS[name]).setAttribute("aria-expanded", String(isShown));
  byId("backdrop").hidden = wide.matches || !Object.keys(PANELS).some(isOpen);
}

function set(name, isShown) {
  const hadFocus = byId(name).contains(document.activeElement);
  if (wide.matches) {
    open[name] = isShown;
    try {
      localStorage.setItem(KEY, JSON.stringify(open));
    } catch {
      // Then for this page only.
    }
  } else if (isShown) {
    Object.keys(PANELS).forEach((other) => show(other, false));
  }
  show(name, isShown);
  if (isShown && !wide.matches) {
    byId(`close-${name}`).focus();
  } else if (hadFocus) {
    byId(PANELS[name]).focus();
  }
}

/** Shows a panel because something in it wants attention. */
export const reveal = (name) => isOpen(name) || set(name, true);

/** What lies over the chat goes away. */
export function closeOverlays() {
  if (!wide.matches) {
    Object.keys(PANELS).filter(isOpen).forEach((name) => set(name, false));
  }
}
