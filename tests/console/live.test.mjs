/** The live view: what the server is, what it does, and nothing that it does not measure. */

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { leave, PHONE, picture, SCREENSHOTS, serve, visit } from "./harness.mjs";

let open;

before(async () => {
  open = await serve();
});

/** Requests that go on until they are stopped, however fast the machine is. */
function load(count) {
  const stopper = new AbortController();
  const body = JSON.stringify({
    messages: [{ role: "user", content: "Count to two hundred." }],
    max_tokens: 1900,
    ignore_eos: true,
    stream: true,
  });
  const headers = { "Content-Type": "application/json" };
  const post = async () => {
    try {
      while (true) {
        const reply = await fetch(`${open.url}/v1/chat/completions`, { method: "POST", headers, body, signal: stopper.signal });
        await reply.text();
      }
    } catch (error) {
      assert.ok(stopper.signal.aborted, String(error));
    }
  };
  const ended = Promise.all(Array.from({ length: count }, post));
  return async () => {
    stopper.abort();
    await ended;
  };
}

const shows = (page, chart, figure) =>
  page.waitForFunction(
    ([id, source]) => new RegExp(source).test(document.querySelector(`#chart-${id} svg`).getAttribute("aria-label")),
    [chart, figure.source],
  );

test("the head says what is served, on what", async () => {
  const page = await visit(open, {}, "/#live");
  const stats = await (await fetch(`${open.url}/stats`)).json();
  await page.waitForFunction(() => document.getElementById("fact-model").textContent !== "–");
  const fact = (name) => page.locator(`#fact-${name}`).textContent();
  assert.equal(await fact("model"), "smollm2");
  assert.equal(await fact("device"), stats.device);
  assert.equal(await fact("version"), `Baton ${stats.version}`);
  assert.equal(await fact("context"), "2,048 tokens");
  assert.ok((await fact("kv")).startsWith(`${stats.kv_cache.num_tokens.toLocaleString("en")} tokens, `));
  assert.match(await page.locator("#request-note").textContent(), /No request is being served right now/);
  await leave(page);
});

test("charts grow from the moment the page is opened", async () => {
  const page = await visit(open, {}, "/#live");
  const line = () => page.locator("#chart-requests path.line").first().getAttribute("d");
  await page.waitForFunction(() => (document.querySelector("#chart-requests path.line")?.getAttribute("d") ?? "").includes("L"));
  const begins = (path) => Number(path.match(/^M([\d.]+)/)[1]);
  const ends = (path) => Number(path.match(/([\d.]+) [\d.]+$/)[1]);
  const first = await line();
  const left = begins(first);
  assert.ok(left < 60, `it begins at ${left}`);
  let second = first;
  while (ends(second) <= ends(first)) {
    await page.waitForTimeout(100);
    second = await line();
  }
  assert.equal(begins(second), left, "it begins at the left edge, stays there and grows to the right");
  await leave(page);
});

test("requests under way are listed and counted, and the figures move", async () => {
  const page = await visit(open, {}, "/#live");
  await page.waitForSelector("#chart-tokens path.line", { state: "attached" });
  const stop = load(3);
  await shows(page, "requests", /running [1-3]/);
  await page.waitForSelector("#request-rows tr");
  await page.waitForFunction(() => /writing/.test(document.querySelector("#request-rows .state")?.textContent));
  const row = await page.locator("#request-rows tr").first().textContent();
  assert.match(row, /tokens.*\d+ of 1,?900 tokens/);
  assert.equal(await page.locator("#pulse").getAttribute("data-state"), "busy");
  assert.match(await page.locator("#pulse-text").textContent(), /^(1 request|\d requests), [\d.]+ tokens\/s$/);
  await shows(page, "ttft", /p50 [\d.]+ m?s/);
  await shows(page, "itl", /p99 [\d.]+ m?s/);
  await shows(page, "savings", /prompt tokens [\d.]+%/);
  await stop();
  await shows(page, "requests", /running 0/);
  await page.waitForFunction(() => document.querySelectorAll("#request-rows tr").length === 0);
  const tile = (title) => page.locator(".tile", { has: page.locator("h2", { hasText: title }) }).textContent();
  assert.match(await tile("Relay attention"), /[\d.]+ (B|KiB|MiB|GiB) since the start/);
  assert.match(await tile("Prefix cache"), /\d+ tokens? reused/);
  assert.match(await tile("KV cache"), /0 preemptions/);
  if (SCREENSHOTS) {
    await page.waitForTimeout(6000);
    await picture(page, "live");
  }
  await leave(page);
});

test("one of a thing has the singular", async () => {
  const page = await visit(open, {}, "/#live");
  const words = await page.evaluate(async () => {
    const { plural } = await import("/console/format.js");
    return [plural(0, "token"), plural(1, "token"), plural(1234, "token"), plural(1, "reply", "replies"), plural(2, "reply", "replies")];
  });
  assert.deepEqual(words, ["0 tokens", "1 token", "1,234 tokens", "1 reply", "2 replies"]);
  const stop = load(1);
  await page.waitForFunction(() => document.querySelector(".tile .value").textContent === "1request");
  await stop();
  await leave(page);
});

test("values of earlier moments are shown under the pointer and by the arrow keys", async () => {
  const page = await visit(open, {}, "/#live");
  // A few looks at the server, so that there are earlier moments.
  await page.waitForFunction(() => (document.querySelector("#chart-tokens path.line")?.getAttribute("d") ?? "").split("L").length > 3);
  const plot = page.locator("#chart-tokens .plot");
  const box = await plot.boundingBox();
  await page.mouse.move(box.x + 60, box.y + 40);
  const tip = page.locator("#chart-tokens .tip");
  assert.ok(await tip.isVisible());
  assert.match(await tip.textContent(), /\d s ago.*generated.*\d.*read.*\d/);
  await page.mouse.move(0, 0);
  assert.ok(await tip.isHidden());
  await plot.focus();
  await page.keyboard.press("ArrowLeft");
  assert.ok(await tip.isVisible());
  assert.match(await page.locator("#chart-tokens [role=status]").textContent(), /\d s ago: generated/);
  await leave(page);
});

test("legends stand in one place in every chart", async () => {
  const page = await visit(open, {}, "/#live");
  await page.waitForSelector("#chart-itl path, #chart-itl text", { state: "attached" });
  const tops = await page.evaluate(() =>
    [...document.querySelectorAll(".chart:not([hidden])")].map((chart) => {
      const [own, legend] = [chart.getBoundingClientRect(), chart.querySelector(".legend").getBoundingClientRect()];
      return `${Math.round(legend.top - own.top)} ${Math.round(legend.left - own.left)}`;
    }),
  );
  assert.equal(new Set(tops).size, 1, tops.join(", "));
  await leave(page);
});

test("speculation is shown only where it is measured", async () => {
  const page = await visit(open, {}, "/#live");
  await page.waitForSelector("#chart-tokens path.line", { state: "attached" });
  assert.ok(await page.locator("#chart-speculation").isHidden());
  let count = 0;
  await page.route("**/metrics", async (route) => {
    const response = await route.fetch();
    count += 1;
    const more = `vllm:spec_decode_num_draft_tokens_total{} ${count * 10}\nvllm:spec_decode_num_accepted_tokens_total{} ${count * 6}\n`;
    await route.fulfill({ response, body: (await response.text()) + more });
  });
  await page.waitForSelector("#chart-speculation", { state: "visible" });
  await shows(page, "speculation", /accepted 60%/);
  await leave(page);
});

test("a phone shows the same without sideways scrolling", async () => {
  const page = await visit(open, PHONE, "/#live");
  const stop = load(2);
  await page.waitForFunction(() => document.querySelectorAll("#request-rows tr").length === 2);
  const [scroll, width] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(scroll <= width, `${scroll} of ${width}`);
  await picture(page, "phone-live", { fullPage: true });
  await stop();
  await leave(page);
});
