/** Text files for a message: dropped, pasted or chosen. They are read in the browser and sent as text. */

import { button, byId, element, icon, toast } from "./dom.js";
import { bytes } from "./format.js";

const MAX_BYTES = 2 << 20;
const MAX_FILES = 10;
/** A pasted text of more characters becomes a file, so that it can be seen past. */
const LONG_PASTE = 6000;

let files = [];
let changed = () => {};

export function start(onChange) {
  changed = onChange;
  byId("attach").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async () => {
    await addAll([...byId("file").files]);
    byId("file").value = "";
    byId("prompt").focus();
  });
  byId("prompt").addEventListener("paste", paste);
  const place = byId("view-chat");
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  place.addEventListener("dragover", (event) => {
    if (hasFiles(event)) {
      event.preventDefault();
      place.dataset.dropping = "";
    }
  });
  place.addEventListener("dragleave", (event) => {
    if (!place.contains(event.relatedTarget)) {
      delete place.dataset.dropping;
    }
  });
  place.addEventListener("drop", (event) => {
    delete place.dataset.dropping;
    if (hasFiles(event)) {
      event.preventDefault();
      addAll([...event.dataTransfer.files]);
    }
  });
}

function paste(event) {
  const pasted = [...(event.clipboardData?.files ?? [])];
  const text = event.clipboardData?.getData("text/plain") ?? "";
  if (pasted.length > 0) {
    event.preventDefault();
    addAll(pasted);
  } else if (text.length > LONG_PASTE) {
    event.preventDefault();
    add("pasted.txt", text);
    draw();
  }
}

async function addAll(chosen) {
  for (const file of chosen) {
    try {
      add(file.name, await readText(file));
    } catch (error) {
      toast(error.message);
    }
  }
  draw();
}

function add(name, text) {
  if (files.length >= MAX_FILES) {
    throw new Error(`A message takes at most ${MAX_FILES} files.`);
  }
  files.push({ name, text });
}

/** The text of a file; throws with words for people where it is none. */
async function readText(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`${file.name} is too large: a file may have ${bytes(MAX_BYTES).join(" ")}.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file.`);
  }
  if (text.includes("\0")) {
    throw new Error(`${file.name} is not a text file.`);
  }
  return text.replace(/\r\n?/g, "\n");
}

/** The files of the next message, which are taken away. */
export function take() {
  const taken = files;
  files = [];
  draw();
  return taken;
}

export const count = () => files.length;

function draw() {
  const chips = files.map((file) => {
    const remove = () => {
      files = files.filter((one) => one !== file);
      draw();
      byId("prompt").focus();
    };
    const size = element("small", {}, bytes(new Blob([file.text]).size).join(" "));
    const cross = button("", remove, { "aria-label": `Remove ${file.name}` });
    cross.append(icon("close"));
    return element("li", {}, element("span", {}, file.name), size, cross);
  });
  byId("attached").replaceChildren(...chips);
  byId("attached").hidden = chips.length === 0;
  changed();
}
