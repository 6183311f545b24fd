/** Asks a person for the API key, in the dialog that the console and `/docs` have. */

import { onKeyNeeded } from "./api.js";
import { byId } from "./dom.js";

/** Asks until something is entered; the server says whether it is right. */
function askForKey(wasWrong) {
  const dialog = byId("key-dialog");
  byId("key-wrong").hidden = !wasWrong;
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const refuse = (event) => event.preventDefault();
    dialog.addEventListener("cancel", refuse);
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        dialog.removeEventListener("cancel", refuse);
        dialog.close();
        byId("prompt")?.focus();
        resolve(byId("key").value.trim());
      },
      { once: true },
    );
  });
}

onKeyNeeded(askForKey);
