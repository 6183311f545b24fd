/**
 * What stands within a line: code, bold, italic, struck text, links, formulas. Read from left to right; a mark whose
 * end was once looked for in vain is not looked for again, so that a line of a thousand stars costs no more than one
 * of a thousand letters.
 */

import { element } from "./dom.js";
import { formula } from "./latex.js";

/** Longer lines are shown as they are written. */
export const INLINE_LIMIT = 50_000;
const MAX_DEPTH = 8;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/iy;
const SPECIAL = /[\\`*_~$[<!\nh]/g;

/** The nodes of a line, or of the lines of a paragraph. */
export function inline(text, depth = 0) {
  if (text.length > INLINE_LIMIT || depth > MAX_DEPTH) {
    return [text];
  }
  return new Reader(text, depth).read();
}

class Reader {
  constructor(text, depth) {
    Object.assign(this, { text, depth, at: 0, plain: "", nodes: [], missing: new Set() });
  }

  read() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(text)?.index ?? text.length;
      this.plain += text.slice(this.at, next);
      this.at = next;
      if (next < text.length && !this.mark()) {
        this.plain += text[this.at];
        this.at += 1;
      }
    }
    this.flush();
    return this.nodes;
  }

  flush() {
    if (this.plain) {
      this.nodes.push(this.plain);
      this.plain = "";
    }
  }

  /** Puts a node here and goes on after `end`. */
  put(node, end) {
    this.flush();
    this.nodes.push(node);
    this.at = end;
    return true;
  }

  inner(start, end) {
    return inline(this.text.slice(start, end), this.depth + 1);
  }

  /** Where `mark` stands at or after `from`; -1 where it does not, which is remembered. */
  find(mark, from) {
    if (this.missing.has(mark)) {
      return -1;
    }
    const found = this.text.indexOf(mark, from);
    if (found < 0) {
      this.missing.add(mark);
    }
    return found;
  }

  mark() {
    const character = this.text[this.at];
    switch (character) {
      case "\\": return this.backslash();
      case "`": return this.code();
      case "*": return this.emphasis("**", "strong") || this.emphasis("*", "em");
      case "_": return this.emphasis("__", "strong") || this.emphasis("_", "em");
      case "~": return this.emphasis("~~", "del");
      case "$": return this.dollars();
      case "[": return this.link(this.at);
      case "!": return this.text[this.at + 1] === "[" && this.link(this.at + 1);
      case "\n": return this.put(element("br"), this.at + 1);
      default: return this.bareLink();
    }
  }

  backslash() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", this.at + 2);
      if (end > 0) {
        return this.put(formula(this.text.slice(this.at + 2, end), next === "["), end + 2);
      }
    }
    if (!ESCAPABLE.test(next)) {
      return false;
    }
    this.plain += next;
    this.at += 2;
    return true;
  }

  code() {
    let ticks = 1;
    while (this.text[this.at + ticks] === "`") {
      ticks += 1;
    }
    const start = this.at + ticks;
    const mark = "`".repeat(ticks);
    let end = this.find(mark, start);
    // A longer run does not close a shorter one.
    while (end > 0 && (this.text[end + ticks] === "`" || this.text[end - 1] === "`")) {
      let after = end + ticks;
      while (this.text[after] === "`") {
        after += 1;
      }
      end = this.find(mark, after);
    }
    if (end < 0) {
      this.plain += mark;
      this.at = start;
      return true;
    }
    const content = this.text.slice(start, end).replace(/\n/g, " ");
    return this.put(element("code", {}, content.trim() || content), end + ticks);
  }

  emphasis(mark, name) {
    const { text, at } = this;
    const start = at + mark.length;
    const opens = text.startsWith(mark, at) && /\S/.test(text[start] ?? " ") && !this.missing.has(`end of ${mark}`);
    const inWord = mark[0] === "_" && WORD.test(text[at - 1] ?? "");
    if (!opens || inWord || (mark.length === 1 && text[start] === mark)) {
      return false;
    }
    const end = this.closer(mark, start + 1);
    if (end < 0) {
      this.missing.add(`end of ${mark}`);
      return false;
    }
    return this.put(element(name, {}, ...this.inner(start, end)), end + mark.length);
  }

  /** Where a mark that can end something stands. */
  closer(mark, from) {
    const { text } = this;
    for (let end = this.find(mark, from); end >= 0; end = this.find(mark, end + 1)) {
      if (mark.length === 1 && text[end + 1] === mark) {
        // Two of them open or close something else.
        end += 1;
        continue;
      }
      const touches = /\S/.test(text[end - 1]) && text[end - 1] !== "\\";
      const inWord = mark[0] === "_" && WORD.test(text[end + mark.length] ?? "");
      if (touches && !inWord) {
        // Of three stars the last two end what is bold.
        return mark.length === 2 && text[end + 2] === mark[0] && text[end + 3] !== mark[0] ? end + 1 : end;
      }
    }
    return -1;
  }

  dollars() {
    const { text, at } = this;
    const display = text.startsWith("$$", at);
    const mark = display ? "$$" : "$";
    const start = at + mark.length;
    // `$5 and $6` is money.
    if (!/\S/.test(text[start] ?? " ")) {
      return false;
    }
    const end = this.find(mark, start + 1);
    if (end < 0) {
      return false;
    }
    const content = text.slice(start, end);
    const money = !display && (/\s$/.test(content) || /\d/.test(text[end + 1] ?? "") || content.includes("\n"));
    return money || content.length > 2000 ? false : this.put(formula(content, display), end + mark.length);
  }

  /** `[label](address)`; a picture is a link to it, because nothing is loaded from elsewhere. */
  link(open) {
    const middle = this.find("](", open + 1);
    const end = middle < 0 ? -1 : this.find(")", middle + 2);
    if (end < 0 || end - open > 4000 || this.text.slice(open, middle).includes("\n\n")) {
      return false;
    }
    const close = this.parenthesis(middle + 2, end);
    const address = this.text.slice(middle + 2, close).trim().split(/\s+/)[0];
    const label = this.text.slice(open + 1, middle);
    const inner = label.lastIndexOf("[");
    if (inner >= 0 && !label.includes("]", inner)) {
      return false;
    }
    const made = link(label ? this.inner(open + 1, middle) : [address], address);
    return made ? this.put(made, close + 1) : false;
  }

  /** Addresses may hold parentheses of their own. */
  parenthesis(start, first) {
    let close = first;
    for (let turns = 0; turns < 4; turns += 1) {
      const part = this.text.slice(start, close);
      const next = this.text.indexOf(")", close + 1);
      if (part.split("(").length <= part.split(")").length || next < 0 || /\s/.test(this.text.slice(close, next))) {
        break;
      }
      close = next;
    }
    return close;
  }

  bareLink() {
    const { text, at } = this;
    const start = text[at] === "<" ? at + 1 : at;
    ADDRESS.lastIndex = start;
    const found = WORD.test(text[start - 1] ?? "") ? null : ADDRESS.exec(text)?.[0];
    if (!found) {
      return false;
    }
    const bracketed = start > at && text[start + found.length] === ">";
    const address = bracketed ? found : found.replace(/[.,;:!?*_~)\]]+$/, "");
    const made = link([address], address);
    return made ? this.put(made, start + address.length + (bracketed ? 1 : 0)) : false;
  }
}

/** Only addresses of the web and of people become links. */
function link(label, address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) {
    return null;
  }
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...label);
}
