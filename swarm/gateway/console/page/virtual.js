// Draws only the visible rows of a long table. All rows have one height: `--row` in style.css, which a table may
// override, and which differs on small screens.

import { h, keyed, set } from "./dom.js";
import { windowed } from "./windowed.js";

export class VirtualRows {
  #scroller;
  #body;
  #options;
  #rows = [];
  #before;
  #after;
  #drawn = "";

  constructor(scroller, body, { columns, keyOf, make, update }) {
    this.#scroller = scroller;
    this.#body = body;
    this.#options = { columns, keyOf, make, update };
    this.#before = this.#spacer(columns);
    this.#after = this.#spacer(columns);
    scroller.addEventListener("scroll", () => this.#draw(false), { passive: true });
    new ResizeObserver(() => this.#draw(false)).observe(scroller);
  }

  show(rows) {
    this.#rows = rows;
    set(this.#body.closest("table"), { "aria-rowcount": rows.length + 1 });
    this.#draw(true);
  }

  #draw(isNew) {
    const { keyOf, make, update } = this.#options;
    const rowHeight = parseFloat(getComputedStyle(this.#body).getPropertyValue("--row")) || 40;
    const { scrollTop, clientHeight } = this.#scroller;
    const part = windowed({ count: this.#rows.length, rowHeight, scrollTop, height: clientHeight || 400 });
    const drawn = `${part.first}-${part.last}-${this.#rows.length}-${rowHeight}`;
    if (!isNew && drawn === this.#drawn) return;
    this.#drawn = drawn;
    const items = this.#rows.slice(part.first, part.last).map((row, index) => ({ row, index: part.first + index }));
    const all = [{ spacer: this.#before, height: part.before }, ...items, { spacer: this.#after, height: part.after }];
    const draw = (element, { spacer, height, row, index }) => {
      if (spacer) return set(element, { vars: { "--height": `${height}px` }, hidden: height === 0 });
      set(element, { "aria-rowindex": index + 2 });
      return update(element, row, index);
    };
    keyed(
      this.#body, all, ({ spacer, row }) => spacer ?? keyOf(row), ({ spacer, row }) => spacer ?? make(row), draw,
    );
  }

  #spacer(columns) {
    return h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { colspan: columns }));
  }
}
