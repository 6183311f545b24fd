/** `/docs`: every route with its fields and an example that can be sent, all from `/openapi.json`. */

import { address, ApiError, description, models, request } from "./api.js";
import { button, byId, copyButton, drawIcons, element } from "./dom.js";
import "./key.js";
import { Schemas } from "./schema.js";

/** More of an answer is not shown. */
const MAX_SHOWN = 20_000;

let schemas = null;
/** What the first served model is called, for the examples. */
let modelName = null;
/** `{ group, shown, entry, words }` of every route. */
let routes = [];

async function start() {
  drawIcons();
  const [document, served] = await Promise.all([description(), models().catch(() => [])]);
  schemas = new Schemas(document);
  modelName = served[0]?.id ?? null;
  byId("version").textContent = `Baton ${document.info.version}`;
  const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation, group: operation.tags?.[0] ?? "Other" })),
  );
  const groups = [...new Set(operations.map(({ group }) => group))];
  const sections = groups.map((group) => section(group, operations.filter((one) => one.group === group)));
  byId("routes").replaceChildren(...sections.map(({ shown }) => shown));
  byId("contents").replaceChildren(...sections.map(({ contents }) => contents));
  byId("filter").addEventListener("input", filter);
  window.document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

function section(group, operations) {
  const made = operations.map(route);
  routes.push(...made);
  const shown = element("section", {}, element("h2", {}, group), ...made.map((one) => one.shown));
  const contents = element("div", {}, element("h2", {}, group), element("ul", {}, ...made.map((one) => one.entry)));
  made.forEach((one) => Object.assign(one, { section: shown, contents }));
  return { shown, contents };
}

const method = (name) => element("span", { class: `method ${name}` }, name.toUpperCase());

/** A path that may be broken before its slashes. */
const breakable = (path) => path.split(/(?=\/)/).flatMap((part) => [element("wbr"), part]);

function route({ path, method: name, operation }) {
  const id = operation.operationId;
  const body = operation.requestBody?.content?.["application/json"];
  const head = element("h3", {}, method(name), " ", element("code", {}, path));
  const parts = [head, element("p", {}, operation.summary)];
  const parameters = operation.parameters ?? [];
  if (parameters.length > 0) {
    const rows = parameters.map((one) => ({ name: one.name, schema: { description: "In the path.", ...one.schema }, required: one.required }));
    parts.push(element("h4", {}, "Parameters"), fieldList(rows));
  }
  const fields = body ? schemas.fields(body.schema) : [];
  if (fields.length > 0) {
    parts.push(fold("Fields", fields, true));
  }
  parts.push(...answers(operation), example(path, name, body));
  const shown = element("article", { class: "route", id }, ...parts);
  const entry = element("li", {}, element("a", { href: `#${id}` }, method(name), element("span", {}, ...breakable(path))));
  const words = [path, operation.summary, ...fields.map((field) => field.name)].join(" ").toLowerCase();
  return { shown, entry, words };
}

/** What comes back: whole, or as events. */
function answers(operation) {
  const content = operation.responses?.["200"]?.content ?? {};
  const whole = schemas.fields(content["application/json"]?.schema);
  const events = schemas.fields(content["text/event-stream"]?.itemSchema?.properties?.data?.contentSchema);
  return [
    ...(whole.length > 0 ? [fold("Answer", whole, false)] : []),
    ...(events.length > 0 ? [fold("Each event of a stream", events, false)] : []),
  ];
}

/** Fields that are laid out when they are first looked at. */
function fold(title, fields, open) {
  const shown = element("details", { class: "fold", open }, element("summary", {}, title, element("small", {}, String(fields.length))));
  const fill = () => shown.open && shown.children.length === 1 && shown.append(fieldList(fields));
  shown.addEventListener("toggle", fill);
  fill();
  return shown;
}

function fieldList(fields) {
  const rows = fields.map(({ name, schema, required }) => {
    const inner = schemas.fields(schema);
    const head = element("dt", {}, element("code", {}, name), " ", element("span", { class: "type" }, schemas.type(schema)), required ? element("span", { class: "required" }, "required") : null);
    const words = schemas.description(schema);
    const text = element("dd", {}, ...(words ? inlineCode(words) : []), inner.length > 0 ? fold("Its fields", inner, false) : null);
    return element("div", {}, head, text);
  });
  return element("dl", { class: "fields" }, ...rows);
}

/** Backticks in descriptions are code. */
function inlineCode(text) {
  return text.split("`").map((part, at) => (at % 2 ? element("code", {}, part) : part));
}

/** A command for a shell, and a button that sends the same from here. */
function example(path, name, body) {
  const sent = body?.example ? { ...(modelName && "model" in body.example ? { ...body.example, model: modelName } : body.example) } : null;
  const named = path.startsWith("/v1/models/") && modelName ? path.replace("{id}", modelName) : path.replace("{id}", "RESPONSE_ID");
  const isSimple = !named.includes("RESPONSE_ID");
  const url = address(named);
  const quoted = sent ? JSON.stringify(sent, null, 2).replaceAll("'", "'\\''") : "";
  const verb = name === "get" || sent ? "" : ` -X ${name.toUpperCase()}`;
  const command = `curl${verb} ${url}${sent ? ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'` : ""}`;
  const result = element("pre", { class: "result", tabindex: 0, hidden: true });
  const run = button("Send", () => send(run, result, named, name, sent), { class: "primary small" });
  const canRun = isSimple && (name === "get" || sent);
  const head = element("header", {}, element("span", {}, "Example"), copyButton(() => command), canRun ? run : null);
  return element("div", { class: "example" }, head, element("pre", { tabindex: 0 }, element("code", {}, command)), result);
}

async function send(run, result, path, name, sent) {
  run.disabled = true;
  result.hidden = false;
  result.textContent = "…";
  try {
    const options = sent ? { method: name.toUpperCase(), headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) } : {};
    const response = await request(path, options);
    const text = await response.text();
    result.textContent = `${response.status} ${response.statusText}\n${pretty(text)}`;
  } catch (error) {
    result.textContent = error instanceof ApiError ? `${error.status}\n${error.message}` : "The server cannot be reached.";
  }
  run.disabled = false;
}

function pretty(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Not every answer is JSON.
  }
  return shown.length > MAX_SHOWN ? `${shown.slice(0, MAX_SHOWN)}\n…` : shown;
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const one of routes) {
    const isHidden = !one.words.includes(wanted);
    one.shown.hidden = isHidden;
    one.entry.hidden = isHidden;
  }
  for (const one of new Set(routes.map(({ section: whole }) => whole))) {
    one.hidden = routes.every(({ section: whole, shown }) => whole !== one || shown.hidden);
  }
  for (const one of new Set(routes.map(({ contents }) => contents))) {
    one.hidden = routes.every(({ contents, entry }) => contents !== one || entry.hidden);
  }
  byId("none-found").hidden = routes.some(({ shown }) => !shown.hidden);
}

await start();
