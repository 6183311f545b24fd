/** One message on the page: a question, an answer as it comes, or the result of a tool. */

import { button, copyButton, element } from "./dom.js";
import { bytes, plural, seconds, whole } from "./format.js";
import { highlight } from "./highlight.js";
import { Drawing, render } from "./markdown.js";
import { withFiles } from "./tree.js";

/** Long answers are not laid out more often than this, and never more than a fifth of the time. */
const DRAW_MS = 40;

const ENDS = {
  length: "cut off at the limit",
  stopped: "stopped",
  interrupted: "interrupted",
  tool_calls: "wants a tool",
  edited: "edited",
};

export class MessageView {
  /** `actions` are what the person may do: edit, retry, branch, choose, results. */
  constructor(node, actions) {
    Object.assign(this, { node, actions, timer: null, drawnAt: 0, drawMs: 0, editor: null });
    this.drawing = new Drawing();
    this.thoughts = null;
    this.asides = element("div", { class: "asides" });
    this.text = element("div", { class: "text" });
    this.foot = element("div", { class: "foot" });
    const kinds = { user: "user", assistant: "answer", tool: "tool" };
    const speakers = { user: "You", assistant: "Answer", tool: "Tool result" };
    const speaker = element("h2", { class: "hidden" }, speakers[node.role]);
    this.calls = element("div", { class: "calls" });
    this.shown = element("article", { class: `message ${kinds[node.role]}` }, speaker, this.asides, this.text, this.calls, this.foot);
  }

  get isRunning() {
    return this.node.finish === "running";
  }

  /** Draws a little later where it has just been drawn. `after` is called when it is. */
  schedule(after) {
    if (this.timer === null) {
      const pause = Math.max(DRAW_MS, 4 * this.drawMs);
      this.timer = setTimeout(() => {
        this.timer = null;
        after(() => this.draw());
      }, Math.max(0, this.drawnAt + pause - performance.now()));
    }
  }

  /** `place` says where it stands: `{ index, count, leftOut, isLast }`. */
  draw(place = this.place) {
    clearTimeout(this.timer);
    this.timer = null;
    this.place = place;
    const begun = performance.now();
    this.shown.classList.toggle("left-out", Boolean(place?.leftOut));
    this.shown.setAttribute("aria-busy", String(this.isRunning));
    if (this.node.role === "assistant") {
      this.drawAnswer();
    } else {
      this.drawQuestion();
    }
    this.drawFoot();
    this.drawnAt = performance.now();
    this.drawMs = this.drawnAt - begun;
  }

  drawQuestion() {
    const { node } = this;
    if (this.editor) {
      return;
    }
    this.text.textContent = node.content;
    this.text.hidden = !node.content;
    const files = (node.files ?? []).map(({ name, text }) => {
      const size = bytes(new Blob([text]).size).join(" ");
      const inside = element("pre", { tabindex: 0 }, ...highlight(text, name.split(".").at(-1)));
      return element("details", { class: "aside file" }, element("summary", {}, `${name} `, element("small", {}, size)), inside);
    });
    this.asides.replaceChildren(...files);
  }

  drawAnswer() {
    const { node } = this;
    if (!this.editor) {
      const nodes = this.drawing.nodes(node.content);
      const old = [...this.text.childNodes];
      const same = nodes.findIndex((one, at) => one !== old[at]);
      const from = same < 0 ? nodes.length : same;
      old.slice(from).forEach((one) => one.remove());
      this.text.append(...nodes.slice(from));
      this.text.classList.toggle("cursor", this.isRunning);
      if (node.error) {
        this.text.append(errorBox(node.error));
      }
    }
    this.drawThoughts();
    this.drawCalls();
  }

  drawCalls() {
    const calls = (this.node.toolCalls ?? []).map((call) => toolCall(call));
    const canAnswer = calls.length > 0 && this.place?.isLast && !this.isRunning && !this.node.error;
    this.calls.replaceChildren(...calls, ...(canAnswer ? [this.resultsForm()] : []));
  }

  /** Folded: what a model writes to itself is seldom what was asked for. Laid out only when it is opened. */
  drawThoughts() {
    const { node } = this;
    if (!node.reasoning) {
      return;
    }
    if (!this.thoughts) {
      const summary = element("summary");
      const inside = element("div", { class: "inside" });
      const shown = element("details", { class: "aside reasoning", ontoggle: () => this.fillThoughts() }, summary, inside);
      this.thoughts = { shown, summary, inside };
      this.asides.append(shown);
    }
    const isThinking = this.isRunning && !node.content && !node.toolCalls;
    const time = node.thinkingMs ? ` for ${seconds(node.thinkingMs / 1000)}` : "";
    this.thoughts.summary.textContent = isThinking ? `Thinking${time}…` : `Thought${time}`;
    this.fillThoughts();
  }

  fillThoughts() {
    if (this.thoughts.shown.open) {
      this.thoughts.inside.replaceChildren(...render(this.node.reasoning.trim()));
    }
  }

  /** Lets a person play the tool. */
  resultsForm() {
    if (this.results) {
      return this.results;
    }
    const fields = this.node.toolCalls.map(({ name }, at) => {
      const id = `result-${this.node.id}-${at}`;
      const label = element("label", { for: id }, `Result of ${name || "the tool"}`);
      return { label, area: element("textarea", { id, rows: 2, placeholder: "What the tool answers" }) };
    });
    const send = () => this.actions.results(this.node, fields.map(({ area }) => area.value));
    const parts = fields.flatMap(({ label, area }) => [label, area]);
    this.results = element("div", { class: "results" }, ...parts, button("Send the result", send, { class: "primary small" }));
    return this.results;
  }

  drawFoot() {
    const { node, place } = this;
    const figures = this.figures().map((figure) => element("span", {}, figure));
    if (place?.leftOut && node.role !== "assistant") {
      figures.unshift(element("span", { class: "badge" }, "not sent to the model again"));
    }
    const buttons = place?.count > 1 ? [this.switcher()] : [];
    if (!this.isRunning && !this.editor) {
      if (node.content) {
        buttons.push(copyButton(() => (node.role === "user" ? withFiles(node) : node.content)));
      }
      if (node.role === "assistant") {
        buttons.push(button("Try again", () => this.actions.retry(node)));
      }
      if (node.role !== "tool") {
        buttons.push(button("Edit", () => this.edit()));
        buttons.push(button("Branch", () => this.actions.branch(node), { title: "Go on from here in a new chat" }));
      }
    }
    this.foot.replaceChildren(element("div", { class: "figures" }, ...figures), element("div", { class: "buttons" }, ...buttons));
  }

  switcher() {
    const { index, count } = this.place;
    const step = (by, label, sign) =>
      button(sign, () => this.actions.choose(this.node, by), { "aria-label": label, disabled: index + by < 0 || index + by >= count });
    const words = element("span", {}, `${index + 1} of ${count}`);
    return element("span", { class: "switcher", role: "group", "aria-label": "Branches" }, step(-1, "Earlier branch", "‹"), words, step(1, "Later branch", "›"));
  }

  figures() {
    const { node } = this;
    const figures = [];
    if (node.numTokens > 0) {
      figures.push(plural(node.numTokens, "token"));
    }
    if (node.numTokens > 1 && node.writingMs > 0) {
      figures.push(`${(((node.numTokens - 1) * 1000) / node.writingMs).toFixed(1)} tokens/s`);
    }
    if (node.firstTokenMs > 0) {
      figures.push(`first token after ${seconds(node.firstTokenMs / 1000)}`);
    }
    if (node.numCachedTokens > 0) {
      figures.push(`${whole(node.numCachedTokens)} of ${plural(node.numPromptTokens, "prompt token")} cached`);
    }
    if (ENDS[node.finish]) {
      figures.push(ENDS[node.finish]);
    }
    return figures;
  }

  /** Puts an editor in the place of the text. A changed question is asked anew; a changed answer is only kept. */
  edit() {
    const { node } = this;
    const asks = node.role === "user";
    const area = element("textarea", { "aria-label": asks ? "Edit the message" : "Edit the answer", rows: 3 });
    area.value = node.content;
    const close = () => {
      this.editor = null;
      this.text.classList.remove("editing");
      this.text.replaceChildren();
      this.drawing = new Drawing();
      this.draw();
      [...this.foot.querySelectorAll("button")].find((one) => one.textContent === "Edit")?.focus();
    };
    const save = () => {
      const text = area.value.trim();
      if (text && text !== node.content) {
        this.editor = null;
        this.actions.edit(node, text);
      }
      close();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && asks) {
        event.preventDefault();
        save();
      }
    });
    this.editor = area;
    const buttons = [button(asks ? "Send" : "Save", save, { class: "primary small" }), button("Cancel", close, { class: "quiet small" })];
    this.text.hidden = false;
    this.text.classList.add("editing");
    this.text.replaceChildren(area, element("div", { class: "actions" }, ...buttons));
    this.drawFoot();
    area.focus();
  }
}

function toolCall({ name, arguments: given }) {
  let pretty = given;
  try {
    pretty = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // Not whole yet, or the model has written no JSON.
  }
  const inside = element("pre", { tabindex: 0 }, ...highlight(pretty, "json"));
  const summary = element("summary", {}, "Tool call: ", element("b", {}, name));
  return element("details", { class: "aside tool-call", open: true }, summary, element("div", { class: "inside" }, inside));
}

export function errorBox({ title, advice, detail }) {
  const more = detail ? element("p", { class: "detail" }, detail) : null;
  return element("div", { class: "error", role: "alert" }, element("p", {}, element("b", {}, title), " ", advice), more);
}
