/** Conversations in the browser: kept, listed, found, renamed, taken out and in, deleted. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { before, test } from "node:test";

import { answered, answerWith, ask, endless, leave, picture, sentBy, serve, visit, visitChat } from "./harness.mjs";

let open;

before(async () => {
  open = await serve();
});

/** A page with these conversations, each of one question and one answer; the last one is shown. */
async function withChats(pairs) {
  const page = await visitChat(open);
  for (const [question, answer] of pairs) {
    await page.click("#new-chat");
    await answerWith(page, [{ content: answer }]);
    await ask(page, question, 5);
    await answered(page, 1);
  }
  return page;
}

const titles = (page) => page.locator(".conversations a span").allTextContents();

async function menu(page, title, entry) {
  await page.getByLabel(`More for ${title}`).click();
  await page.locator("#menu button", { hasText: entry }).click();
}

test("conversations outlast the page, and each has an address", async () => {
  const page = await withChats([["About rivers", "They flow."], ["About mountains", "They stand."]]);
  assert.deepEqual(await titles(page), ["About mountains", "About rivers"]);
  assert.equal(await page.locator(".conversations .day").textContent(), "Today");
  const address = page.url();
  await page.reload();
  await page.waitForSelector("text=They stand.");
  assert.equal(page.url(), address);
  await page.locator(".conversations a", { hasText: "rivers" }).click();
  await page.waitForSelector("text=They flow.");
  const sent = await sentBy(page, () => ask(page, "Where to?", 5));
  assert.equal(sent.messages.length, 3, "it goes on where it was");
  await answered(page, 2);
  await page.goBack();
  await page.waitForSelector("text=They stand.");
  await page.click("#tab-live");
  await page.click("#tab-chat");
  await page.waitForSelector("text=They stand.");
  await picture(page, "conversations");
  await leave(page);
});

test("a conversation can be renamed and found again by what it holds", async () => {
  const page = await withChats([["About rivers", "The Danube flows."], ["About mountains", "The Eiger stands."]]);
  await menu(page, "About rivers", "Rename");
  await page.keyboard.type("Water");
  await page.keyboard.press("Enter");
  assert.ok((await titles(page)).includes("Water"));
  await menu(page, "Water", "Rename");
  await page.keyboard.type("Something else");
  await page.keyboard.press("Escape");
  assert.ok((await titles(page)).includes("Water"), "Escape changes nothing");
  await page.fill("#search", "danube");
  assert.deepEqual(await titles(page), ["Water"]);
  assert.match(await page.locator(".conversations small").textContent(), /Danube flows/);
  await page.fill("#search", "glacier");
  assert.deepEqual(await titles(page), []);
  assert.match(await page.locator("#no-conversations").textContent(), /No chat holds “glacier”/);
  await page.fill("#search", "");
  await page.reload();
  await page.waitForSelector(".conversations a");
  assert.ok((await titles(page)).includes("Water"), "a title outlasts the page");
  await leave(page);
});

test("a conversation goes out as Markdown and as JSON, and comes back in", async () => {
  const page = await withChats([["About <rivers> & such", "They *flow*."]]);
  const exported = async (entry) => {
    const download = page.waitForEvent("download");
    await menu(page, "About <rivers> & such", entry);
    const file = await download;
    return { name: file.suggestedFilename(), text: await readFile(await file.path(), "utf8") };
  };
  const markdown = await exported("Markdown");
  assert.equal(markdown.name, "About-rivers-such.md");
  assert.equal(markdown.text, "# About <rivers> & such\n\n**You**\n\nAbout <rivers> & such\n\n---\n\n**Answer** (smollm2)\n\nThey *flow*.\n");
  const json = await exported("JSON");
  await menu(page, "About <rivers> & such", "Delete");
  assert.deepEqual(await titles(page), []);
  await page.setInputFiles("#import", { name: "chats.json", mimeType: "application/json", buffer: Buffer.from(json.text) });
  await page.waitForSelector(".conversations a");
  await page.locator(".conversations a").click();
  await page.waitForSelector(".message.answer em");
  await page.setInputFiles("#import", { name: "other.json", mimeType: "application/json", buffer: Buffer.from('{"format": 1}') });
  await page.waitForSelector("text=This file holds no conversations of Baton.");
  await leave(page);
});

test("a hostile file brings no loops, no foreign fields and no code", async () => {
  const page = await visitChat(open);
  const nodes = {
    root: { id: "root", children: ["a", "root", "gone", 7], chosen: "a" },
    a: { role: "user", content: "<img src=x onerror=alert(1)>", children: ["b", "a"], chosen: "b", evil: "x" },
    b: { role: "assistant", content: "[x](javascript:alert(1))", children: ["a"], chosen: "a", toolCalls: "none", files: [null] },
    __proto__: { role: "user", content: "polluted", children: [] },
  };
  const text = JSON.stringify({ format: "baton conversations 1", conversations: [{ title: 5, nodes }, null] });
  const read = await page.evaluate(async (content) => {
    const { fromJson } = await import("/console/transfer.js");
    const { path } = await import("/console/tree.js");
    return fromJson(content).map((one) => ({ title: one.title, shown: path(one).map(({ role, content: said, evil }) => [role, said, evil ?? null]) }));
  }, text);
  assert.deepEqual(read[0], { title: "", shown: [["user", nodes.a.content, null], ["assistant", nodes.b.content, null]] });
  assert.deepEqual(read[1].shown, []);
  await leave(page);
});

test("what was deleted can be brought back, unless all was deleted", async () => {
  const page = await withChats([["About rivers", "They flow."], ["About mountains", "They stand."]]);
  await menu(page, "About mountains", "Delete");
  await page.waitForSelector("#welcome", { state: "visible" });
  assert.deepEqual(await titles(page), ["About rivers"]);
  await page.locator(".toast button").click();
  await page.waitForSelector("text=They stand.");
  assert.equal((await titles(page)).length, 2);
  await page.click("#list-menu");
  await page.locator("#menu button", { hasText: "Delete all" }).click();
  assert.match(await page.locator("#confirm").textContent(), /2 chats will be deleted/);
  await page.locator("#confirm button", { hasText: "Keep them" }).click();
  assert.equal((await titles(page)).length, 2);
  await page.click("#list-menu");
  await page.locator("#menu button", { hasText: "Delete all" }).click();
  await page.locator("#confirm button", { hasText: "Delete all" }).click();
  await page.waitForSelector("#welcome", { state: "visible" });
  await page.reload();
  await page.waitForSelector("text=Your chats will be listed here.");
  await leave(page);
});

test("an answer goes on while another conversation is looked at", async () => {
  const page = await withChats([["About rivers", "They flow."]]);
  await endless(page);
  await page.click("#new-chat");
  await ask(page, "Tell me a long story about a mountain.", 150);
  await page.waitForFunction(() => document.querySelector(".message.answer .text")?.textContent.length > 20);
  await page.locator(".conversations a", { hasText: "rivers" }).click();
  await page.waitForSelector("text=They flow.");
  assert.ok(await page.locator("#send").isVisible(), "this one waits for nothing");
  await page.waitForFunction(async () => /vllm:num_requests_running\S* 0/.test(await (await fetch("/metrics")).text()));
  await page.locator(".conversations a", { hasText: "mountain" }).click();
  await page.waitForSelector(".message.user >> text=mountain");
  await answered(page, 1);
  assert.match(await page.locator(".message.answer .foot").textContent(), /150 tokens/);
  await leave(page);
});

test("an answer comes to its end on the page that asked, whatever another page writes meanwhile", async () => {
  const page = await withChats([["About rivers", "They flow."]]);
  await endless(page);
  await page.click("#new-chat");
  await ask(page, "Tell me a long story about a mountain.", 150);
  await page.waitForFunction(() => document.querySelector(".message.answer .text")?.textContent.length > 20);
  const second = await visit(open, page.context());
  await second.waitForSelector(".conversations a");
  await menu(second, "Tell me a long story about a mountain.", "Rename");
  await second.keyboard.type("Peaks");
  await second.keyboard.press("Enter");
  await page.locator(".conversations a", { hasText: "Peaks" }).waitFor();
  await page.locator(".conversations a", { hasText: "rivers" }).click();
  await page.waitForSelector("text=They flow.");
  await page.goBack();
  await page.waitForSelector(".message.user >> text=mountain");
  await answered(page, 1);
  assert.match(await page.locator(".message.answer .foot").textContent(), /150 tokens/);
  assert.deepEqual(await titles(page), ["Peaks", "About rivers"]);
  assert.deepEqual(second.complaints, []);
  await leave(page);
});

test("an answer that a reload cut short says so and can be asked for again", async () => {
  const page = await visitChat(open);
  await endless(page);
  await page.fill("#prompt", "Tell me a very long story about a river.");
  await page.press("#prompt", "Enter");
  await page.waitForFunction(() => document.querySelector(".message.answer .text")?.textContent.length > 20);
  await page.reload();
  await page.waitForSelector(".message.answer .foot");
  await answered(page, 1);
  const foot = await page.locator(".message.answer .foot").textContent();
  assert.match(foot, /interrupted/);
  await leave(page);
});

test("two pages of the same browser agree", async () => {
  const page = await withChats([["About rivers", "They flow."]]);
  const second = await visit(open, page.context());
  await second.waitForSelector(".conversations a");
  await menu(page, "About rivers", "Rename");
  await page.keyboard.type("Water");
  await page.keyboard.press("Enter");
  await second.waitForSelector("text=Water");
  await menu(second, "Water", "Delete");
  await page.waitForSelector("#welcome", { state: "visible" });
  assert.deepEqual(await titles(page), []);
  assert.deepEqual(second.complaints, []);
  await leave(page);
});
