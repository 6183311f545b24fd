/**
 * What the tests of the console share: the real binary, the default model, a real Chromium.
 *
 * `cargo xtask browser` starts them with the paths in BATON_BIN and BATON_TEST_MODEL. With SCREENSHOTS=FOLDER they
 * also leave pictures there. Each page is watched: an error in the browser's console, a breach of the content policy
 * or a request to any other server fails the test.
 */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdir, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after } from "node:test";

import { chromium } from "playwright-core";

const { BATON_BIN, BATON_TEST_MODEL, CHROMIUM } = process.env;
export const { SCREENSHOTS } = process.env;
/** Not what the browser's package sets for the browser. */
const ENVIRONMENT = { ...process.env };
export const KEY = "right key";
export const DESK = { width: 1280, height: 800 };
export const PHONE = { viewport: { width: 390, height: 800 }, isMobile: true, hasTouch: true };

const servers = [];
let browser = null;

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

async function theBrowser() {
  if (!browser) {
    const executablePath = CHROMIUM || (await bundledBrowser());
    browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--headless=shell", "--disable-gpu"] });
  }
  return browser;
}

after(async () => {
  await browser?.close();
  for (const server of servers) {
    server.process.kill("SIGTERM");
  }
});

/** Starts a server on a free port, or on a given one, and waits until it is ready. */
export async function serve(more = [], port = 0) {
  const flags = ["serve", BATON_TEST_MODEL, "--port", String(port), "--served-model-name", "smollm2", "--max-model-len", "2048"];
  const options = { stdio: ["ignore", "pipe", "inherit"], env: ENVIRONMENT };
  const child = spawn(BATON_BIN, [...flags, "--log-level", "error", ...more], options);
  const lines = createInterface({ input: child.stdout });
  const [line] = await Promise.race([once(lines, "line"), once(child, "exit").then(() => ["it has ended"])]);
  const url = line.match(/http:\/\/\S+/)?.[0];
  assert.ok(url, `the server does not say where it is: ${line}`);
  const server = { url, process: child };
  servers.push(server);
  return server;
}

/** Ends a server and waits until it is gone. */
export async function end(server) {
  const gone = once(server.process, "exit");
  server.process.kill("SIGKILL");
  await gone;
}

/** A page that is watched. `context` may be one that another page has. */
export async function visit(server, context = {}, path = "/") {
  const isOpen = typeof context.newPage === "function";
  const session = isOpen ? context : await (await theBrowser()).newContext({ viewport: DESK, acceptDownloads: true, ...context });
  const page = await session.newPage();
  // A machine may be slow; only what never comes is a failure.
  page.setDefaultTimeout(120_000);
  page.complaints = [];
  // What the browser reports by itself and a test expects; each 401 is part of asking for a key.
  page.expected = [/401/];
  const complain = (text) => page.expected.some((one) => one.test(text)) || page.complaints.push(text);
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complain(message.text()));
  page.on("pageerror", (error) => complain(String(error)));
  page.on("request", (request) => {
    if (!/^(blob|data):/.test(request.url()) && !request.url().startsWith(`${server.url}/`)) {
      complain(`a request to ${request.url()}`);
    }
  });
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective}`));
  });
  await page.goto(server.url + path);
  return page;
}

/** A page with the chat, ready to be used. */
export async function visitChat(server, context = {}, path = "/") {
  const page = await visit(server, context, path);
  await page.waitForSelector("#model option", { state: "attached" });
  return page;
}

export async function leave(page) {
  assert.deepEqual(page.complaints, []);
  await page.context().close();
}

export async function picture(page, name, options = {}) {
  if (SCREENSHOTS) {
    await page.screenshot({ path: join(SCREENSHOTS, `${name}.png`), ...options });
  }
}

/** Sets a field of the settings as a person would, also where the panel is folded. */
export async function set(page, id, value) {
  await page.evaluate(
    ([name, text]) => {
      const field = document.getElementById(name);
      field.value = text;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    },
    [id, String(value)],
  );
}

/** Asks something with a limit, so that the test ends. */
export async function ask(page, text, maxTokens) {
  await set(page, "max-tokens", maxTokens);
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

/** Waits until so many answers are shown and none is coming. */
export const answered = (page, count) =>
  page.waitForFunction((wanted) => {
    const feet = [...document.querySelectorAll(".message.answer .foot")];
    return feet.length === wanted && feet.every((foot) => foot.textContent.includes("Try again"));
  }, count);

/** The body of the next request for an answer. */
export async function sentBy(page, act) {
  const request = page.waitForRequest((one) => one.method() === "POST" && one.url().endsWith("/v1/chat/completions"));
  await act();
  return JSON.parse((await request).postData());
}

/** What the model will not say on demand, said by a stand-in for the server's stream. */
export async function answerWith(page, deltas, finish = "stop") {
  await page.unroute("**/v1/chat/completions");
  await page.route("**/v1/chat/completions", (route) => {
    const chunks = deltas.map((delta) => ({ choices: [{ index: 0, delta, finish_reason: null }] }));
    chunks.push({ choices: [{ index: 0, delta: {}, finish_reason: finish }] });
    const body = `${chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("")}data: [DONE]\n\n`;
    return route.fulfill({ contentType: "text/event-stream", body });
  });
}

/** The model may not end its answers by itself, so that there is time to do something to them. */
export async function endless(page) {
  await page.unroute("**/v1/chat/completions");
  await page.route("**/v1/chat/completions", (route) => {
    const body = JSON.parse(route.request().postData());
    return route.continue({ postData: JSON.stringify({ ...body, ignore_eos: true }) });
  });
}

/** The button of a message. */
export const button = (page, message, label) => page.locator(message).locator("button", { hasText: new RegExp(`^${label}$`) });
