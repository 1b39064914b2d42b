// Parser of server-sent events that arrive in pieces, following the standard. Pure: text in, events out.

// characters of one event; a longer one is not from our gateway, and memory must be bounded
const LONGEST = 32 * 1024 * 1024;

export class SseParser {
  #rest = "";
  #data = [];
  #size = 0;
  #event = "";
  #id = null;
  #endedWithReturn = false;

  // Returns the events that a piece completes: {event, data, id}.
  push(text) {
    const events = [];
    if (this.#endedWithReturn && text.startsWith("\n")) text = text.slice(1);
    if (text !== "") this.#endedWithReturn = text.endsWith("\r");
    const lines = (this.#rest + text).split(/\r\n|\r|\n/);
    this.#rest = lines.pop();
    this.#measure(this.#rest.length);
    for (const line of lines) this.#take(line, events);
    return events;
  }

  #take(line, events) {
    if (line === "") this.#dispatch(events);
    else if (!line.startsWith(":")) this.#field(...split(line)); // a line with a colon first is a heartbeat
  }

  #field(name, value) {
    if (name === "data") {
      this.#data.push(value);
      this.#size += value.length;
      this.#measure(0);
    } else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
  }

  #dispatch(events) {
    if (this.#data.length > 0) {
      events.push({ event: this.#event || "message", data: this.#data.join("\n"), id: this.#id });
    }
    this.#data = [];
    this.#size = 0;
    this.#event = "";
  }

  #measure(more) {
    if (this.#size + more > LONGEST) throw new Error("an event of the stream is longer than this page can hold");
  }
}

function split(line) {
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  const value = line.slice(colon + 1);
  return [line.slice(0, colon), value.startsWith(" ") ? value.slice(1) : value];
}
