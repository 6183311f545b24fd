/**
 * The console as a person uses it: the real binary, the default model, a real Chromium.
 *
 * `cargo xtask browser` starts this with the paths in BATON_BIN and BATON_TEST_MODEL. With SCREENSHOTS=FOLDER it also
 * leaves pictures there. Each page is watched: an error in the browser's console, a breach of the content policy or
 * a request to any other server fails the test.
 */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdir, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";

import { chromium } from "playwright-core";

const { BATON_BIN, BATON_TEST_MODEL, SCREENSHOTS, CHROMIUM } = process.env;
/** Not what the browser's package sets for the browser. */
const ENVIRONMENT = { ...process.env };
const KEY = "right key";
const DESK = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 800 };

let browser;
let open;
let guarded;

/** Unpacks the browser that npm has brought, with the libraries that a small system lacks. */
async function bundledBrowser() {
  // The package looks at this name, when it is loaded, to decide whether its own libraries are needed.
  process.env.AWS_LAMBDA_JS_RUNTIME = "nodejs22.x";
  // Its fonts are unpacked with it, but what it brings for the font library looks for them in another folder, and without any
  // font it ends at the first character.
  const folder = join(tmpdir(), "fontconfig");
  await mkdir(folder, { recursive: true });
  const fonts = `<dir>${join(tmpdir(), "fonts")}</dir><cachedir>${join(folder, "cache")}</cachedir>`;
  await writeFile(join(folder, "fonts.conf"), `<fontconfig>${fonts}</fontconfig>\n`);
  process.env.FONTCONFIG_PATH = folder;
  const { default: bundled } = await import("@sparticuz/chromium");
  return bundled.executablePath();
}

before(async () => {
  const executablePath = CHROMIUM || (await bundledBrowser());
  browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--headless=shell", "--disable-gpu"] });
  [open, guarded] = await Promise.all([serve([]), serve(["--api-key", KEY])]);
});

after(async () => {
  await browser?.close();
  for (const server of [open, guarded]) {
    server?.process.kill("SIGTERM");
  }
});

/** Starts a server on a free port and waits until it is ready. */
async function serve(more) {
  const flags = ["serve", BATON_TEST_MODEL, "--port", "0", "--served-model-name", "smollm2", "--max-model-len", "2048"];
  const options = { stdio: ["ignore", "pipe", "inherit"], env: ENVIRONMENT };
  const child = spawn(BATON_BIN, [...flags, "--log-level", "warn", ...more], options);
  const lines = createInterface({ input: child.stdout });
  const [line] = await Promise.race([once(lines, "line"), once(child, "exit").then(() => ["it has ended"])]);
  const url = line.match(/http:\/\/\S+/)?.[0];
  assert.ok(url, `the server does not say where it is: ${line}`);
  return { url, process: child };
}

/** A page that is watched. */
async function visit(server, context = {}, path = "/") {
  const session = await browser.newContext({ viewport: DESK, ...context });
  const page = await session.newPage();
  page.complaints = [];
  page.on("console", (message) => {
    // The browser itself reports every 401; these are part of the flow.
    const expected = message.text().includes("401");
    if (["error", "warning"].includes(message.type()) && !expected) {
      page.complaints.push(message.text());
    }
  });
  page.on("pageerror", (error) => page.complaints.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(`${server.url}/`)) {
      page.complaints.push(`a request to ${request.url()}`);
    }
  });
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective}`));
  });
  await page.goto(server.url + path);
  return page;
}

async function leave(page) {
  assert.deepEqual(page.complaints, []);
  await page.context().close();
}

async function picture(page, name) {
  if (SCREENSHOTS) {
    await page.screenshot({ path: join(SCREENSHOTS, `${name}.png`) });
  }
}

/** Asks something with a limit, so that the test ends. */
async function ask(page, text, maxTokens) {
  await page.evaluate((limit) => (document.getElementById("max-tokens").value = limit), String(maxTokens));
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

const answered = (page, count) =>
  page.waitForFunction((wanted) => {
    const feet = [...document.querySelectorAll(".message.answer .foot")];
    return feet.length === wanted && feet.every((foot) => foot.textContent.includes("Try again"));
  }, count);

test("an answer streams, and the next one knows what was said", async () => {
  const page = await visit(open);
  await page.waitForSelector("#model option", { state: "attached" });
  await picture(page, "welcome");
  await ask(page, "Write a list of ten animals, with one fact each.", 120);
  const lengths = new Set();
  const growing = page.locator(".message.answer .text");
  await page.waitForSelector(".message.answer .text.cursor");
  while ((await page.locator(".cursor").count()) > 0) {
    lengths.add((await growing.textContent()).length);
    await page.waitForTimeout(20);
  }
  assert.ok(lengths.size >= 5, `the text was seen at ${lengths.size} lengths only`);
  await answered(page, 1);
  const foot = await page.locator(".message.answer .foot").textContent();
  assert.match(foot, /\d tokens/);
  assert.match(foot, /\d tokens\/s/);
  assert.match(foot, /first token after [\d.]+ m?s/);
  const second = page.waitForRequest((request) => request.method() === "POST");
  await ask(page, "Thank you. Which of them is the largest?", 30);
  const sent = JSON.parse((await second).postData());
  assert.deepEqual(sent.messages.map((message) => message.role), ["user", "assistant", "user"]);
  await answered(page, 2);
  await picture(page, "chat");
  await page.click("#new-chat");
  assert.equal(await page.locator(".message").count(), 0);
  assert.ok(await page.locator("#welcome").isVisible());
  await leave(page);
});

test("settings are sent", async () => {
  const page = await visit(open);
  await page.waitForSelector("#model option", { state: "attached" });
  await page.fill("#system", "Answer in one word.");
  await page.fill("#temperature", "0");
  const request = page.waitForRequest((one) => one.method() === "POST");
  await ask(page, "Hello", 5);
  const sent = JSON.parse((await request).postData());
  assert.deepEqual(sent.messages[0], { role: "system", content: "Answer in one word." });
  assert.equal(sent.temperature, 0);
  assert.ok(!("top_p" in sent), "what nobody has chosen is the model's own");
  assert.equal(sent.max_tokens, 5);
  assert.equal(sent.model, "smollm2");
  await answered(page, 1);
  await leave(page);
});

test("the keyboard is enough", async () => {
  const page = await visit(open);
  await page.waitForSelector("#model option", { state: "attached" });
  await page.locator(".skip").focus();
  const focused = [];
  for (let step = 0; step < 12 && focused.at(-1) !== "prompt"; step += 1) {
    await page.keyboard.press("Tab");
    focused.push(await page.evaluate(() => document.activeElement.id || document.activeElement.className));
  }
  assert.equal(focused.at(-1), "prompt", `Tab goes ${focused}`);
  assert.ok(focused.indexOf("tab-chat") < focused.indexOf("tab-live"), `Tab goes ${focused}`);
  await page.keyboard.type("Tell me a very long story");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("about a river.");
  await page.keyboard.press("Enter");
  assert.match(await page.locator(".message.user").textContent(), /story\nabout/);
  await page.waitForFunction(() => document.querySelector(".message.answer .text")?.textContent.length > 20);
  await page.keyboard.press("Escape");
  await answered(page, 1);
  assert.match(await page.locator(".message.answer .foot").textContent(), /stopped/);
  // What was stopped no longer runs on the server.
  await page.waitForFunction(async () => /vllm:num_requests_running\S* 0/.test(await (await fetch("/metrics")).text()));
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  await leave(page);
});

test("the live view moves", async () => {
  const page = await visit(open, {}, "/#live");
  const lines = () => page.locator("#chart-tokens path.line").first().getAttribute("d");
  await page.waitForSelector("#chart-tokens path.line", { state: "attached" });
  const earlier = await lines();
  const body = { messages: [{ role: "user", content: "Count to two hundred." }], max_tokens: 150, ignore_eos: true };
  const load = Promise.all([1, 2, 3].map(() => fetch(`${open.url}/v1/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  })));
  await page.waitForFunction(() => {
    const label = document.querySelector("#chart-requests svg").getAttribute("aria-label");
    return /running [1-3]/.test(label);
  });
  assert.equal(await page.locator("#pulse").getAttribute("data-state"), "busy");
  const shows = (chart, figure) =>
    page.waitForFunction(
      ([id, source]) => new RegExp(source).test(document.querySelector(`#chart-${id} svg`).getAttribute("aria-label")),
      [chart, figure.source],
    );
  await shows("ttft", /p50 [\d.]+ m?s/);
  await shows("itl", /p99 [\d.]+ m?s/);
  await shows("hits", /prompt tokens [\d.]+%/);
  await page.waitForFunction((old) => document.querySelector("#chart-tokens path.line").getAttribute("d") !== old, earlier);
  await load;
  await shows("requests", /running 0/);
  assert.match(await page.locator(".tile").first().textContent(), /\d/);
  const saved = page.locator(".tile", { hasText: "KV reads saved" });
  assert.match(await saved.textContent(), /\d+(\.\d+)? (MiB|GiB) since the start/);
  if (SCREENSHOTS) {
    await page.waitForTimeout(8000);
    await picture(page, "live");
  }
  await leave(page);
});

test("a phone needs no sideways scrolling", async () => {
  for (const path of ["/", "/#live"]) {
    const page = await visit(open, { viewport: PHONE, isMobile: true, hasTouch: true }, path);
    await page.waitForSelector("#model option", { state: "attached" });
    if (path === "/") {
      await ask(page, "Write a table of three rivers.", 40);
      await answered(page, 1);
      assert.ok(await page.locator("#composer").isVisible());
      const box = await page.locator("#composer").boundingBox();
      assert.ok(box.y + box.height <= PHONE.height, "the message box is below the screen");
    }
    await page.waitForTimeout(1200);
    const widths = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    assert.ok(widths[0] <= widths[1], `${path}: ${widths}`);
    await picture(page, `phone-${path === "/" ? "chat" : "live"}`);
    await leave(page);
  }
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
  assert.equal(await page.evaluate(() => localStorage.length), 0);
  await leave(page);
});

/** What the model will not say on demand, said by a stand-in for the server's stream. */
async function answerWith(page, deltas) {
  await page.route("**/v1/chat/completions", (route) => {
    const chunks = deltas.map((delta) => ({ choices: [{ index: 0, delta, finish_reason: null }] }));
    const body = `${chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("")}data: [DONE]\n\n`;
    return route.fulfill({ contentType: "text/event-stream", body });
  });
}

test("answers are shown as text, reasoning and tool calls, never as HTML", async () => {
  const page = await visit(open);
  await page.waitForSelector("#model option", { state: "attached" });
  await answerWith(page, [
    { role: "assistant", reasoning_content: "Let me " },
    { reasoning_content: "think." },
    { content: "# Rivers\n\n<img src=x onerror=alert(1)> **bold** and [link](javascript:alert(1)) and [web](" },
    { content: "https://example.org/)\n\n```js\n1 < 2\n```\n\n- one\n  - two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n" },
    { tool_calls: [{ index: 0, id: "1", function: { name: "weather", arguments: '{"city": ' } }] },
    { tool_calls: [{ index: 0, function: { arguments: '"Bern"}' } }] },
  ]);
  await ask(page, "Hello", 5);
  await answered(page, 1);
  const answer = page.locator(".message.answer");
  assert.equal(await answer.locator("img").count(), 0);
  assert.match(await answer.textContent(), /<img src=x onerror=alert\(1\)>/);
  assert.equal(await answer.locator("h2").textContent(), "Rivers");
  assert.equal(await answer.locator("strong").textContent(), "bold");
  assert.deepEqual(await answer.locator("a").evaluateAll((links) => links.map((link) => link.href)), ["https://example.org/"]);
  assert.equal(await answer.locator("pre code").textContent(), "1 < 2");
  assert.equal(await answer.locator("li li").textContent(), "two");
  assert.equal(await answer.locator("td").count(), 2);
  assert.match(await answer.locator(".reasoning").textContent(), /Let me think\./);
  assert.match(await answer.locator(".tool-call").textContent(), /weather.*\{"city": "Bern"\}/);
  await picture(page, "parts");
  await leave(page);
});

test("what the server refuses is said", async () => {
  const page = await visit(open);
  await page.waitForSelector("#model option", { state: "attached" });
  page.on("console", (message) => {
    page.complaints = page.complaints.filter((complaint) => complaint !== message.text() || !complaint.includes("400"));
  });
  await ask(page, "Hello", 100000);
  await page.waitForSelector(".message.answer .error");
  assert.match(await page.locator(".message.answer .error").textContent(), /max_tokens/);
  await leave(page);
});
