// JSON merge patch (RFC 7396) that does not modify its input: unchanged parts keep their identity, so that a part of
// the page can check with `!==` whether it needs to draw.

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

export function merge(target, patch) {
  if (!isObject(patch)) return patch;
  const merged = isObject(target) ? { ...target } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete merged[key];
    else define(merged, key, merge(own(merged, key), value));
  }
  return merged;
}

// A worker may be named "__proto__", which must be an ordinary key.
const own = (object, key) => (Object.hasOwn(object, key) ? object[key] : undefined);

function define(object, key, value) {
  if (key === "__proto__")
    Object.defineProperty(object, key, { value, enumerable: true, configurable: true, writable: true });
  else object[key] = value;
}
