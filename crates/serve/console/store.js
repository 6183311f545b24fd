/**
 * Conversations, kept in this browser and nowhere else: in IndexedDB, or for as long as the page is open where the
 * browser allows no more. Pages of the same server tell each other of changes.
 */

import { mend } from "./tree.js";

const NAME = "baton";
const STORE = "conversations";

const conversations = new Map();
const listeners = [];
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("baton.conversations") : null;
let database = null;

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Opens the store and reads all of it. Returns whether conversations will be kept. */
export async function open() {
  try {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    database = await finished(opening);
    database.onversionchange = () => database.close();
    for (const conversation of await finished(objects("readonly").getAll())) {
      conversations.set(conversation.id, mend(conversation));
    }
  } catch {
    database = null;
  }
  channel?.addEventListener("message", ({ data }) => readAgain(data.id));
  return database !== null;
}

function objects(mode) {
  return database.transaction(STORE, mode).objectStore(STORE);
}

/** `listener(id, fromElsewhere)` hears of every change. */
export function onChange(listener) {
  listeners.push(listener);
}

function tell(id, fromElsewhere = false) {
  for (const listener of listeners) {
    listener(id, fromElsewhere);
  }
}

/** Another page has written. */
async function readAgain(id) {
  const read = database ? await finished(objects("readonly").get(id)) : null;
  if (read) {
    conversations.set(id, read);
  } else {
    conversations.delete(id);
  }
  tell(id, true);
}

/** The newest first. */
export function all() {
  return [...conversations.values()].sort((a, b) => b.updated - a.updated);
}

export const get = (id) => conversations.get(id) ?? null;

/** Writes a conversation. What cannot be written (a full disk) stays in the page. */
export async function save(conversation) {
  conversations.set(conversation.id, conversation);
  tell(conversation.id);
  await write((store) => store.put(conversation), conversation.id);
}

export async function remove(id) {
  conversations.delete(id);
  tell(id);
  await write((store) => store.delete(id), id);
}

async function write(change, id) {
  if (!database) {
    return;
  }
  try {
    await finished(change(objects("readwrite")));
    channel?.postMessage({ id });
  } catch (error) {
    console.warn(`conversation ${id} could not be kept: ${error}`);
  }
}
