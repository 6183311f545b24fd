/**
 * Colours for code: comments, texts, numbers, words of the language, names of functions and types. One reader for all
 * languages, told what each has; it never looks back, so that its time is that of the length.
 */

import { element } from "./dom.js";

/** Longer code stays plain. */
const MAX_CHARS = 60_000;

const words = (text) => new Set(text.split(" "));

const C_WORDS =
  "break case catch class const continue default delete do else enum export extends extern false final finally for goto if implements import in instanceof int interface let long new null nullptr package private protected public return short signed sizeof static struct super switch template this throw true try typedef typename union unsigned using var virtual void volatile while yield async await function of typeof undefined namespace bool char double float auto constexpr inline operator override boolean byte abstract readonly type as from string number any never unknown declare foreach is out ref base get set internal sealed record when where val fun object companion data suspend lateinit guard defer func protocol extension self init";
const LINE = { slash: "\\/\\/.*", hash: "#.*", dash: "--.*" };
/** The end of the code, where `$` is that of a line. */
const END = "(?![^])";
const BLOCK = `\\/\\*[^]*?(?:\\*\\/|${END})`;
const TEXTS = `"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?`;
const PYTHON_TEXTS = `[rRbBfFuU]{0,2}(?:"""[^]*?(?:"""|${END})|'''[^]*?(?:'''|${END})|${TEXTS})`;
const BACKTICKS = "`(?:[^`\\\\]|\\\\.)*`?";

const C_LIKE = { comment: `${LINE.slash}|${BLOCK}`, text: `${TEXTS}|${BACKTICKS}`, words: words(C_WORDS) };
const LANGUAGES = {
  c: C_LIKE,
  rust: {
    comment: `${LINE.slash}|${BLOCK}`,
    text: `b?"(?:[^"\\\\]|\\\\.)*"?|b?'(?:[^'\\\\\\n]|\\\\[^'\\n]*)'`,
    words: words("as async await box break const continue crate dyn else enum extern false fn for if impl in let loop macro match mod move mut pub ref return self Self static struct super trait true type union unsafe use where while"),
    other: "#!?\\[[^\\]\\n]{0,200}\\]",
  },
  go: {
    comment: `${LINE.slash}|${BLOCK}`,
    text: `${TEXTS}|\`[^\`]*\`?`,
    words: words("break case chan const continue default defer else fallthrough false for func go goto if import interface iota map nil package range return select struct switch true type var any bool byte error float32 float64 int int32 int64 rune string uint8 uint32 uint64"),
  },
  python: {
    comment: LINE.hash,
    text: PYTHON_TEXTS,
    words: words("and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield"),
    other: "@[\\w.]+",
  },
  ruby: {
    comment: LINE.hash,
    text: TEXTS,
    words: words("alias and begin break case class def defined? do else elsif end ensure false for if in module next nil not or redo rescue retry return self super then true undef unless until when while yield puts require attr_accessor"),
    other: ":[a-z_]\\w*|@\\w+",
  },
  shell: {
    comment: "(?<=^|\\s)#.*",
    text: `"(?:[^"\\\\]|\\\\.)*"?|'[^']*'?`,
    words: words("if then else elif fi for while until do done case esac function in return exit export local readonly set unset source alias echo cd sudo true false"),
    other: "\\$\\{[^}\\n]*\\}|\\$\\w+|(?<=\\s)--?[a-zA-Z][\\w-]*",
  },
  sql: {
    comment: `${LINE.dash}|${BLOCK}`,
    text: "'(?:[^']|'')*'?",
    words: words("select from where insert into values update set delete create table drop alter add column primary key foreign references join left right inner outer full on as and or not null is in like between group by order having limit offset union all distinct case when then else end exists index view with returning default unique check count sum avg min max int integer text varchar boolean date timestamp true false asc desc"),
    ignoresCase: true,
  },
  json: { text: `"(?:[^"\\\\\\n]|\\\\.)*"?`, words: words("true false null"), key: `"(?:[^"\\\\\\n]|\\\\.)*"(?=\\s*:)` },
  yaml: { comment: "(?<=^|\\s)#.*", text: TEXTS, words: words("true false null yes no"), key: "^[ \\t-]{0,40}[\\w.\\/-]{1,80}(?=:(?:\\s|$))" },
  toml: { comment: LINE.hash, text: PYTHON_TEXTS, words: words("true false"), key: "^[ \\t]{0,40}[\\w.-]{1,80}(?=[ \\t]*=)|^[ \\t]{0,40}\\[{1,2}[^\\]\\n]{0,200}\\]{1,2}" },
  css: { comment: BLOCK, text: TEXTS, words: words("important inherit initial none auto"), key: "[\\w-]{1,60}(?=\\s?:[^{}\\n]{0,200}[;}])", other: "[.#@][\\w-]+" },
  html: { comment: `<!--[^]*?(?:-->|${END})`, text: `"[^"<]*"|'[^'<]*'`, words: words(""), key: "<\\/?[\\w:-]{1,60}|\\/?>", other: "[\\w:-]{1,60}(?==)" },
  diff: { words: words(""), inserted: "^\\+.*", deleted: "^-.*", comment: "^@@.*" },
};

const NAMES = {
  c: "cpp c++ cc h hpp java javascript js jsx ts tsx typescript cs csharp c# kotlin kt swift php scala dart objc mjs cuda glsl zig",
  rust: "rs", go: "golang", python: "py python3 starlark", ruby: "rb", shell: "sh bash zsh fish console shell-session dockerfile makefile",
  sql: "postgresql mysql sqlite", json: "json5 jsonc jsonl", yaml: "yml", toml: "ini cfg", css: "scss less", html: "xml svg vue xhtml", diff: "patch",
};
const BY_NAME = new Map(Object.entries(NAMES).flatMap(([name, others]) => [name, ...others.split(" ")].map((one) => [one, LANGUAGES[name]])));

const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)\\w*";
const CALL = "[A-Za-z_]\\w*(?=!?\\()";
const NAME = "[A-Za-z_$][\\w$]*\\??";

/** The expression of a language, made when it is first wanted. */
function expression(language) {
  if (!language.pattern) {
    const kinds = ["comment", "key", "text", "other", "inserted", "deleted"].filter((kind) => language[kind]);
    const parts = kinds.map((kind) => `(?<${kind}>${language[kind]})`);
    language.pattern = new RegExp([...parts, `(?<number>${NUMBER})`, `(?<call>${CALL})`, `(?<name>${NAME})`].join("|"), "gm");
  }
  language.pattern.lastIndex = 0;
  return language.pattern;
}

/** The nodes of some code. */
export function highlight(code, name) {
  const language = BY_NAME.get((name ?? "").toLowerCase());
  if (!language || code.length > MAX_CHARS) {
    return [code];
  }
  const nodes = [];
  let plain = 0;
  for (const found of code.matchAll(expression(language))) {
    const kind = kindOf(found, language);
    if (kind && found[0]) {
      nodes.push(code.slice(plain, found.index), element("span", { class: `code-${kind}` }, found[0]));
      plain = found.index + found[0].length;
    }
  }
  nodes.push(code.slice(plain));
  return nodes.filter((node) => node !== "");
}

function kindOf({ groups, 0: text }, language) {
  const kind = Object.keys(groups).find((name) => groups[name] !== undefined);
  if (kind !== "name" && kind !== "call") {
    return kind;
  }
  if (language.words.has(language.ignoresCase ? text.toLowerCase() : text)) {
    return "word";
  }
  if (kind === "call") {
    return "call";
  }
  return /^[A-Z]\w*[a-z]/.test(text) && !language.key ? "type" : null;
}
