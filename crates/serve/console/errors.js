/** What went wrong in words for people, and what can be done about it. */

import { ApiError, ConnectionError } from "./api.js";

/** Settings by the field of a request that they become. */
const FIELDS = {
  temperature: "Temperature",
  top_p: "Top p",
  top_k: "Top k",
  min_p: "Min p",
  seed: "Seed",
  stop: "Stop texts",
  max_tokens: "Longest answer",
  max_completion_tokens: "Longest answer",
  response_format: "JSON schema",
  tools: "Tools",
};

/** By the server's code, then by its status. */
const BY_CODE = {
  context_length_exceeded: ["This is too long for the model.", "Shorten the message, attach less, or start a new chat."],
  model_not_found: ["The server no longer serves this model.", "Choose another one in the settings."],
  structured_output_failed: ["The model could not keep to the JSON schema.", "Make the schema simpler, or try again."],
  invalid_api_key: ["The server does not accept the key.", "Reload the page to enter another one."],
};
const BY_STATUS = {
  403: ["The server refuses requests from this address.", "Open the page under a name that the server answers to."],
  404: ["The server does not know this.", "Reload the page: the server may have been replaced by another version."],
  408: ["The server waited too long for the message.", "Check the connection and try again."],
  413: ["The message is larger than the server takes.", "Attach less, or start the server with a larger --max-body-size."],
  429: ["The server has too much to do.", "Wait a moment and try again."],
  500: ["The server failed while it was answering.", "Try again. If it fails again, its log says why."],
  503: ["The server takes no requests right now.", "It may be stopping or restarting. Try again in a moment."],
};

/** `{ title, advice, detail }`; the detail is what the server itself said. */
export function explain(error) {
  if (error instanceof ConnectionError) {
    const advice = "Check that the server is still running. The page connects again by itself.";
    return { title: "The connection to the server was lost.", advice, detail: "" };
  }
  if (!(error instanceof ApiError)) {
    return { title: "The page could not show this answer.", advice: "Try again, or reload the page.", detail: String(error) };
  }
  const said = sentence(error.message);
  const field = FIELDS[error.param];
  const known = BY_CODE[error.code];
  if (error.status === 400 && field) {
    return { title: `The setting “${field}” was refused.`, advice: "Change it in the settings, or reset it.", detail: said };
  }
  if (known) {
    return { title: known[0], advice: known[1], detail: said };
  }
  if (error.status === 400) {
    return { title: "The server cannot answer this request.", advice: "Change the message or the settings.", detail: said };
  }
  const [title, advice] = BY_STATUS[error.status] ?? BY_STATUS[error.status > 500 ? 503 : 500];
  return { title, advice, detail: said };
}

function sentence(text) {
  const trimmed = String(text).trim();
  const begun = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
