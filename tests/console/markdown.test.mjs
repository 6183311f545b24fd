/** What models write, on the page: rendered where it is Markdown, harmless whatever it is. */

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { answered, answerWith, ask, leave, picture, serve, visitChat } from "./harness.mjs";

let open;
let page;

before(async () => {
  open = await serve();
});

/** What a text becomes: a short form of its nodes, in which names stand for elements. */
async function rendered(text) {
  return page.evaluate(async (source) => {
    const { render } = await import("/console/markdown.js");
    const write = (node) => {
      if (node.nodeType === Node.TEXT_NODE) return node.data;
      if (node.localName === "header") return "";
      const inner = [...node.childNodes].map(write).join("");
      const plain = ["div", "pre", "tbody", "span", "semantics"].includes(node.localName);
      return plain ? inner : node.localName === "annotation" ? "" : `<${node.localName}>${inner}</${node.localName}>`;
    };
    return render(source).map(write).join("");
  }, text);
}

async function check(cases) {
  page = await visitChat(open);
  for (const [text, expected] of cases) {
    assert.equal(await rendered(text), expected, text);
  }
  await leave(page);
}

test("inline marks", () =>
  check([
    ["**bold** and *it* and ~~gone~~", "<p><strong>bold</strong> and <em>it</em> and <del>gone</del></p>"],
    ["***both***", "<p><strong><em>both</em></strong></p>"],
    ["a_b_c and _it_ and __bold__", "<p>a_b_c and <em>it</em> and <strong>bold</strong></p>"],
    ["2 * 3 * 4", "<p>2 * 3 * 4</p>"],
    ["`a*b*` and ``x ` y``", "<p><code>a*b*</code> and <code>x ` y</code></p>"],
    ["\\*not\\* **open", "<p>*not* **open</p>"],
    ["one\ntwo", "<p>one<br></br>two</p>"],
    ["see https://example.org/a_b_c.", "<p>see <a>https://example.org/a_b_c</a>.</p>"],
    ["[web](https://example.org/x_(y))", "<p><a>web</a></p>"],
    ["![cat](https://example.org/cat.png)", "<p><a>cat</a></p>"],
    ["[**b**](mailto:a@example.org)", "<p><a><strong>b</strong></a></p>"],
  ]));

test("blocks", () =>
  check([
    ["# One\n## Two #\ntext", "<h2>One</h2><h3>Two</h3><p>text</p>"],
    ["- a\n- b\n  - c\n    - d\n- e", "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>"],
    ["1. a\n\n2. b\n   more\n\n   ```js\n   - x\n   ```\n3. c", "<ol><li>a</li><li>b<br></br>more<code>- x</code></li><li>c</li></ol>"],
    ["- [x] done\n- [ ] open", "<ul><li><input></input> done</li><li><input></input> open</li></ul>"],
    ["a\n- b\n\ntext", "<p>a</p><ul><li>b</li></ul><p>text</p>"],
    ["> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"],
    ["```\n<b>&amp;\n```", "<code><b>&amp;</code>"],
    ["```python\nprint(1", "<code>print(1</code>"],
    ["| a | b |\n|:--|--:|\n| `x|y` | 2 |", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tr><td><code>x|y</code></td><td>2</td></tr></table>"],
    ["***\ntext", "<hr></hr><p>text</p>"],
  ]));

test("formulas", () =>
  check([
    ["$x^2$ costs $5 and $6", "<p><math><msup><mi>x</mi><mn>2</mn></msup></math> costs $5 and $6</p>"],
    ["$$\\frac{a}{b}$$", "<math><mfrac><mi>a</mi><mi>b</mi></mfrac></math>"],
    ["\\(a_i \\le \\sqrt[3]{2}\\)", "<p><math><mrow><msub><mi>a</mi><mi>i</mi></msub><mo>≤</mo><mroot><mn>2</mn><mn>3</mn></mroot></mrow></math></p>"],
    ["\\[\n\\sum_{i=1}^n i\n\\]", "<math><mrow><munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi></mrow></math>"],
    ["$\\begin{pmatrix}a&b\\\\c&d\\end{pmatrix}$", "<p><math><mrow><mo>(</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr><mtr><mtd><mi>c</mi></mtd><mtd><mi>d</mi></mtd></mtr></mtable><mo>)</mo></mrow></math></p>"],
    ["$\\left(\\frac12\\right)'$", "<p><math><msup><mrow><mo>(</mo><mfrac><mn>1</mn><mn>2</mn></mfrac><mo>)</mo></mrow><mo>′</mo></msup></math></p>"],
    ["$\\text{if } \\mathbb{R}$", "<p><math><mrow><mtext>if </mtext><mi>ℝ</mi></mrow></math></p>"],
    ["$\\unheard{x}$", "<p><math><mrow><mtext>\\unheard</mtext><mi>x</mi></mrow></math></p>"],
    ["$\\frac{a}$ and $}{$", "<p><code>\\frac{a}</code> and <code>}{</code></p>"],
  ]));

test("code has colours", async () => {
  page = await visitChat(open);
  const kinds = await page.evaluate(async () => {
    const { highlight } = await import("/console/highlight.js");
    const all = (code, language) => highlight(code, language).filter((node) => node.className).map((node) => [node.className.slice(5), node.textContent]);
    return {
      python: all('# note\ndef f(x):\n    return "a" + 12', "python"),
      rust: all("/* a\nb */ fn main() -> Option<u8> { 'x' }", "rust"),
      json: all('{"a": [true, 1.5]}', "json"),
      sql: all("SELECT a FROM b -- c", "sql"),
      plain: highlight("def f", "nothing").length,
    };
  });
  assert.deepEqual(kinds.python, [["comment", "# note"], ["word", "def"], ["call", "f"], ["word", "return"], ["text", '"a"'], ["number", "12"]]);
  assert.deepEqual(kinds.rust, [["comment", "/* a\nb */"], ["word", "fn"], ["call", "main"], ["type", "Option"], ["text", "'x'"]]);
  assert.deepEqual(kinds.json, [["key", '"a"'], ["word", "true"], ["number", "1.5"]]);
  assert.deepEqual(kinds.sql, [["word", "SELECT"], ["word", "FROM"], ["comment", "-- c"]]);
  assert.equal(kinds.plain, 1);
  await leave(page);
});

test("nothing a model writes becomes code or leads to code", async () => {
  page = await visitChat(open);
  const hostile = [
    "<img src=x onerror=alert(1)> <script>alert(1)</script>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java\nscript:alert(1)) [d](data:text/html,x) [e](//example.org) [f](/v1/models) [g](vbscript:x)",
    "[h](https://example.org/\" onclick=\"alert(1)) <https://example.org/i>",
    "$\\href{javascript:alert(1)}{x}$ $\\text{<b>}$",
    "```\"><script>alert(1)</script>\n</code></pre>\n```",
    "| <svg onload=alert(1)> |\n|---|\n| [x](javascript:1) |",
  ].join("\n\n");
  await answerWith(page, [{ content: hostile }]);
  await ask(page, "Hello", 5);
  await answered(page, 1);
  const answer = page.locator(".message.answer .text");
  assert.equal(await answer.locator("img, script, svg, b, [onclick], [onerror], [href^='javascript' i], iframe").count(), 0);
  const links = await answer.locator("a").evaluateAll((all) => all.map((one) => [one.protocol, one.rel, one.target]));
  assert.deepEqual(links, [["https:", "noopener noreferrer", "_blank"], ["https:", "noopener noreferrer", "_blank"]]);
  assert.match(await answer.textContent(), /<img src=x onerror=alert\(1\)>/);
  await leave(page);
});

/** Paragraphs of a text over and over, each as long as one that is still read for marks. */
const over = (text, count = 4) => Array.from({ length: count }, () => text.repeat(Math.floor(49_000 / text.length))).join("\n\n");
const fenced = (language, text) => over(text).replaceAll("\n\n", "\n```\n```").replace(/^/, `\`\`\`${language}\n`);

/** Texts that make a careless reader slow or deep; each of more than a hundred thousand characters. */
const HUGE = {
  stars: over("*"),
  "open stars": over("*a "),
  "open bold": over("**a "),
  nested: over("*a **b _c __d ~~e "),
  underscores: over("_a"),
  backticks: over("`a ``b ```c "),
  ticks: Array.from({ length: 4 }, () => Array.from({ length: 300 }, (_, length) => "`".repeat(length)).join("a")).join("\n\n"),
  brackets: over("["),
  "open links": over("[a]("),
  "links in links": over("[a](https://example.org/"),
  quotes: `${">".repeat(50_000)}\n`.repeat(3),
  "deep lists": Array.from({ length: 500 }, (_, depth) => `${"  ".repeat(depth)}- x`).join("\n"),
  dollars: over("$a "),
  braces: over(`$${"{".repeat(1900)}$ `),
  fractions: over(`$${"\\frac".repeat(390)}$ `),
  pairs: over(`$${"\\left(".repeat(300)}$ `),
  powers: over(`$${"x^".repeat(900)}$ `),
  pipes: `|a`.repeat(60_000) + `\n${"|-".repeat(60_000)}\n`.repeat(2),
  spaces: `#${" ".repeat(200_000)}x#`,
  yaml: fenced("yaml", "-"),
  css: fenced("css", "a:"),
  comments: fenced("js", "/*"),
  toml: fenced("toml", "["),
  attributes: fenced("rust", "#["),
  addresses: over("https://"),
  dots: over(`https://${"a.".repeat(900)} `),
  lines: "a\n".repeat(150_000),
  "math lines": "$$\n".repeat(60_000),
  fences: "```\n".repeat(50_000),
};

/** The limit is for a page that hangs: linear work takes three seconds in all, a reader that looks back takes hours. */
test("huge and hostile texts are laid out", { timeout: 300_000 }, async () => {
  page = await visitChat(open);
  for (const [name, text] of Object.entries(HUGE)) {
    assert.ok(text.length > 100_000, `${name} is small`);
    const count = await page.evaluate(async (source) => {
      const { render } = await import("/console/markdown.js");
      return render(source).length;
    }, text);
    assert.ok(count > 0, name);
  }
  await leave(page);
});

test("an answer that grows keeps the blocks that do not change", async () => {
  page = await visitChat(open);
  const kept = await page.evaluate(async () => {
    const { Drawing } = await import("/console/markdown.js");
    const drawing = new Drawing();
    const first = drawing.nodes("# One\n\n- a\n- b\n\nText");
    const second = drawing.nodes("# One\n\n- a\n- b\n\nText and more\n\n```js\n1");
    return second.map((node, at) => node === first[at]);
  });
  assert.deepEqual(kept, [true, true, false, false]);
  await leave(page);
});

test("all of it together", async () => {
  page = await visitChat(open, { viewport: { width: 1280, height: 1500 } });
  const text = [
    "## Rivers",
    "Some *italic*, **bold**, `code` and [a link](https://example.org/).",
    "1. First\n   - nested\n2. Second",
    "| River | Length (km) |\n|:--|--:|\n| Danube | 2,850 |\n| Rhine | 1,233 |",
    "> A quote",
    "The roots of $ax^2+bx+c=0$ are $$x = \\frac{-b \\pm \\sqrt{b^2-4ac}}{2a}$$",
    "```python\n# Greets.\ndef greet(name: str) -> None:\n    print(f\"hello {name}\", 42)\n```",
  ].join("\n\n");
  await answerWith(page, [{ content: text }]);
  await ask(page, "Show me everything.", 5);
  await answered(page, 1);
  for (const selector of ["h3", "em", "ol ul", "td.right", "blockquote", "math[display=block]", ".code-call"]) {
    assert.ok((await page.locator(`.message.answer .text ${selector}`).count()) > 0, selector);
  }
  await picture(page, "prose");
  await leave(page);
});
