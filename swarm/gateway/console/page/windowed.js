// Selects the rows of a long list to draw. Pure. A thousand rows cost as much as the visible dozen.

// Rows first to last (exclusive) are drawn; `before` and `after` are pixels.
export function windowed({ count, rowHeight, scrollTop, height, spare = 6 }) {
  const total = Math.max(0, count);
  if (total === 0 || rowHeight <= 0) return { first: 0, last: 0, before: 0, after: 0 };
  const fits = Math.ceil(Math.max(0, height) / rowHeight) + 1;
  const top = Math.min(Math.max(0, scrollTop), Math.max(0, total * rowHeight - height));
  const first = Math.max(0, Math.floor(top / rowHeight) - spare);
  const last = Math.min(total, Math.floor(top / rowHeight) + fits + spare);
  return { first, last, before: first * rowHeight, after: (total - last) * rowHeight };
}
