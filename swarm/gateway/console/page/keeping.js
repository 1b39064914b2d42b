// Values as JSON in a Storage of the browser, which may be forbidden, full, or hold what an older page wrote.

// Returns whether there was space.
export function keep(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch (error) {
    if (error instanceof DOMException) return false;
    throw error;
  }
}

export function forget(storage, name) {
  try {
    storage.removeItem(name);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // forbidden: there is nothing to forget
  }
}

export function recall(storage, name) {
  try {
    return JSON.parse(storage?.getItem(name) ?? "null");
  } catch (error) {
    if (error instanceof DOMException || error instanceof SyntaxError) return null;
    throw error;
  }
}
