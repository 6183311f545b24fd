/**
 * Formulas: reads the LaTeX that models write and gives MathML, which every browser lays out by itself. A command
 * that is not known is shown as it is written; a formula that cannot be read at all is shown as its source.
 */

import { element } from "./dom.js";
import { ACCENTS, ALPHABETS, ENVIRONMENTS, FUNCTIONS, LARGE, SPACES, SYMBOLS, letter, math, operator, row } from "./mathml.js";

const MAX_CHARS = 4000;
const MAX_DEPTH = 40;
const TOKEN = /\\(?:[a-zA-Z]+\*?|[^])|\s+|\d+(?:[.,]\d+)*|[^]/gu;
const CLOSERS = new Set(["}", "&", "\\\\", "\\end", "\\right"]);

/** A formula, in the line or set off from it. */
export function formula(source, display) {
  const text = source.trim();
  try {
    if (text.length > MAX_CHARS) {
      throw new Error("too long");
    }
    const content = new Parser(text).whole();
    const shown = math("semantics", {}, content, math("annotation", { encoding: "application/x-tex" }, text));
    return math("math", display ? { display: "block" } : {}, shown);
  } catch {
    return element("code", { class: "formula" }, text);
  }
}

class Parser {
  constructor(text) {
    this.tokens = text.match(TOKEN) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) {
      this.at += 1;
    }
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at += 1;
    return token;
  }

  expect(token) {
    if (this.next() !== token) {
      throw new Error(`${token} is missing`);
    }
  }

  whole() {
    const content = this.peek() && this.table();
    if (this.peek() !== undefined) {
      throw new Error("something is closed that was not opened");
    }
    return content || math("mrow");
  }

  /** Lines and columns outside of any environment, as models write them; usually there is one of each. */
  table() {
    const rows = this.rows();
    return rows.length === 1 && rows[0].length === 1 ? rows[0][0] : grid(rows, "aligned");
  }

  rows() {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(row(this.sequence()));
      const token = this.peek();
      if (token === "&") {
        this.next();
      } else if (token === "\\\\") {
        this.next();
        this.optional();
        rows.push([]);
      } else {
        // A break after the last line begins no other.
        return rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].hasChildNodes() ? rows.slice(0, -1) : rows;
      }
    }
  }

  sequence() {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) {
      throw new Error("too deep");
    }
    const nodes = [];
    for (let token = this.peek(); token !== undefined && !CLOSERS.has(token); token = this.peek()) {
      const node = this.scripted();
      if (node) {
        nodes.push(node);
      }
    }
    this.depth -= 1;
    return nodes;
  }

  /** One thing with what stands above and below it. */
  scripted() {
    const token = this.peek();
    const large = LARGE.has(token);
    const base = token === "^" || token === "_" ? math("mrow") : this.one();
    if (!base) {
      return null;
    }
    let [below, above, limits] = [null, null, large && !/int/.test(token)];
    for (;;) {
      const mark = this.peek();
      if (mark === "_") {
        this.next();
        below = row([...(below ? [below] : []), this.argument()]);
      } else if (mark === "^") {
        this.next();
        above = row([...(above ? [above] : []), this.argument()]);
      } else if (mark === "'" || mark === "’") {
        this.next();
        above = row([...(above ? [above] : []), operator("′")]);
      } else if (mark === "\\limits" || mark === "\\nolimits") {
        this.next();
        limits = mark === "\\limits";
      } else {
        return attach(base, below, above, limits || base.dataset?.limits === "yes");
      }
    }
  }

  /** What a command is applied to: a group, or one thing. */
  argument() {
    if (this.peek() === undefined || CLOSERS.has(this.peek())) {
      throw new Error("an argument is missing");
    }
    const token = this.peek();
    if (/^\d./.test(token)) {
      // Without braces it is one digit: `\frac12` is a half.
      this.tokens[this.at] = token.slice(1);
      return math("mn", {}, token[0]);
    }
    this.depth += 1;
    if (this.depth > MAX_DEPTH) {
      throw new Error("too deep");
    }
    const read = this.one() ?? math("mrow");
    this.depth -= 1;
    return read;
  }

  one() {
    const token = this.next();
    if (token === "{") {
      const content = row(this.sequence());
      this.expect("}");
      return content;
    }
    if (token.startsWith("\\")) {
      return this.command(token.slice(1));
    }
    if (/^\d/.test(token)) {
      return math("mn", {}, token);
    }
    if (/^\p{L}$/u.test(token)) {
      return letter(token);
    }
    return token === "~" ? math("mspace", { width: "0.3em" }) : operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name) {
    if (Object.hasOwn(SPACES, name)) return math("mspace", { width: SPACES[name] });
    if (Object.hasOwn(SYMBOLS, name)) return SYMBOLS[name]();
    if (Object.hasOwn(ALPHABETS, name)) return this.alphabet(ALPHABETS[name]);
    if (Object.hasOwn(ACCENTS, name)) return this.accent(...ACCENTS[name]);
    if (FUNCTIONS.has(name)) return functionName(name);
    const read = COMMANDS[name];
    return read ? read(this) : math("mtext", { class: "unknown" }, `\\${name}`);
  }

  /** `[…]` after a command. */
  optional() {
    if (this.peek() !== "[") {
      return null;
    }
    const end = this.tokens.indexOf("]", this.at);
    if (end < 0) {
      return null;
    }
    const inner = this.within(this.tokens.slice(this.at + 1, end).join(""));
    this.at = end + 1;
    return row(inner.sequence());
  }

  /** A reader of a part of this formula. */
  within(text) {
    return Object.assign(new Parser(text), { depth: this.depth + 1 });
  }

  /** The source of a group, for texts and names. */
  raw() {
    this.expect("{");
    const start = this.at;
    for (let open = 1; open > 0; this.at += 1) {
      const token = this.tokens[this.at];
      if (token === undefined) {
        throw new Error("} is missing");
      }
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
    }
    return this.tokens.slice(start, this.at - 1).join("");
  }

  /** Letters of another alphabet; what is no letter stays. */
  alphabet(write) {
    if (this.peek() !== "{") {
      const token = this.next() ?? "";
      return math("mi", { mathvariant: "normal" }, write(token));
    }
    const text = this.raw();
    return /^[\p{L}\p{N}\s.,-]*$/u.test(text)
      ? math("mi", { mathvariant: "normal" }, [...text.trim()].map(write).join(""))
      : row(this.within(text).sequence());
  }

  accent(mark, stretchy, below) {
    const inner = this.argument();
    return math(below ? "munder" : "mover", { accent: "true" }, inner, operator(mark, { stretchy: String(stretchy) }));
  }

  left() {
    const open = this.delimiter();
    const nodes = this.sequence();
    this.expect("\\right");
    const close = this.delimiter();
    return row([open, ...nodes, close].filter(Boolean));
  }

  delimiter(size = null) {
    const token = this.next();
    if (token === undefined) {
      throw new Error("a parenthesis is missing");
    }
    const known = { ".": null, "<": "⟨", ">": "⟩", "\\{": "{", "\\}": "}", "\\|": "‖" };
    const mark = token in known ? known[token] : token.startsWith("\\") ? SYMBOLS[token.slice(1)]?.().textContent ?? token : token;
    const attributes = size ? { minsize: size, maxsize: size, stretchy: "true" } : { stretchy: "true", fence: "true" };
    return mark === null ? null : operator(mark, attributes);
  }

  environment() {
    const name = this.raw().replace("*", "");
    const kind = Object.hasOwn(ENVIRONMENTS, name) ? ENVIRONMENTS[name] : null;
    if (!kind) {
      throw new Error(`${name} is not known`);
    }
    if (kind.hasColumns) {
      this.raw();
    }
    const rows = this.rows();
    this.expect("\\end");
    if (this.raw().replace("*", "") !== name) {
      throw new Error(`${name} is not closed`);
    }
    const fence = (mark) => (mark ? [operator(mark, { stretchy: "true", fence: "true" })] : []);
    return row([...fence(kind.open), grid(rows, kind.columns), ...fence(kind.close)]);
  }
}

const COMMANDS = {
  frac: (parser) => math("mfrac", {}, parser.argument(), parser.argument()),
  dfrac: (parser) => math("mfrac", { displaystyle: "true" }, parser.argument(), parser.argument()),
  tfrac: (parser) => math("mfrac", { displaystyle: "false" }, parser.argument(), parser.argument()),
  cfrac: (parser) => math("mfrac", { displaystyle: "true" }, parser.argument(), parser.argument()),
  binom: (parser) => {
    const inner = math("mfrac", { linethickness: "0" }, parser.argument(), parser.argument());
    return row([operator("("), inner, operator(")")]);
  },
  sqrt: (parser) => {
    const degree = parser.optional();
    const inner = parser.argument();
    return degree ? math("mroot", {}, inner, degree) : math("msqrt", {}, inner);
  },
  text: (parser) => math("mtext", {}, parser.raw()),
  textbf: (parser) => math("mtext", { class: "bold" }, parser.raw()),
  textit: (parser) => math("mtext", { class: "italic" }, parser.raw()),
  textrm: (parser) => math("mtext", {}, parser.raw()),
  mbox: (parser) => math("mtext", {}, parser.raw()),
  operatorname: (parser) => functionName(parser.raw()),
  boxed: (parser) => math("mrow", { class: "boxed" }, parser.argument()),
  underbrace: (parser) => labelled(parser, "munder", "⏟", "_"),
  overbrace: (parser) => labelled(parser, "mover", "⏞", "^"),
  overset: (parser) => swapped(parser, "mover"),
  underset: (parser) => swapped(parser, "munder"),
  stackrel: (parser) => swapped(parser, "mover"),
  pmod: (parser) => row([operator("("), functionName("mod"), math("mspace", { width: "0.3em" }), parser.argument(), operator(")")]),
  bmod: () => row([math("mspace", { width: "0.2em" }), functionName("mod"), math("mspace", { width: "0.2em" })]),
  not: (parser) => operator(`${parser.one()?.textContent ?? ""}\u0338`),
  left: (parser) => parser.left(),
  middle: (parser) => parser.delimiter(),
  begin: (parser) => parser.environment(),
  displaystyle: () => null,
  textstyle: () => null,
  nonumber: () => null,
  notag: () => null,
  tag: (parser) => math("mtext", {}, `  (${parser.raw()})`),
  label: (parser) => (parser.raw(), null),
  color: (parser) => (parser.raw(), null),
  phantom: (parser) => math("mphantom", {}, parser.argument()),
};
for (const [name, size] of [["big", "1.2em"], ["Big", "1.6em"], ["bigg", "2.1em"], ["Bigg", "2.6em"]]) {
  for (const side of ["", "l", "r", "m"]) {
    COMMANDS[name + side] = (parser) => parser.delimiter(size);
  }
}
Object.setPrototypeOf(COMMANDS, null);

function functionName(name) {
  const made = math("mi", {}, name);
  if (/^(lim|max|min|sup|inf|argmax|argmin|limsup|liminf)$/.test(name)) {
    made.dataset.limits = "yes";
  }
  return made;
}

function labelled(parser, name, brace, mark) {
  const base = math(name, {}, parser.argument(), operator(brace, { stretchy: "true" }));
  if (parser.peek() !== mark) {
    return base;
  }
  parser.next();
  return math(name, {}, base, parser.argument());
}

function swapped(parser, name) {
  const mark = parser.argument();
  return math(name, {}, parser.argument(), mark);
}

function attach(base, below, above, limits) {
  const names = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  if (below && above) return math(names[2], {}, base, below, above);
  if (below) return math(names[0], {}, base, below);
  return above ? math(names[1], {}, base, above) : base;
}

/** Columns are aligned right and left by turns, to the left, or in the middle. */
function grid(rows, columns) {
  const cell = (content, at) => math("mtd", { class: columns === "aligned" ? (at % 2 ? "left" : "right") : columns }, content);
  const lines = rows.map((cells) => math("mtr", {}, ...cells.map(cell)));
  return math("mtable", columns === "aligned" ? { displaystyle: "true" } : {}, ...lines);
}
