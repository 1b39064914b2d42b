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
