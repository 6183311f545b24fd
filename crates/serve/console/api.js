/**
 * The server's API as the console uses it: one `fetch` that carries the key, and a reader of event streams.
 * The key lives in this tab's session storage only; whoever answers 401 makes the page ask for it.
 */

const KEY = "baton.key";

/** Asks a person for the key; set by main.js. Gets whether the last key was wrong. */
let askForKey = async () => null;
/** While a person is asked, everybody else waits for the same answer. */
let asking = null;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** What the server said instead of an answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetches a path of this server; asks for a key and tries again as long as the answer is 401. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.status === 401) {
      await newKey(key);
      continue;
    }
    if (!response.ok) {
      throw new ApiError(response.status, await errorMessage(response));
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

async function errorMessage(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
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
      return;
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

export async function models() {
  const response = await request("/v1/models");
  return (await response.json()).data;
}

export async function metricsPage() {
  const response = await request("/metrics");
  return response.text();
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
  for await (const event of events(response)) {
    if (event.error) {
      throw new ApiError(event.error.code, event.error.message);
    }
    yield event;
  }
}
