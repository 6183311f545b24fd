/**
 * The part of Markdown that models write, as DOM nodes: headings, lists, code, quotes, tables, rules, bold, italic,
 * links. Not a whole Markdown, and no HTML at all: tags in the text are shown as they are written.
 */

import { copyButton, element } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** The nodes of a text. */
export function render(text) {
  const lines = text.split("\n");
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const block = [code, heading, rule, list, quote, table, paragraph].find((kind) => kind.begins(lines, at));
    if (!block) {
      at += 1;
      continue;
    }
    const [node, next] = block.read(lines, at);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

const code = {
  begins: (lines, at) => FENCE.test(lines[at]),
  read(lines, at) {
    const [, fence, language] = lines[at].match(FENCE);
    let end = at + 1;
    while (end < lines.length && !lines[end].trim().startsWith(fence)) {
      end += 1;
    }
    const content = lines.slice(at + 1, end).join("\n");
    const head = element("header", {}, element("span", {}, language || "text"), copyButton(() => content));
    const block = element("pre", { tabindex: 0 }, element("code", {}, content));
    return [element("div", { class: "code" }, head, block), end + 1];
  },
};

const heading = {
  begins: (lines, at) => HEADING.test(lines[at]),
  read(lines, at) {
    const [, marks, content] = lines[at].match(HEADING);
    // The page has its own first level.
    const level = Math.min(marks.length + 1, 4);
    return [element(`h${level}`, {}, ...inline(content)), at + 1];
  },
};

const rule = {
  begins: (lines, at) => RULE.test(lines[at]),
  read: (_, at) => [element("hr"), at + 1],
};

const list = {
  begins: (lines, at) => ITEM.test(lines[at]),
  read(lines, at) {
    const indent = lines[at].match(ITEM)[1].length;
    const first = lines[at].match(ITEM)[2];
    const ordered = /\d/.test(first);
    const start = ordered ? { start: Number.parseInt(first, 10) } : {};
    const made = element(ordered ? "ol" : "ul", start);
    let next = at;
    while (next < lines.length) {
      const item = lines[next].match(ITEM);
      if (item && item[1].length > indent + 1 && made.lastChild) {
        const [inner, after] = list.read(lines, next);
        made.lastChild.append(inner);
        next = after;
      } else if (item && item[1].length >= indent && /\d/.test(item[2]) === ordered) {
        made.append(element("li", {}, ...inline(item[3])));
        next += 1;
      } else if (!item && lines[next].trim() && /^\s/.test(lines[next]) && made.lastChild) {
        made.lastChild.append(element("br"), ...inline(lines[next].trim()));
        next += 1;
      } else if (!lines[next].trim() && ITEM.test(lines[next + 1] ?? "")) {
        next += 1;
      } else {
        break;
      }
    }
    return [made, next];
  },
};

const quote = {
  begins: (lines, at) => lines[at].startsWith(">"),
  read(lines, at) {
    let end = at;
    while (end < lines.length && lines[end].startsWith(">")) {
      end += 1;
    }
    const content = lines.slice(at, end).map((line) => line.replace(/^>\s?/, ""));
    return [element("blockquote", {}, ...render(content.join("\n"))), end];
  },
};

const table = {
  begins: (lines, at) => lines[at].includes("|") && TABLE_LINE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-"),
  read(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) {
      end += 1;
    }
    const row = (line, cell) => {
      const cells = line.trim().replace(/^\||\|$/g, "").split("|");
      return element("tr", {}, ...cells.map((content) => element(cell, {}, ...inline(content.trim()))));
    };
    const head = element("thead", {}, row(lines[at], "th"));
    const body = element("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")));
    return [element("div", { class: "scroller" }, element("table", {}, head, body)), end];
  },
};

const paragraph = {
  begins: (lines, at) => lines[at].trim() !== "",
  read(lines, at) {
    let end = at + 1;
    const ends = [code, heading, rule, list, quote];
    while (end < lines.length && lines[end].trim() && !ends.some((kind) => kind.begins(lines, end))) {
      end += 1;
    }
    const parts = lines.slice(at, end).flatMap((line, index) => {
      return index === 0 ? inline(line) : [element("br"), ...inline(line)];
    });
    return [element("p", {}, ...parts), end];
  },
};

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\(([^)\s]+)\)/;

/** The nodes of a line. */
function inline(text) {
  const nodes = [];
  let rest = text;
  for (let found = rest.match(INLINE); found; found = rest.match(INLINE)) {
    const [whole, ticks, codeText, bold, alsoBold, italic, label, address] = found;
    nodes.push(rest.slice(0, found.index));
    if (ticks) {
      nodes.push(element("code", {}, codeText.trim() || codeText));
    } else if (bold ?? alsoBold) {
      nodes.push(element("strong", {}, ...inline(bold ?? alsoBold)));
    } else if (italic) {
      nodes.push(element("em", {}, ...inline(italic)));
    } else {
      nodes.push(link(label, address) ?? whole);
    }
    rest = rest.slice(found.index + whole.length);
  }
  nodes.push(rest);
  return nodes.filter((node) => node !== "");
}

/** Only addresses of the web become links. */
function link(label, address) {
  if (!/^https?:\/\//i.test(address)) {
    return null;
  }
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label);
}
