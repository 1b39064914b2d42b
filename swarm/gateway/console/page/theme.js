// Runs before the first paint, so that the chosen theme does not flash in the other one.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("swarm.theme");
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // storage is forbidden: use the system's theme
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
// Registered as colours, so that a canvas reads their computed values.
for (const name of [
  "line", "ink-2", "accent", "accent-soft", "surface", "part-queue", "part-wire", "part-wait", "part-compute",
  "part-sample", "part-broker", "part-unaccounted", "part-mark", "part-edge",
])
  CSS.registerProperty({ name: `--${name}`, syntax: "<color>", inherits: true, initialValue: "#888" });
