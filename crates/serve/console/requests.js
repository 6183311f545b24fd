/** The requests that are being served, as a list that keeps its rows while they last. */

import { byId, element } from "./dom.js";
import { plural, seconds, whole } from "./format.js";

const STATES = { waiting: "waiting", prefill: "reading the prompt", decode: "writing" };
const rows = new Map();

/** Shows what `/stats` lists. */
export function draw({ requests, num_requests: count, num_other_requests: others }) {
  const listed = new Set(requests.map(({ id }) => id));
  for (const [id, row] of rows) {
    if (!listed.has(id)) {
      row.shown.remove();
      rows.delete(id);
    }
  }
  for (const request of requests) {
    if (!rows.has(request.id)) {
      const row = newRow(request.id);
      rows.set(request.id, row);
      byId("request-rows").append(row.shown);
    }
    fill(rows.get(request.id), request);
  }
  const hidden = count - requests.length;
  const notes = [
    ...(hidden > 0 ? [`${plural(hidden, "further request")} not listed.`] : []),
    ...(others > 0 ? [`${plural(others, "request")} of other keys.`] : []),
    ...(count + others === 0 ? ["No request is being served right now."] : []),
  ];
  byId("request-note").textContent = notes.join(" ");
  byId("request-table").hidden = requests.length === 0;
}

function newRow(id) {
  const cells = Object.fromEntries(["state", "prompt", "output", "speed", "age"].map((name) => [name, element("td", { class: name })]));
  const head = element("th", { scope: "row" }, id);
  return { shown: element("tr", {}, head, ...Object.values(cells)), cells };
}

function fill({ cells }, request) {
  const { num_prompt_tokens: prompt, num_cached_tokens: cached, num_output_tokens: output, max_tokens: limit, n } = request;
  const most = limit ? limit * n : null;
  const writing = request.time_to_first_token_s === null ? 0 : request.age_s - request.time_to_first_token_s;
  cells.state.textContent = STATES[request.state] ?? request.state;
  cells.state.dataset.state = request.state;
  cells.prompt.textContent = `${plural(prompt, "token")}${cached > 0 ? `, ${whole(cached)} from cache` : ""}`;
  const bar = most ? [element("progress", { max: most, value: Math.min(output, most), "aria-label": "Written" })] : [];
  cells.output.replaceChildren(element("span", {}, most ? `${whole(output)} of ${plural(most, "token")}` : plural(output, "token")), ...bar);
  cells.speed.textContent = output > 1 && writing > 0.2 ? `${((output - 1) / writing).toFixed(1)} tokens/s` : "–";
  cells.age.textContent = seconds(request.age_s);
}
