// Ids and commands: long ones are shortened in the middle, and a button copies the whole.

import { find, make } from "./dom.js";

const DONE_MS = 1500;
const MAX_ID = 16; // characters of an id, wherever it stands; its title has the rest

export function shortened(id, most = MAX_ID) {
  if (id.length <= most) return id;
  const head = Math.ceil((most - 1) / 2);
  return `${id.slice(0, head)}…${id.slice(id.length - (most - 1 - head))}`;
}

// The id; if it is shortened, its title and screen readers have the whole.
export function idText(id, most = MAX_ID) {
  const short = shortened(id, most);
  return short === id
    ? make("span", { class: "id", title: id }, id)
    : make("span", { class: "id", title: id }, make("span", { "aria-hidden": "true" }, short), make("span", { class: "unseen" }, id));
}

export function copyButton(kind, text) {
  return make("button", { class: "copy", type: "button", "data-key": `copy ${kind}`, title: `Copy ${text}`, "aria-label": `Copy ${kind} ${text}`,
    onclick: (event) => {
      event.stopPropagation();
      copy(kind, text, event.currentTarget);
    } });
}

// A text in which an id may stand in brackets.
export function textWithId(text, id) {
  const at = id ? text.indexOf(`(${id})`) : -1;
  return at < 0 ? [text] : [text.slice(0, at + 1), idText(id), text.slice(at + 1 + id.length)];
}

export const idWithCopy = (kind, id, most = MAX_ID) => make("span", { class: "copied" }, idText(id, most), copyButton(kind, id));

async function copy(kind, text, button) {
  let done = true;
  try {
    // Absent on pages of other hosts without TLS.
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else done = copiedBySelection(text, button);
  } catch {
    done = copiedBySelection(text, button);
  }
  find("#spoken").textContent = done ? `Copied ${kind} ${text}` : `The browser does not allow copying; the ${kind} is ${text}`;
  button.classList.toggle("done", done);
  setTimeout(() => button.classList.remove("done"), DONE_MS);
}

function copiedBySelection(text, button) {
  const field = make("textarea", { class: "unseen", "aria-hidden": "true", tabindex: "-1" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  button.focus();
  return done;
}
