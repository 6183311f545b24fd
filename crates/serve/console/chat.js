/**
 * The conversation: what was said, the answer that is coming, and the settings it is asked with. Nothing of it is
 * stored; only the settings stay for this tab.
 */

import { chat, models } from "./api.js";
import { byId, copyButton, element } from "./dom.js";
import { render } from "./markdown.js";

const SETTINGS = "baton.settings";
const FIELDS = ["model", "system", "temperature", "top-p", "max-tokens"];
/** Long answers are not laid out more often than this. */
const DRAW_MS = 40;

/** `{role, content}` of what was said so far. */
let messages = [];
/** Stops the answer that is coming; `null` when there is none. */
let running = null;

export async function start() {
  restoreSettings();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    // Enter that ends an input method's composition belongs to the input method.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("prompt").addEventListener("input", updateButtons);
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", newChat);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) {
      stop();
    }
  });
  for (const idea of document.querySelectorAll("[data-prompt]")) {
    idea.addEventListener("click", () => {
      byId("prompt").value = idea.dataset.prompt;
      send();
    });
  }
  byId("settings").open = matchMedia("(min-width: 56.01rem)").matches;
  updateButtons();
  await listModels();
}

async function listModels() {
  const wanted = storedSettings().model;
  const served = await models();
  const select = byId("model");
  select.replaceChildren(...served.map((model) => element("option", { value: model.id }, model.id)));
  if (served.some((model) => model.id === wanted)) {
    select.value = wanted;
  }
  const show = () => {
    const model = served.find((one) => one.id === select.value);
    byId("welcome-model").textContent = model?.id ?? "the served model";
    byId("model-note").textContent = model ? `Context: ${model.max_model_len.toLocaleString("en")} tokens` : "";
    byId("max-tokens").max = model?.max_model_len ?? "";
  };
  select.addEventListener("change", show);
  show();
}

function storedSettings() {
  try {
    return JSON.parse(sessionStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

function restoreSettings() {
  const stored = storedSettings();
  for (const id of FIELDS) {
    const field = byId(id);
    if (stored[id] !== undefined && id !== "model") {
      field.value = stored[id];
      field.dataset.chosen = "";
    }
    field.addEventListener("input", () => {
      field.dataset.chosen = "";
      const chosen = FIELDS.map(byId).filter((each) => "chosen" in each.dataset);
      const values = Object.fromEntries(chosen.map((each) => [each.id, each.value]));
      sessionStorage.setItem(SETTINGS, JSON.stringify(values));
      showSliders();
    });
  }
  showSliders();
}

function showSliders() {
  for (const id of ["temperature", "top-p"]) {
    byId(`${id}-value`).textContent = chosenNumber(id)?.toFixed(2) ?? "the model's own";
  }
}

/** The value of a slider that somebody has moved; the model's makers know best where nobody has. */
function chosenNumber(id) {
  return "chosen" in byId(id).dataset ? Number(byId(id).value) : undefined;
}

function updateButtons() {
  const busy = running !== null;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("send").disabled = byId("prompt").value.trim() === "";
  byId("new-chat").disabled = messages.length === 0 && !busy;
}

function newChat() {
  stop();
  messages = [];
  for (const message of byId("log").querySelectorAll(".message")) {
    message.remove();
  }
  byId("welcome").hidden = false;
  updateButtons();
  byId("prompt").focus();
}

function stop() {
  running?.abort();
}

function send() {
  const prompt = byId("prompt");
  const content = prompt.value.trim();
  if (!content || running) {
    return;
  }
  prompt.value = "";
  byId("welcome").hidden = true;
  messages.push({ role: "user", content });
  byId("log").append(element("article", { class: "message user" }, element("div", { class: "text" }, content)));
  prompt.focus();
  answer();
}

/** What is asked of the server. */
function body() {
  const system = byId("system").value.trim();
  const maxTokens = Number.parseInt(byId("max-tokens").value, 10);
  return {
    model: byId("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: chosenNumber("temperature"),
    top_p: chosenNumber("top-p"),
    ...(maxTokens > 0 ? { max_tokens: maxTokens } : {}),
  };
}

/** Streams the answer to what was said last. */
async function answer() {
  const view = new AnswerView();
  const stopper = new AbortController();
  running = stopper;
  updateButtons();
  try {
    for await (const event of chat(body(), stopper.signal)) {
      view.take(event);
    }
  } catch (error) {
    if (stopper.signal.aborted) {
      view.finishReason = "stopped";
    } else {
      view.fail(error.message);
    }
  }
  view.end();
  // A new chat may have begun meanwhile.
  if (running === stopper) {
    running = null;
  }
  if (view.shown.isConnected && view.content) {
    messages.push({ role: "assistant", content: view.content });
  }
  updateButtons();
}

/** One answer on the page, as it comes. */
class AnswerView {
  content = "";
  reasoning = "";
  toolCalls = [];
  finishReason = null;
  numTokens = 0;
  started = performance.now();
  firstToken = null;
  lastToken = null;
  drawn = 0;
  timer = null;

  constructor() {
    this.asides = element("div");
    this.text = element("div", { class: "text cursor" });
    this.foot = element("div", { class: "foot" });
    this.shown = element("article", { class: "message answer" }, this.asides, this.text, this.foot);
    byId("log").append(this.shown);
    this.scroll(true);
  }

  take(event) {
    const now = performance.now();
    const before = this.numTokens;
    this.numTokens = event.usage?.completion_tokens ?? this.numTokens;
    if (this.numTokens > before) {
      this.firstToken ??= now;
      this.lastToken = now;
    }
    for (const choice of event.choices ?? []) {
      const delta = choice.delta ?? {};
      this.content += delta.content ?? "";
      this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
      for (const call of delta.tool_calls ?? []) {
        const known = (this.toolCalls[call.index ?? 0] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      this.finishReason = choice.finish_reason ?? this.finishReason;
    }
    this.schedule();
  }

  /** Draws now, or a little later where it has just been drawn. */
  schedule() {
    if (this.timer === null) {
      const wait = Math.max(0, this.drawn + DRAW_MS - performance.now());
      this.timer = setTimeout(() => {
        this.timer = null;
        this.draw();
      }, wait);
    }
  }

  draw() {
    this.drawn = performance.now();
    const atEnd = this.isAtEnd();
    this.text.replaceChildren(...render(this.content));
    this.drawAsides();
    this.foot.replaceChildren(...this.figures().map((figure) => element("span", {}, figure)));
    this.scroll(atEnd);
  }

  drawAsides() {
    const open = this.asides.querySelector("details")?.open ?? true;
    const asides = [];
    if (this.reasoning) {
      const inside = element("div", { class: "inside" }, this.reasoning.trim());
      asides.push(element("details", { class: "aside reasoning", open }, element("summary", {}, "Reasoning"), inside));
    }
    for (const call of this.toolCalls.filter(Boolean)) {
      const inside = element("div", { class: "inside" }, element("pre", {}, call.arguments));
      const summary = element("summary", {}, `Tool call: ${call.name}`);
      asides.push(element("details", { class: "aside tool-call", open: true }, summary, inside));
    }
    this.asides.replaceChildren(...asides);
  }

  figures() {
    const figures = [];
    if (this.numTokens > 0) {
      figures.push(`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`);
    }
    const seconds = (this.lastToken - this.firstToken) / 1000;
    if (this.numTokens > 1 && seconds > 0) {
      figures.push(`${((this.numTokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (this.firstToken !== null) {
      figures.push(`first token after ${duration(this.firstToken - this.started)}`);
    }
    const ends = { length: "cut off at the limit", stopped: "stopped", tool_calls: "wants a tool" };
    if (ends[this.finishReason]) {
      figures.push(ends[this.finishReason]);
    }
    return figures;
  }

  fail(message) {
    this.error = message;
  }

  end() {
    clearTimeout(this.timer);
    this.draw();
    this.text.classList.remove("cursor");
    if (this.error) {
      this.text.append(element("p", { class: "error", role: "alert" }, this.error));
    }
    if (this.content) {
      this.foot.append(copyButton(() => this.content));
    }
    const again = element("button", { type: "button", onclick: () => this.again() }, "Try again");
    this.foot.append(again);
    this.scroll(this.isAtEnd());
  }

  /** Asks the same once more, in place of this answer and of all that followed it. */
  again() {
    if (running || !this.shown.isConnected) {
      return;
    }
    const shown = [...byId("log").querySelectorAll(".message")];
    const after = shown.slice(shown.indexOf(this.shown));
    const questions = shown.slice(0, shown.indexOf(this.shown)).filter((one) => one.matches(".user")).length;
    let asked = 0;
    const last = messages.findIndex((message) => message.role === "user" && (asked += 1) === questions);
    messages = messages.slice(0, last + 1);
    for (const message of after) {
      message.remove();
    }
    answer();
  }

  isAtEnd() {
    const log = byId("log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  }

  /** Follows the answer, unless the reader has scrolled back. */
  scroll(follow) {
    if (follow) {
      byId("log").scrollTop = byId("log").scrollHeight;
    }
  }
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
