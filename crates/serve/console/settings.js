/**
 * What answers are asked with. Only what a person has chosen is sent and kept (in this browser); everything else is
 * the model's own, and shown as such.
 */

import { button, byId, element, icon } from "./dom.js";
import { samplingDefaults } from "./defaults.js";
import { plural } from "./format.js";

const KEY = "baton.settings";

const decimals = (digits) => (number) => Number(number).toFixed(digits);

/** `field` is its name in a request. Sliders have a value of the model's; the others are empty until filled. */
const FIELDS = [
  { id: "model", kind: "select", label: "Model" },
  { id: "system", kind: "area", label: "System prompt", placeholder: "None", rows: 3 },
  { id: "temperature", kind: "slider", label: "Temperature", field: "temperature", min: 0, max: 2, step: 0.05, write: decimals(2), hint: "0 always takes the likeliest token." },
  { id: "top-p", kind: "slider", label: "Top p", field: "top_p", min: 0.01, max: 1, step: 0.01, write: decimals(2), hint: "The likeliest tokens that make up this share." },
  { id: "top-k", kind: "slider", label: "Top k", field: "top_k", min: 0, max: 200, step: 1, write: (number) => (Number(number) === 0 ? "off" : String(number)), hint: "Only this many of the likeliest tokens." },
  { id: "min-p", kind: "slider", label: "Min p", field: "min_p", min: 0, max: 1, step: 0.01, write: decimals(2), hint: "Nothing below this share of the likeliest token." },
  { id: "max-tokens", kind: "number", label: "Longest answer", field: "max_tokens", min: 1, placeholder: "What is left of the context", unit: "tokens" },
  { id: "seed", kind: "number", label: "Seed", field: "seed", placeholder: "Random", more: true, hint: "The same seed gives the same answer." },
  { id: "stop", kind: "area", label: "Stop texts", placeholder: "One per line", rows: 2, more: true, read: readStops },
  { id: "schema", kind: "area", label: "JSON schema", placeholder: '{"type": "object", …}', rows: 4, more: true, code: true, read: readSchema, hint: "The answer will be JSON of this shape." },
  { id: "tools", kind: "area", label: "Tools", placeholder: '[{"name": "weather", "parameters": {…}}]', rows: 4, more: true, code: true, read: readTools, hint: "Functions that the model may call." },
];

const SLIDERS = FIELDS.filter((field) => field.kind === "slider");
let served = [];
let serverStats = null;

export function start() {
  for (const field of FIELDS) {
    byId(field.more ? "fields-more" : "fields-main").append(...build(field));
  }
  const stored = restore();
  for (const field of FIELDS.filter(({ id }) => stored[id] !== undefined && id !== "model")) {
    byId(field.id).value = stored[field.id];
    byId(field.id).dataset.chosen = "";
  }
  byId("fields-more-details").open = FIELDS.some(({ id, more }) => more && stored[id] !== undefined);
  byId("reset-all").addEventListener("click", () => FIELDS.forEach((field) => field.id !== "model" && reset(field)));
  byId("model").addEventListener("change", show);
  show();
}

function build(field) {
  const { id, kind, label } = field;
  const under = [...(field.hint ? [`${id}-hint`] : []), `${id}-problem`].join(" ");
  const shared = { id, "aria-describedby": under };
  const makers = {
    select: () => element("select", shared),
    area: () => element("textarea", { ...shared, rows: field.rows, placeholder: field.placeholder, spellcheck: "false", class: field.code ? "code-field" : null }),
    slider: () => element("input", { ...shared, type: "range", min: field.min, max: field.max, step: field.step }),
    number: () => element("input", { ...shared, type: "number", min: field.min, step: 1, inputmode: "numeric", placeholder: field.placeholder }),
  };
  const control = makers[kind]();
  control.addEventListener("input", () => {
    control.dataset.chosen = "";
    keep();
    show();
  });
  const back = button("", () => (reset(field), control.focus()), { class: "reset", id: `${id}-reset`, title: "Reset", "aria-label": `Reset ${label.toLowerCase()}` });
  back.append(icon("reset"));
  const value = kind === "slider" ? element("output", { id: `${id}-value`, for: id }) : null;
  const head = element("div", { class: "field-head" }, element("label", { for: id }, label), value, kind === "select" ? null : back);
  const hint = field.hint ? [element("p", { class: "note", id: `${id}-hint` }, field.hint)] : [];
  return [head, control, ...hint, element("p", { class: "problem", id: `${id}-problem`, role: "alert", hidden: true })];
}

function restore() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

function keep() {
  const chosen = FIELDS.map(({ id }) => byId(id)).filter((control) => "chosen" in control.dataset && control.value !== "");
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(chosen.map((control) => [control.id, control.value]))));
  } catch {
    // Then they last as long as the page.
  }
}

function reset(field) {
  const control = byId(field.id);
  delete control.dataset.chosen;
  control.value = "";
  keep();
  show();
}

/** What the server says it serves, and how it samples. */
export function setServer(models, stats) {
  serverStats = stats ?? serverStats;
  if (models) {
    served = models;
    const select = byId("model");
    const wanted = select.value || restore().model;
    select.replaceChildren(...served.map(({ id }) => element("option", { value: id }, id)));
    if (served.some(({ id }) => id === wanted)) {
      select.value = wanted;
    }
  }
  show();
}

export const model = () => served.find((one) => one.id === byId("model").value) ?? null;

/** Whether a person has set something. */
const isChosen = (field) => ("chosen" in byId(field.id).dataset || field.kind !== "slider") && byId(field.id).value !== "";

function show() {
  const defaults = samplingDefaults(model(), serverStats);
  for (const field of SLIDERS) {
    const control = byId(field.id);
    const own = defaults[field.field];
    control.max = Math.max(field.max, own);
    if (!isChosen(field)) {
      control.value = own;
    }
    const written = field.write(control.value);
    byId(`${field.id}-value`).textContent = isChosen(field) ? written : `${field.write(own)} (default)`;
    control.setAttribute("aria-valuetext", byId(`${field.id}-value`).textContent);
  }
  for (const field of FIELDS.filter(({ kind }) => kind !== "select")) {
    byId(`${field.id}-reset`).hidden = field.kind === "slider" ? !("chosen" in byId(field.id).dataset) : byId(field.id).value === "";
    problem(field, attempt(() => field.read?.(byId(field.id).value)).problem);
  }
  const found = model();
  byId("welcome-model").textContent = found?.id ?? "the served model";
  byId("model-note").textContent = found?.max_model_len ? `Context: ${plural(found.max_model_len, "token")}` : "";
  byId("max-tokens").max = found?.max_model_len ?? "";
}

function problem(field, text) {
  const place = byId(`${field.id}-problem`);
  place.hidden = !text;
  place.textContent = text ?? "";
  byId(field.id).setAttribute("aria-invalid", String(Boolean(text)));
}

function attempt(read) {
  try {
    return { value: read() };
  } catch (error) {
    return { problem: error.message };
  }
}

/** The part of a request that the settings make up: `{ body, system }`, or `{ wrong }`, the id of a field. */
export function read() {
  const body = { model: byId("model").value || undefined };
  for (const field of FIELDS.filter((one) => (one.field || one.read) && isChosen(one))) {
    const text = byId(field.id).value;
    const { value, problem: found } = attempt(() => (field.read ? field.read(text) : { [field.field]: Number(text) }));
    if (found) {
      return { wrong: field.id };
    }
    Object.assign(body, value);
  }
  return { body, system: byId("system").value.trim() };
}

function readStops(text) {
  const stops = text.split("\n").filter((line) => line !== "");
  return stops.length > 0 ? { stop: stops } : {};
}

function readJson(text, isRight, wanted) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}.`);
  }
  if (!isRight(value)) {
    throw new Error(wanted);
  }
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function readSchema(text) {
  if (text.trim() === "") {
    return {};
  }
  const schema = readJson(text, isObject, "A schema is an object.");
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } };
}

function readTools(text) {
  if (text.trim() === "") {
    return {};
  }
  const tools = [readJson(text, (value) => isObject(value) || Array.isArray(value), "Tools are a list of functions.")].flat();
  const named = tools.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
  if (!named.every((tool) => typeof tool.function?.name === "string")) {
    throw new Error("Every function needs a name.");
  }
  return { tools: named };
}
