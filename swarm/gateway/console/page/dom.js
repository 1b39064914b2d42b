// Builds elements. Text only ever becomes text nodes, so output of a model or a client can never become markup.

const SVG = "http://www.w3.org/2000/svg";

// h("button", {class: "quiet", onclick: go, disabled: true, vars: {"--fill": "40%"}}, "Go")
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(element, attributes, children) {
  set(element, attributes ?? {});
  element.append(...nodes(children));
  return element;
}

// False, null and undefined remove an attribute.
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") setVars(element, value);
    else if (name === "value" && "value" in element && element.tagName !== "OPTION") {
      // without its own `value`, an OPTION's value is its text
      if (element.value !== String(value)) element.value = value;
    } else setAttribute(element, name, value);
  }
  return element;
}

function setAttribute(element, name, value) {
  if (name === "style") throw new Error("styles belong into style.css; use `vars` for what is computed");
  if (value === false || value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value === true ? "" : value)) {
    element.setAttribute(name, value === true ? "" : value);
  }
}

function setVars(element, vars) {
  for (const [name, value] of Object.entries(vars)) {
    if (element.style.getPropertyValue(name) !== String(value)) element.style.setProperty(name, value);
  }
}

const nodes = (children) =>
  children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== true);

// Change a text only if it differs, so that a selection in it survives.
export function text(element, value) {
  const words = String(value ?? "");
  if (element.textContent !== words) element.textContent = words;
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

// Make the children of `parent` match `items`, reusing the element of each key, so that focus and scroll survive.
export function keyed(parent, items, keyOf, make, update) {
  const old = (parent.keyedChildren ??= new Map());
  const fresh = new Map();
  items.forEach((item, index) => {
    const key = keyOf(item);
    const element = old.get(key) ?? make(item);
    fresh.set(key, element);
    update(element, item, index);
  });
  for (const [key, element] of old) if (!fresh.has(key)) element.remove();
  let next = parent.firstElementChild;
  for (const element of fresh.values()) {
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  parent.keyedChildren = fresh;
  return parent;
}

let counted = 0;

export const unique = (name) => `${name}-${(counted += 1)}`;
