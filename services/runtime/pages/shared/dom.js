// Creates elements. All text is inserted as text: nothing from a server is parsed as HTML.

export const find = (selector, within = document) => within.querySelector(selector);

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== ""));
  return element;
}

const plain = new Intl.NumberFormat("en");
export const number = (value) => plain.format(value);
export const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

// Draws a bar of parts with a row of labels. Parts: { name, value, title, style, quiet }; a quiet part is hidden at 0.
// Values have the width of `most`, so that labels do not move when they change.
export function drawBar(container, parts, total, most = total) {
  const shown = parts.filter((part) => part.value > 0 || !part.quiet);
  if (container.childElementCount !== 2) container.replaceChildren(make("div", { class: "parts" }), make("ul", { class: "labels" }));
  const [row, labels] = container.children;
  sync(row, shown, () => make("span"), (element, part) => {
    element.className = `part ${part.style}`;
    element.style.flexGrow = total ? part.value / total : 0;
    element.title = `${part.name}: ${number(part.value)}`;
  });
  sync(labels, shown, () => make("li", {}, make("i"), make("span"), make("b")), (element, part) => {
    const [swatch, name, value] = element.children;
    swatch.className = `swatch ${part.style}`;
    name.textContent = part.name;
    value.textContent = number(part.value);
    value.dataset.count = part.name;
    value.style.minWidth = `${number(most).length}ch`;
    element.title = part.title || "";
  });
}

// Creates or removes children so that there is one for each value, and updates each with its value.
export function sync(parent, values, create, show) {
  while (parent.childElementCount > values.length) parent.lastElementChild.remove();
  while (parent.childElementCount < values.length) parent.append(create());
  values.forEach((value, index) => show(parent.children[index], value, index));
}
