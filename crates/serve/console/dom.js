/** Makes elements. Text only ever becomes a text node: nothing a model or a server says is read as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** Lines of the icons, drawn on a field of 24 × 24. */
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  sliders: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.5a2.5 2.5 0 1 1 0 5 2.5 2.5 0 0 1 0-5ZM8 13.5a2.5 2.5 0 1 1 0 5 2.5 2.5 0 0 1 0-5Z",
  clip: "m20 11-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7l-8.5 8.4a1.6 1.6 0 0 1-2.3-2.3L14.5 7",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  close: "M6 6l12 12M18 6 6 18",
  reset: "M4 9a8.5 8.5 0 1 1-.5 5M4 4v5h5",
  down: "M12 5v14M6 13l6 6 6-6",
  search: "M10.5 4a6.5 6.5 0 1 1 0 13 6.5 6.5 0 0 1 0-13ZM15.3 15.3 20 20",
  sun: "M12 8a4 4 0 1 1 0 8 4 4 0 0 1 0-8ZM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10Z",
  system: "M4 5h16v11H4ZM9 20h6M12 16v4",
};

/** `element("p", { class: "note", onclick }, "text", child)` */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      made.addEventListener(key.slice(2), value);
    } else if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(key, value === true ? "" : String(value));
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

export function icon(name) {
  return svg("svg", { class: `icon icon-${name}`, viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** Puts the icons into the buttons of the page that ask for one. */
export function drawIcons() {
  for (const holder of document.querySelectorAll("[data-icon]")) {
    holder.prepend(icon(holder.dataset.icon));
  }
}

/** A button of text. */
export function button(label, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

/** A button that copies what `text()` gives and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed";
    }
    setTimeout(() => (made.textContent = label), 1500);
  });
  return made;
}

/** Says something at the foot of the page for a while, with one thing that may be done about it. */
export function toast(text, action = null) {
  const place = byId("toasts");
  const shown = element("div", { class: "toast" }, element("span", {}, text));
  if (action) {
    shown.append(button(action.label, () => {
      shown.remove();
      action.run();
    }));
  }
  place.append(shown);
  setTimeout(() => shown.remove(), 8000);
}

/** Says something to screen readers only. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** A menu under a button: `[["Rename", run], …]`. Arrow keys move in it, Escape leaves it. */
export function openMenu(anchor, entries) {
  const menu = byId("menu");
  const items = entries.map(([label, run, kind = ""]) => {
    const choose = () => {
      menu.hidePopover();
      run();
    };
    return element("button", { type: "button", role: "menuitem", tabindex: "-1", class: kind, onclick: choose }, label);
  });
  menu.replaceChildren(...items);
  menu.showPopover();
  const at = anchor.getBoundingClientRect();
  const fits = at.bottom + menu.offsetHeight + 8 < innerHeight;
  menu.style.top = `${fits ? at.bottom + 4 : at.top - menu.offsetHeight - 4}px`;
  menu.style.left = `${Math.max(8, Math.min(at.right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
  menu.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      const next = items.indexOf(document.activeElement) + step;
      items[(next + items.length) % items.length].focus();
    } else if (event.key === "Tab") {
      menu.hidePopover();
    }
  };
  items[0].focus();
}
