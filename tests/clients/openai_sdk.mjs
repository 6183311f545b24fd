// OpenAI's Node SDK against a running server.

import assert from "node:assert/strict";
import OpenAI from "openai";

const url = process.env.BATON_URL.replace(/\/+$/, "");
const key = process.env.BATON_API_KEY ?? "none";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say hello in one short sentence." }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", description: "The weather of a city", parameters } };

const chat = (more = {}) =>
  client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 24, ...more });

async function checkChat() {
  const answer = await chat();
  assert.ok(answer.choices[0].message.content);
  assert.ok(answer.usage.completion_tokens > 0);
}

async function checkStream() {
  const whole = (await chat()).choices[0].message.content;
  let text = "";
  for await (const chunk of await chat({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole);
  const helper = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 24 });
  assert.equal(await helper.finalContent(), whole);
}

async function checkAbort() {
  const stream = await chat({ stream: true, max_tokens: 400 });
  for await (const _ of stream) break;
  stream.controller.abort();
  assert.ok((await chat({ max_tokens: 4 })).choices.length === 1);
}

// Needs constrained decoding: arguments must be valid for the schema whatever the model would like.
async function checkToolsForced() {
  const forced = { tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 96 };
  const answer = (await chat(forced)).choices[0];
  assert.equal(answer.finish_reason, "tool_calls");
  const call = answer.message.tool_calls[0];
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  const helper = client.chat.completions.stream({ model, messages, temperature: 0, ...forced });
  const final = await helper.finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
}

async function checkResponses() {
  const body = { model, input: "Say hello.", temperature: 0, max_output_tokens: 16 };
  const whole = await client.responses.create(body);
  assert.ok(whole.output_text);
  let text = "";
  let last = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    last = event.type;
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  assert.ok(["response.completed", "response.incomplete"].includes(last));
  assert.equal((await client.responses.retrieve(whole.id)).id, whole.id);
}

async function checkErrors() {
  await assert.rejects(chat({ temperature: -1 }), (error) => error.status === 400 && error.param === "temperature");
  await assert.rejects(chat({ model: "no-such-model" }), (error) => error.status === 404);
  if (key !== "none") {
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), (error) => error.status === 401);
  }
}

let failed = 0;
for (const check of [checkChat, checkStream, checkAbort, checkToolsForced, checkResponses, checkErrors]) {
  const started = performance.now();
  let outcome = "ok";
  try {
    await check();
  } catch (error) {
    console.error(error);
    outcome = "FAILED";
    failed += 1;
  }
  console.log(`${outcome} ${check.name} (${((performance.now() - started) / 1000).toFixed(1)} s)`);
}
process.exit(failed ? 1 : 0);
