// Runs before the page is painted, so that a chosen theme never flashes in the other one.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("swarm.theme");
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // storage may be forbidden: then the system's theme is used
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
