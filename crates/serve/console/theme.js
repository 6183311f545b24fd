/**
 * Light, dark, or as the system is. Loaded before the page is drawn and therefore no module: a dark page that flashes
 * white is worse than a script that waits.
 */

(() => {
  const KEY = "baton.theme";
  const NAMES = ["system", "light", "dark"];
  const COLOURS = { light: "#faf8f5", dark: "#151311" };
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  function stored() {
    try {
      const name = localStorage.getItem(KEY);
      return NAMES.includes(name) ? name : "system";
    } catch {
      return "system";
    }
  }

  function apply(name) {
    root.dataset.theme = name;
    const shown = name === "system" ? (prefersDark.matches ? "dark" : "light") : name;
    document.querySelector('meta[name="theme-color"]')?.setAttribute("content", COLOURS[shown]);
    const button = document.getElementById("theme");
    if (button) {
      const label = `Theme: ${name === "system" ? "as the system" : name}`;
      button.setAttribute("aria-label", label);
      button.title = label;
    }
  }

  apply(stored());
  prefersDark.addEventListener("change", () => apply(root.dataset.theme));
  addEventListener("storage", (event) => event.key === KEY && apply(stored()));
  addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme")?.addEventListener("click", () => {
      const next = NAMES[(NAMES.indexOf(root.dataset.theme) + 1) % NAMES.length];
      apply(next);
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // Then the choice lasts as long as the page.
      }
    });
  });
})();
