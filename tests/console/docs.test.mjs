/** `/docs`: every route with its fields and an example that works. */

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { KEY, leave, PHONE, picture, serve, visit } from "./harness.mjs";

let open;
let guarded;

before(async () => {
  [open, guarded] = await Promise.all([serve(["--disable-console"]), serve(["--api-key", KEY])]);
});

test("every route is there, with the fields of its requests", async () => {
  const page = await visit(open, {}, "/docs");
  await page.waitForSelector(".route");
  const document = await (await fetch(`${open.url}/openapi.json`)).json();
  const wanted = Object.entries(document.paths).flatMap(([path, methods]) => Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`));
  const shown = await page.locator(".route h3").evaluateAll((heads) => heads.map((head) => head.textContent));
  assert.deepEqual(shown.sort(), wanted.sort());
  const chat = page.locator("#post_v1_chat_completions");
  const fields = await chat.locator(".fold > .fields > div > dt code").allTextContents();
  for (const field of ["messages", "temperature", "top_k", "response_format", "tools", "stream"]) {
    assert.ok(fields.includes(field), `${field} of ${fields}`);
  }
  assert.match(await chat.locator("dt", { hasText: /^temperature/ }).textContent(), /number, 0 to 2/);
  assert.match(await chat.locator("dt").first().textContent(), /^messages list of object ?required/);
  await picture(page, "docs");
  await leave(page);
});

test("an example can be sent, and its answer is shown", async () => {
  const page = await visit(open, {}, "/docs");
  const route = page.locator("#post_v1_chat_completions");
  await route.waitFor();
  assert.match(await route.locator(".example pre").first().textContent(), new RegExp(`^curl ${open.url}/v1/chat/completions`));
  await route.locator(".example .primary").click();
  await page.waitForFunction(() => /"finish_reason"/.test(document.querySelector("#post_v1_chat_completions .result").textContent));
  assert.match(await route.locator(".result").textContent(), /^200/);
  await leave(page);
});

test("routes are found by their path and by their fields", async () => {
  const page = await visit(open, {}, "/docs");
  await page.waitForSelector(".route");
  await page.fill("#filter", "detokenize");
  assert.deepEqual(await page.locator(".route:visible h3 code").allTextContents(), ["/detokenize"]);
  await page.fill("#filter", "guided_regex");
  assert.ok((await page.locator(".route:visible").count()) >= 2);
  await page.fill("#filter", "no such thing");
  assert.ok(await page.locator("#none-found").isVisible());
  await leave(page);
});

test("a server with keys asks for one", async () => {
  const page = await visit(guarded, { colorScheme: "dark" }, "/docs");
  await page.waitForSelector("#key-dialog[open]");
  await page.fill("#key", KEY);
  await page.press("#key", "Enter");
  await page.waitForSelector(".route");
  await picture(page, "docs-dark");
  await leave(page);
});

test("a phone needs no sideways scrolling", async () => {
  const page = await visit(open, PHONE, "/docs");
  await page.waitForSelector(".route");
  const [scroll, width] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(scroll <= width, `${scroll} of ${width}`);
  await picture(page, "phone-docs");
  await leave(page);
});

test("without scripts the routes are listed", async () => {
  const page = await visit(open, { javaScriptEnabled: false }, "/docs");
  assert.match(await page.locator(".plain-routes").textContent(), /POST \/v1\/chat\/completions/);
  await page.context().close();
});
