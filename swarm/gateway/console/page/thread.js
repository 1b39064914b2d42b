// A conversation as a tree of turns: an edited prompt or a repeated answer is a sibling of the former one, and the path
// of the picked turns is what is shown and sent. Pure: every change returns a new thread.

export const MOST_TURNS = 400; // of a path
export const MOST_NODES = 2000;

// `turns`: {id: {id, parent, role, content, thought, isRaw, facts}}; `picks`: the shown child of each turn. 0 is the
// root.
export const newThread = () => ({ turns: {}, picks: {}, next: 1 });

export function pathOf({ turns, picks }) {
  const path = [];
  for (let at = picks[0]; at !== undefined && turns[at]; at = picks[at]) path.push(turns[at]);
  return path;
}

export const endOf = (thread) => pathOf(thread).at(-1)?.id ?? 0;

// The turn itself is included; the oldest comes first.
export const siblingsOf = ({ turns }, { parent }) => childrenOf(turns, parent);

const childrenOf = (turns, parent) => Object.values(turns).filter((turn) => turn.parent === parent);

export function added(thread, turn, parent = endOf(thread)) {
  const id = thread.next;
  return {
    turns: { ...thread.turns, [id]: { ...turn, id, parent } }, picks: { ...thread.picks, [parent]: id }, next: id + 1,
  };
}

export const picked = (thread, { id, parent }) => ({ ...thread, picks: { ...thread.picks, [parent]: id } });

// End the path at this turn; 0 is the root. What follows stays in the tree.
export function endedAt(thread, id) {
  const picks = { ...thread.picks };
  delete picks[id];
  return { ...thread, picks };
}

export function continuedFrom(thread, id) {
  const last = childrenOf(thread.turns, id).at(-1);
  return last ? picked(thread, last) : thread;
}

export function removed(thread, { id, parent }) {
  const turns = { ...thread.turns };
  delete turns[id];
  return continuedFrom(endedAt({ ...thread, turns }, parent), parent);
}

export function copiedUpTo(thread, id) {
  const path = pathOf(thread);
  const num = path.findIndex((turn) => turn.id === id) + 1;
  return path.slice(0, num).reduce((made, { parent: _, id: __, ...turn }) => added(made, turn), newThread());
}

// The turns of a chat as the API takes them; text that was only continued is no part of it.
export const chatOf = (path) => path.filter(({ isRaw }) => !isRaw);

const LONGEST_TITLE = 60;

export function titleOf(path) {
  const words = (path[0]?.content ?? "").slice(0, 500).replace(/\s+/g, " ").trim();
  if (words.length <= LONGEST_TITLE) return words || "New conversation";
  const cut = words.slice(0, LONGEST_TITLE);
  return `${cut.slice(0, Math.max(20, cut.lastIndexOf(" ")))} …`;
}
