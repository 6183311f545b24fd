/**
 * The Markdown that models write, as DOM nodes: headings, lists, code, quotes, tables, rules, formulas and what
 * inline.js knows. No HTML at all: tags in the text are shown as they are written.
 *
 * A text is cut into blocks of whole lines first. Each block depends on its own lines only, which is what lets an
 * answer that is still growing be drawn again without drawing again what has not changed. All work is linear in the
 * length of the text, and nesting has a limit: the text may come from a model that somebody else has talked into
 * something.
 */

import { copyButton, element } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline, INLINE_LIMIT } from "./inline.js";
import { formula } from "./latex.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MATH_OPEN = /^\s*(\$\$|\\\[)/;
const MAX_DEPTH = 12;
/** Longer texts are shown as they are written. */
const MAX_CHARS = 400_000;
const MAX_LINE_CHARS = INLINE_LIMIT;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** The nodes of a text. */
export function render(text, depth = 0) {
  return new Drawing(depth).nodes(text);
}

/** A text that grows: blocks that stay as they were keep their nodes. */
export class Drawing {
  constructor(depth = 0) {
    this.depth = depth;
    this.blocks = [];
  }

  nodes(text) {
    if (text.length > MAX_CHARS || this.depth > MAX_DEPTH) {
      return [element("div", { class: "plain" }, text)];
    }
    const lines = text.split("\n");
    const blocks = [...cut(lines)].map(([kind, start, end], index) => {
      const source = lines.slice(start, end);
      const before = this.blocks[index];
      if (before?.kind === kind && before.source.length === source.length && before.source.every((line, at) => line === source[at])) {
        return before;
      }
      return { kind, source, node: kind.make(source, this.depth) };
    });
    this.blocks = blocks;
    return blocks.map((block) => block.node);
  }
}

/** The blocks of some lines: kind, first line, line after the last. */
function* cut(lines) {
  let at = 0;
  while (at < lines.length) {
    const kind = KINDS.find((one) => one.begins(lines, at));
    if (!kind) {
      at += 1;
      continue;
    }
    const end = kind.end(lines, at);
    yield [kind, at, end];
    at = end;
  }
}

/** The line after the fence that begins here. */
function fenceEnd(lines, at) {
  const fence = lines[at].match(FENCE)[1];
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) {
    end += 1;
  }
  return Math.min(end + 1, lines.length);
}

function closes(line, fence) {
  const trimmed = line.trim();
  return trimmed.startsWith(fence) && trimmed.replaceAll(fence[0], "") === "";
}

const code = {
  begins: (lines, at) => FENCE.test(lines[at]),
  end: fenceEnd,
  make(source) {
    const [, fence, language] = source[0].match(FENCE);
    const closed = source.length > 1 && closes(source.at(-1), fence);
    const indent = indentOf(source[0]);
    const content = source
      .slice(1, closed ? -1 : undefined)
      .map((line) => line.slice(Math.min(indent, indentOf(line))))
      .join("\n");
    const head = element("header", {}, element("span", {}, language || "text"), copyButton(() => content));
    const block = element("pre", { tabindex: 0, "aria-label": `Code, ${language || "text"}` }, element("code", {}, ...highlight(content, language)));
    return element("div", { class: "code" }, head, block);
  },
};

const math = {
  begins: (lines, at) => MATH_OPEN.test(lines[at]) && math.last(lines, at) >= 0,
  /** The line that closes it; -1 where none does, because it has not come yet or is no formula. */
  last(lines, at) {
    const close = lines[at].match(MATH_OPEN)[1] === "$$" ? "$$" : "\\]";
    for (let end = at; end < Math.min(lines.length, at + 100); end += 1) {
      const from = end === at ? lines[at].indexOf(close === "$$" ? "$$" : "\\[") + 2 : 0;
      const found = lines[end].indexOf(close, from);
      if (found >= 0) {
        return isBlank(lines[end].slice(found + 2).replace(/[.,;]/g, "")) ? end : -1;
      }
      if (isBlank(lines[end]) && end > at) {
        return -1;
      }
    }
    return -1;
  },
  end: (lines, at) => math.last(lines, at) + 1,
  make: (source) => {
    const text = source.join("\n").trim();
    const end = Math.max(text.lastIndexOf("$$"), text.lastIndexOf("\\]"));
    return element("div", { class: "scroller" }, formula(text.slice(2, end), true));
  },
};

const heading = {
  begins: (lines, at) => HEADING.test(lines[at]),
  end: (_, at) => at + 1,
  make([line]) {
    const [, marks, content = ""] = line.match(HEADING);
    // The page has its own first level.
    const level = Math.min(marks.length + 1, 5);
    return element(`h${level}`, {}, ...inline(content.length < 400 ? content.replace(/\s+#+\s*$/, "") : content));
  },
};

const rule = {
  begins: (lines, at) => lines[at].length < 200 && RULE.test(lines[at]),
  end: (_, at) => at + 1,
  make: () => element("hr"),
};

const quote = {
  begins: (lines, at) => QUOTE.test(lines[at]),
  end(lines, at) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) {
      end += 1;
    }
    return end;
  },
  make(source, depth) {
    const content = source.map((line) => line.replace(/^ {0,3}> ?/, ""));
    return element("blockquote", {}, ...render(content.join("\n"), depth + 1));
  },
};

const isOrdered = (marker) => marker.length > 1;

const list = {
  begins: (lines, at) => ITEM.test(lines[at]),
  end(lines, at) {
    const [, space, marker] = lines[at].match(ITEM);
    let end = at + 1;
    while (end < lines.length) {
      const line = lines[end];
      if (isBlank(line)) {
        const next = lines[end + 1] ?? "";
        if (isBlank(next) || !list.continues(next, space.length, marker)) {
          break;
        }
        end += 1;
      } else if (FENCE.test(line) && indentOf(line) > space.length) {
        end = fenceEnd(lines, end);
      } else if (list.continues(line, space.length, marker) || (!isBlank(lines[end - 1]) && list.isText(lines, end))) {
        end += 1;
      } else {
        break;
      }
    }
    return end;
  },
  /** Whether a line is a further item or lies within one. */
  continues(line, indent, marker) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent + 1) {
      return item[1].length >= indent - 1 && isOrdered(item[2]) === isOrdered(marker);
    }
    return indentOf(line) > indent;
  },
  isText: (lines, at) => ![code, heading, rule, quote, list].some((kind) => kind.begins(lines, at)),
  make(source, depth) {
    const [, space, marker] = source[0].match(ITEM);
    const ordered = isOrdered(marker);
    const made = element(ordered ? "ol" : "ul", ordered ? { start: Number.parseInt(marker, 10) } : {});
    for (const lines of list.items(source, space.length)) {
      made.append(list.item(lines, depth));
    }
    return made;
  },
  /** The lines of each item, without its marker and its indent. */
  items(source, indent) {
    const items = [];
    let offset = 0;
    for (let at = 0; at < source.length; at += 1) {
      const line = source[at];
      const item = line.match(ITEM);
      if (item && item[1].length <= indent + 1) {
        offset = item[1].length + item[2].length + 1;
        items.push([item[3] ?? ""]);
        continue;
      }
      const end = FENCE.test(line) ? fenceEnd(source, at) : at + 1;
      for (; at < end; at += 1) {
        items.at(-1).push(source[at].slice(Math.min(offset, indentOf(source[at]))));
      }
      at -= 1;
    }
    return items;
  },
  item(lines, depth) {
    const task = lines[0].match(/^\[([ xX])\]\s+(.*)$/);
    const content = task ? [task[2], ...lines.slice(1)] : lines;
    const nodes = render(content.join("\n").trimEnd(), depth + 1);
    // An item of one paragraph is a line, not a paragraph.
    const flat = nodes[0]?.localName === "p" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
    const box = task ? [element("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }), " "] : [];
    return element("li", task ? { class: "task" } : {}, ...box, ...flat);
  },
};

const table = {
  begins(lines, at) {
    const second = lines[at + 1] ?? "";
    return lines[at].includes("|") && second.includes("-") && second.length < 2000 && TABLE_LINE.test(second);
  },
  end(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) {
      end += 1;
    }
    return end;
  },
  make([head, line, ...rows]) {
    const alignment = cells(line).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "right") : null));
    const row = (text, name) =>
      element("tr", {}, ...cells(text).slice(0, alignment.length).map((cell, at) => element(name, { class: alignment[at] }, ...inline(cell))));
    const body = element("tbody", {}, ...rows.map((text) => row(text, "td")));
    return element("div", { class: "scroller", tabindex: 0 }, element("table", {}, element("thead", {}, row(head, "th")), body));
  },
};

/** The cells of a row; a bar after a backslash or in code is none. */
function cells(line) {
  const found = [""];
  let inCode = false;
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|" && !inCode) {
      found.push("");
    } else {
      inCode = text[at] === "`" ? !inCode : inCode;
      found[found.length - 1] += text[at];
    }
  }
  return found.map((cell) => cell.trim());
}

const paragraph = {
  begins: (lines, at) => !isBlank(lines[at]),
  end(lines, at) {
    let end = at + 1;
    const others = [code, math, heading, rule, list, quote, table];
    while (end < lines.length && !isBlank(lines[end]) && !others.some((kind) => kind.begins(lines, end))) {
      end += 1;
    }
    return end;
  },
  make(source) {
    const text = source.map((line) => line.trim()).join("\n");
    return element("p", {}, ...(text.length > MAX_LINE_CHARS ? [text] : inline(text)));
  },
};

const KINDS = [code, math, heading, rule, list, quote, table, paragraph];
