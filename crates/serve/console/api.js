/**
 * The server's API as the pages use it: one `fetch` that carries the key, and a reader of event streams.
 * The key lives in this tab's session storage only; whoever answers 401 makes the page ask for it.
 */

const KEY = "baton.key";
/** Where the API is: beside this page, also where a proxy puts a prefix before every path. */
const BASE = new URL("..", import.meta.url);

/** Asks a person for the key; set by key.js. Gets whether the last key was wrong. */
let askForKey = async () => null;
/** While a person is asked, everybody else waits for the same answer. */
let asking = null;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** What the server said instead of an answer. */
export class ApiError extends Error {
  /** `body` is the `error` object of the answer. */
  constructor(status, body) {
    super(body.message);
    Object.assign(this, { status, code: body.code ?? null, param: body.param ?? null });
  }
}

/** The server was not reached, or the connection broke off. */
export class ConnectionError extends Error {}

/** The address of a path of the API. */
export const address = (path) => new URL(path.replace(/^\//, ""), BASE).href;

/** Fetches a path of this server; asks for a key and tries again as long as the answer is 401. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const asked = { ...options, headers, cache: "no-store", credentials: "omit" };
    const response = await fetch(address(path), asked).catch((error) => {
      throw options.signal?.aborted ? error : new ConnectionError(error.message);
    });
    if (response.status === 401) {
      await newKey(key);
      continue;
    }
    if (!response.ok) {
      throw new ApiError(response.status, await errorBody(response));
    }
    return response;
  }
}

/** Waits for another key than the one that was refused. */
async function newKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) {
    return;
  }
  asking ??= askForKey(refused !== null).then((key) => {
    sessionStorage.setItem(KEY, key);
    asking = null;
  });
  await asking;
}

async function errorBody(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return typeof error.message === "string" ? error : { message: text };
  } catch {
    return { message: text.slice(0, 500) || `${response.status} ${response.statusText}` };
  }
}

/** The JSON values of a stream of server-sent events, up to `[DONE]`. */
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      throw new ConnectionError("the stream ended before the answer did");
    }
    rest += decoder.decode(value, { stream: true });
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = eventData(rest.slice(0, end));
      rest = rest.slice(end + 2);
      if (data === "[DONE]") {
        return;
      }
      if (data) {
        yield JSON.parse(data);
      }
    }
  }
}

/** The data of one event; comments and other fields are of no interest. */
function eventData(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

async function json(path) {
  return (await request(path)).json();
}

export const models = async () => (await json("/v1/models")).data;
export const stats = () => json("/stats");
export const description = () => json("/openapi.json");

export async function metricsPage() {
  return (await request("/metrics")).text();
}

/** Streams a chat; `signal` stops it. */
export async function* chat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  try {
    for await (const event of events(response)) {
      if (event.error) {
        throw new ApiError(Number(event.error.code) || 500, event.error);
      }
      yield event;
    }
  } catch (error) {
    // The browser's own words for a broken connection differ from one to the next.
    throw error instanceof TypeError && !signal?.aborted ? new ConnectionError(error.message) : error;
  }
}
