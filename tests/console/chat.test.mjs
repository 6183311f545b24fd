/** The chat as a person uses it: ask, stop, edit, branch, attach, and what happens when something fails. */

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { answered, answerWith, ask, button, end, endless, KEY, leave, PHONE, picture, sentBy, serve, set, visit, visitChat } from "./harness.mjs";

let open;
let guarded;

before(async () => {
  [open, guarded] = await Promise.all([serve(), serve(["--api-key", KEY])]);
});

const roles = (body) => body.messages.map((message) => message.role);
const contents = (body) => body.messages.map((message) => message.content);

test("an answer streams, and the next one knows what was said", async () => {
  const page = await visitChat(open);
  await picture(page, "welcome");
  await endless(page);
  await ask(page, "Write a list of ten animals, with one fact each.", 300);
  await page.waitForSelector(".message.answer .text.cursor");
  assert.equal(await page.locator(".message.answer").getAttribute("aria-busy"), "true");
  // The page itself looks, whenever the text has changed.
  const numLengths = await page.evaluate(
    () =>
      new Promise((resolve) => {
        const answer = document.querySelector(".message.answer");
        const lengths = new Set();
        const look = () => {
          lengths.add(answer.querySelector(".text").textContent.length);
          if (!answer.querySelector(".cursor")) resolve(lengths.size);
        };
        new MutationObserver(look).observe(answer, { childList: true, characterData: true, subtree: true, attributes: true });
        look();
      }),
  );
  assert.ok(numLengths >= 5, `the text was seen at ${numLengths} lengths only`);
  await answered(page, 1);
  assert.equal(await page.locator(".message.answer").getAttribute("aria-busy"), "false");
  const foot = await page.locator(".message.answer .foot").textContent();
  assert.match(foot, /\d tokens/);
  assert.match(foot, /\d tokens\/s/);
  assert.match(foot, /first token after [\d.]+ m?s/);
  const sent = await sentBy(page, () => ask(page, "Thank you. Which of them is the largest?", 30));
  assert.deepEqual(roles(sent), ["user", "assistant", "user"]);
  await answered(page, 2);
  await picture(page, "chat");
  await page.click("#new-chat");
  await page.waitForSelector("#welcome", { state: "visible" });
  assert.equal(await page.locator(".message").count(), 0);
  await leave(page);
});

test("settings are the model's own until somebody chooses, and can be put back", async () => {
  const page = await visitChat(open);
  const stats = await (await fetch(`${open.url}/stats`)).json();
  const own = stats.sampling_defaults;
  const shown = (id) => page.locator(`#${id}-value`).textContent();
  await page.waitForFunction((value) => document.getElementById("temperature-value").textContent === `${value} (default)`, own.temperature.toFixed(2));
  assert.equal(await shown("top-p"), `${own.top_p.toFixed(2)} (default)`);
  const untouched = await sentBy(page, () => ask(page, "Hello", 3));
  assert.deepEqual(Object.keys(untouched).sort(), ["max_tokens", "messages", "model", "stream", "stream_options"]);
  await answered(page, 1);
  await page.fill("#system", "Answer in one word.");
  for (const [id, value] of [["temperature", 0], ["top-p", 0.5], ["top-k", 7], ["min-p", 0.1], ["seed", 5], ["stop", "END\nSTOP"]]) {
    await set(page, id, value);
  }
  assert.equal(await shown("top-k"), "7");
  const chosen = await sentBy(page, () => ask(page, "Hello", 5));
  assert.deepEqual(chosen.messages[0], { role: "system", content: "Answer in one word." });
  const { temperature, top_p, top_k, min_p, seed, stop, max_tokens, model } = chosen;
  assert.deepEqual(
    { temperature, top_p, top_k, min_p, seed, stop, max_tokens, model },
    { temperature: 0, top_p: 0.5, top_k: 7, min_p: 0.1, seed: 5, stop: ["END", "STOP"], max_tokens: 5, model: "smollm2" },
  );
  await answered(page, 2);
  await page.reload();
  await page.waitForSelector("#model option", { state: "attached" });
  assert.equal(await shown("top-k"), "7", "a choice outlasts the page");
  await page.click("#temperature-reset");
  assert.equal(await shown("temperature"), `${own.temperature.toFixed(2)} (default)`);
  assert.ok(await page.locator("#temperature-reset").isHidden());
  await page.click("#reset-all");
  assert.ok(await page.locator("#top-k-reset").isHidden());
  const reset = await sentBy(page, () => ask(page, "Hello", 3));
  assert.ok(!("top_k" in reset) && !("stop" in reset) && reset.messages[0].role === "user");
  await leave(page);
});

test("a JSON schema shapes the answer, and a broken one is not sent", async () => {
  const page = await visitChat(open);
  await set(page, "schema", '{"type": "object"');
  await page.fill("#prompt", "Describe a cat.");
  await page.press("#prompt", "Enter");
  assert.equal(await page.locator(".message").count(), 0);
  assert.match(await page.locator("#schema-problem").textContent(), /not JSON/);
  assert.equal(await page.evaluate(() => document.activeElement.id), "schema");
  const schema = { type: "object", properties: { name: { type: "string", maxLength: 8 }, age: { type: "integer", maximum: 20 } }, required: ["name", "age"], additionalProperties: false };
  await set(page, "schema", JSON.stringify(schema));
  await ask(page, "Describe a cat.", 60);
  await answered(page, 1);
  const answer = JSON.parse(await page.locator(".message.answer .text").textContent());
  assert.deepEqual(Object.keys(answer).sort(), ["age", "name"]);
  await leave(page);
});

test("the keyboard is enough", async () => {
  const page = await visitChat(open);
  await endless(page);
  await page.locator(".skip").focus();
  const focused = [];
  for (let step = 0; step < 16 && focused.at(-1) !== "prompt"; step += 1) {
    await page.keyboard.press("Tab");
    focused.push(await page.evaluate(() => document.activeElement.id || document.activeElement.className));
  }
  assert.equal(focused.at(-1), "prompt", `Tab goes ${focused}`);
  assert.ok(focused.indexOf("tab-chat") < focused.indexOf("tab-live"), `Tab goes ${focused}`);
  await page.keyboard.type("Tell me a very long story");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("about a river.");
  await page.keyboard.press("Enter");
  assert.match(await page.locator(".message.user .text").textContent(), /story\nabout/);
  await page.waitForFunction(() => document.querySelector(".message.answer .text")?.textContent.length > 20);
  await page.keyboard.press("Escape");
  await answered(page, 1);
  assert.match(await page.locator(".message.answer .foot").textContent(), /stopped/);
  // What was stopped no longer runs on the server.
  await page.waitForFunction(async () => /vllm:num_requests_running\S* 0/.test(await (await fetch("/metrics")).text()));
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  // The way up is to what was said last; Escape leaves it as it was.
  await page.keyboard.press("ArrowUp");
  assert.equal(await page.evaluate(() => document.activeElement.closest(".message")?.className), "message user");
  await page.keyboard.press("Escape");
  assert.match(await page.locator(".message.user .text").textContent(), /story\nabout/);
  await page.keyboard.press("Control+k");
  assert.equal(await page.evaluate(() => document.activeElement.id), "search");
  await leave(page);
});

test("a message can be edited, an answer asked for again, and every branch stays", async () => {
  const page = await visitChat(open);
  await answerWith(page, [{ content: "First answer" }]);
  await ask(page, "First question", 5);
  await answered(page, 1);
  await answerWith(page, [{ content: "Second answer" }]);
  await button(page, ".message.answer", "Try again").click();
  await page.waitForSelector("text=Second answer");
  await answered(page, 1);
  const switcher = page.locator(".message.answer .switcher");
  assert.match(await switcher.textContent(), /2 of 2/);
  await switcher.locator("button").first().click();
  assert.match(await page.locator(".message.answer .text").textContent(), /First answer/);
  const followed = await sentBy(page, () => ask(page, "And then?", 5));
  assert.deepEqual(contents(followed), ["First question", "First answer", "And then?"]);
  await answered(page, 2);
  const first = page.locator(".message.user").first();
  await first.hover();
  await first.locator("button", { hasText: "Edit" }).click();
  const edited = await sentBy(page, async () => {
    await page.fill(".editing textarea", "Another question");
    await page.keyboard.press("Enter");
  });
  assert.deepEqual(contents(edited), ["Another question"]);
  await answered(page, 1);
  assert.match(await page.locator(".message.user .switcher").textContent(), /2 of 2/);
  await picture(page, "branches");
  await page.locator(".message.user .switcher button").first().click();
  assert.equal(await page.locator(".message").count(), 4, "the old branch is as long as it was");
  assert.match(await page.locator(".message.answer .text").first().textContent(), /First answer/);
  // An edited answer is kept, not asked for.
  const last = page.locator(".message.answer").first();
  await last.locator("button", { hasText: "Edit" }).click();
  await page.fill(".editing textarea", "What I would have said");
  await page.click(".editing .primary");
  assert.match(await page.locator(".message.answer .text").first().textContent(), /What I would have said/);
  assert.match(await page.locator(".message.answer .foot").first().textContent(), /3 of 3.*|edited/);
  await button(page, ".message.answer", "Branch").click();
  await page.waitForFunction(() => document.querySelectorAll(".message").length === 2);
  assert.equal(await page.locator(".conversations a").count(), 2);
  await leave(page);
});

test("a turn that failed is explained, can be asked again, and is not told to the model", async () => {
  const page = await visitChat(open);
  page.expected.push(/400/);
  await ask(page, "Hello", 100000);
  await page.waitForSelector(".message.answer .error");
  const words = await page.locator(".message.answer .error").textContent();
  assert.match(words, /The setting “Longest answer” was refused\. Change it in the settings/);
  assert.match(words, /max_tokens/);
  await answered(page, 1);
  const later = await sentBy(page, () => ask(page, "Good morning", 5));
  assert.deepEqual(contents(later), ["Good morning"], "the failed turn is left out");
  await answered(page, 2);
  assert.match(await page.locator(".message.user").first().textContent(), /not sent to the model again/);
  await picture(page, "failed");
  const again = await sentBy(page, () => page.locator(".message.answer").first().locator("button", { hasText: "Try again" }).click());
  assert.deepEqual(contents(again), ["Hello"]);
  await answered(page, 1);
  assert.equal(await page.locator(".error").count(), 0);
  await leave(page);
});

test("a prompt that is too long is said to be too long", async () => {
  const page = await visitChat(open);
  page.expected.push(/400/);
  await ask(page, "word ".repeat(1100), 5);
  await page.evaluate(() => (document.getElementById("prompt").value = "river ".repeat(2500)));
  await page.waitForTimeout(50);
  await answered(page, 1);
  await page.press("#prompt", "Enter");
  await page.waitForSelector(".message.answer .error");
  assert.match(await page.locator(".error").textContent(), /This is too long for the model\. Shorten the message/);
  await leave(page);
});

test("a connection that breaks off keeps what has come, and the page finds the server again", async () => {
  const mortal = await serve();
  const page = await visitChat(mortal);
  page.expected.push(/ERR_|Failed to load resource|network/i);
  await endless(page);
  await page.fill("#prompt", "Tell me a very long story about a river.");
  await page.press("#prompt", "Enter");
  await page.waitForFunction(() => document.querySelector(".message.answer .text")?.textContent.length > 20);
  await end(mortal);
  await page.waitForSelector(".message.answer .error");
  assert.match(await page.locator(".error").textContent(), /The connection to the server was lost\. Check that the server/);
  assert.ok((await page.locator(".message.answer .text").textContent()).length > 60);
  await page.waitForSelector("#lost", { state: "visible" });
  assert.match(await page.locator("#lost").textContent(), /cannot be reached/);
  await page.waitForFunction(() => /^Trying again/.test(document.getElementById("lost-when").textContent));
  assert.equal(await page.locator("#pulse").getAttribute("data-state"), "lost");
  await picture(page, "lost");
  await serve([], new URL(mortal.url).port);
  await page.click("#retry-now");
  await page.waitForSelector("#lost", { state: "hidden" });
  const sent = await sentBy(page, () => ask(page, "Go on.", 5));
  assert.deepEqual(roles(sent), ["user", "assistant", "user"], "what has come is part of the conversation");
  await answered(page, 2);
  await leave(page);
});

test("text files can be dropped, pasted and chosen; what is no text is refused", async () => {
  const page = await visitChat(open);
  const give = (kind, files) =>
    page.evaluate(
      ([type, list]) => {
        const data = new DataTransfer();
        for (const [name, bytes] of list) {
          data.items.add(new File([new Uint8Array(bytes)], name));
        }
        const target = document.getElementById("prompt");
        const more = { bubbles: true, cancelable: true };
        target.dispatchEvent(type === "drop" ? new DragEvent("drop", { dataTransfer: data, ...more }) : new ClipboardEvent("paste", { clipboardData: data, ...more }));
      },
      [kind, files],
    );
  const bytes = (text) => [...Buffer.from(text)];
  await give("drop", [["notes.md", bytes("# Notes\n```\ncode\n```\n")]]);
  await page.waitForSelector("#attached li");
  await give("paste", [["data.csv", bytes("a,b\r\n1,2\r\n")]]);
  await page.waitForFunction(() => document.querySelectorAll("#attached li").length === 2);
  await page.setInputFiles("#file", { name: "main.rs", mimeType: "text/plain", buffer: Buffer.from("fn main() {}\n") });
  await page.waitForFunction(() => document.querySelectorAll("#attached li").length === 3);
  await give("drop", [["picture.png", [137, 80, 78, 71, 0, 255]]]);
  await page.waitForSelector(".toast");
  assert.match(await page.locator(".toast").textContent(), /picture\.png is not a text file/);
  await page.getByLabel("Remove main.rs").click();
  await picture(page, "attached");
  const sent = await sentBy(page, () => ask(page, "What is in these files?", 5));
  const [{ content }] = sent.messages;
  assert.match(content, /^File: notes\.md\n````\n# Notes\n```\ncode\n```\n````\n\nFile: data\.csv\n```\na,b\n1,2\n```\n\nWhat is/);
  await answered(page, 1);
  assert.equal(await page.locator(".message.user .file").count(), 2);
  assert.equal(await page.locator("#attached li").count(), 0);
  // A long text becomes a file of its own.
  await page.evaluate(() => {
    const data = new DataTransfer();
    data.setData("text/plain", "long ".repeat(2000));
    document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
  });
  assert.match(await page.locator("#attached").textContent(), /pasted\.txt/);
  await leave(page);
});

test("reasoning is folded, tool calls are shown, and their results go back", async () => {
  const page = await visitChat(open);
  await set(page, "tools", '{"name": "weather", "parameters": {"type": "object"}}');
  await answerWith(
    page,
    [
      { role: "assistant", reasoning_content: "Let me " },
      { reasoning_content: "**think**." },
      { content: "I will look." },
      { tool_calls: [{ index: 0, id: "call-1", function: { name: "weather", arguments: '{"city": ' } }] },
      { tool_calls: [{ index: 0, function: { arguments: '"Bern"}' } }] },
    ],
    "tool_calls",
  );
  const sent = await sentBy(page, () => ask(page, "How is the weather?", 5));
  assert.deepEqual(sent.tools, [{ type: "function", function: { name: "weather", parameters: { type: "object" } } }]);
  await answered(page, 1);
  const answer = page.locator(".message.answer");
  assert.equal(await answer.locator(".reasoning").getAttribute("open"), null, "reasoning is folded");
  assert.match(await answer.locator(".reasoning summary").textContent(), /^Thought for/);
  await answer.locator(".reasoning summary").click();
  assert.equal(await answer.locator(".reasoning strong").textContent(), "think");
  assert.match(await answer.locator(".tool-call").textContent(), /weather[^]*\{\s*"city": "Bern"\s*\}/);
  assert.match(await answer.locator(".foot").textContent(), /wants a tool/);
  await picture(page, "parts");
  await answerWith(page, [{ content: "It rains." }]);
  const result = await sentBy(page, async () => {
    await page.fill(".results textarea", "rain, 12 °C");
    await page.click(".results button");
  });
  assert.deepEqual(result.messages.slice(1), [
    { role: "assistant", content: "I will look.", tool_calls: [{ id: "call-1", type: "function", function: { name: "weather", arguments: '{"city": "Bern"}' } }] },
    { role: "tool", tool_call_id: "call-1", content: "rain, 12 °C" },
  ]);
  await answered(page, 2);
  assert.match(await page.locator(".message.tool").textContent(), /rain, 12 °C/);
  await leave(page);
});

test("a call that nobody answers does not spoil the chat", async () => {
  const page = await visitChat(open);
  await answerWith(page, [{ content: "I will look." }, { tool_calls: [{ index: 0, id: "1", function: { name: "weather", arguments: "{}" } }] }], "tool_calls");
  await ask(page, "How is the weather?", 5);
  await answered(page, 1);
  const sent = await sentBy(page, () => ask(page, "Never mind.", 5));
  assert.deepEqual(sent.messages[1], { role: "assistant", content: "I will look." });
  await leave(page);
});

test("a key is asked for, and a wrong one is said to be wrong", async () => {
  const page = await visit(guarded, { colorScheme: "dark" });
  await page.waitForSelector("#key-dialog[open]");
  await picture(page, "key");
  await page.keyboard.press("Escape");
  assert.ok(await page.locator("#key-dialog").isVisible(), "there is no way around the key");
  await page.fill("#key", "wrong key");
  await page.press("#key", "Enter");
  await page.waitForSelector("#key-wrong");
  assert.equal(await page.locator("#model option").count(), 0);
  await page.fill("#key", KEY);
  await page.press("#key", "Enter");
  await page.waitForSelector("#model option", { state: "attached" });
  await ask(page, "Write three lines of Python that print a greeting, in a code block.", 60);
  await answered(page, 1);
  await picture(page, "dark");
  await page.reload();
  await page.waitForSelector("#model option", { state: "attached" });
  assert.ok(!(await page.locator("#key-dialog").isVisible()), "the tab has forgotten its key");
  const kept = await page.evaluate(() => JSON.stringify({ ...localStorage }));
  assert.ok(!kept.includes(KEY), "the key outlasts the tab");
  await leave(page);
});

test("the theme can be chosen and outlasts the page", async () => {
  const page = await visitChat(open, { colorScheme: "light" });
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await page.click("#theme");
  assert.equal(await page.locator("#theme").getAttribute("aria-label"), "Theme: light");
  assert.equal(await ground(), light);
  await page.click("#theme");
  assert.equal(await page.locator("#theme").getAttribute("aria-label"), "Theme: dark");
  const dark = await ground();
  assert.notEqual(dark, light);
  await page.reload();
  assert.equal(await ground(), dark);
  await page.goto(`${open.url}/docs`);
  assert.equal(await ground(), dark, "every page has the theme");
  await leave(page);
});

test("a phone needs no sideways scrolling, and its panels open and close", async () => {
  const page = await visitChat(open, PHONE);
  const fits = async () => {
    const [scroll, width] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    assert.ok(scroll <= width, `${scroll} of ${width}`);
  };
  assert.ok(await page.locator("#sidebar").isHidden() && (await page.locator("#settings").isHidden()));
  await answerWith(page, [{ content: `| a | b |\n|---|---|\n| ${"wide ".repeat(40)} | 2 |\n\n\`\`\`\n${"long".repeat(200)}\n\`\`\`\n\n$$${"x + ".repeat(80)}y$$` }]);
  await ask(page, "Write a table of three rivers.", 40);
  await answered(page, 1);
  await fits();
  const box = await page.locator("#composer").boundingBox();
  assert.ok(box.y + box.height <= 800, "the message box is below the screen");
  await picture(page, "phone-chat");
  await page.click("#toggle-settings");
  assert.ok(await page.locator("#temperature").isVisible());
  await picture(page, "phone-settings");
  await fits();
  await page.click("#toggle-sidebar");
  assert.ok(await page.locator("#settings").isHidden(), "one panel at a time");
  assert.ok(await page.locator(".conversations a").isVisible());
  await picture(page, "phone-chats");
  await page.keyboard.press("Escape");
  assert.ok(await page.locator("#sidebar").isHidden());
  assert.equal(await page.evaluate(() => document.activeElement.id), "toggle-sidebar");
  await page.click("#toggle-sidebar");
  await page.click("#new-chat");
  await page.waitForSelector("#welcome", { state: "visible" });
  assert.ok(await page.locator("#sidebar").isHidden(), "a choice closes the panel");
  await leave(page);
});
