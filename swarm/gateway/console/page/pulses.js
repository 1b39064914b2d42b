// Animates steps moving through the chain: each link and each stage has its part of a cycle. Off if the user prefers
// reduced motion.

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Pulses {
  #running = [];
  #key = "";

  // `links` and `stages`: the animated elements in order; `turn`: their timing. Null stops all.
  show(links, stages, turn) {
    const key = turn && !still.matches ? `${links.length}-${stages.length}-${turn.milliseconds}` : "";
    const isSame = key === this.#key && this.#running.every(({ effect }) => effect.target.isConnected);
    if (!isSame) this.#restart(key ? [links, stages] : [[], []], turn);
    this.#key = key;
    for (const animation of this.#running)
      if (animation.playbackRate !== turn.speed) animation.updatePlaybackRate(turn.speed);
  }

  #restart([links, stages], turn) {
    for (const animation of this.#running) animation.cancel();
    const timing = { duration: turn?.milliseconds ?? 0, iterations: Infinity };
    this.#running = [
      ...links.map((element, index) => element.animate(across(turn.links[index]), timing)),
      ...stages.map((element, index) => element.animate(glow(turn.stages[index]), timing)),
    ];
  }
}

// From the start of the link to its end; `--travel` is its length along its direction (style.css).
const across = ({ from, to }) => [
  { offset: 0, opacity: 0, offsetDistance: "0%" },
  ...(from > 0 ? [{ offset: from, opacity: 0, offsetDistance: "0%" }] : []),
  { offset: from + (to - from) * 0.15, opacity: 1, offsetDistance: "15%" },
  { offset: from + (to - from) * 0.85, opacity: 1, offsetDistance: "85%" },
  { offset: to, opacity: 0, offsetDistance: "100%" },
  ...(to < 1 ? [{ offset: 1, opacity: 0, offsetDistance: "100%" }] : []),
];

const glow = ({ from, to }) => [
  { offset: 0, opacity: 0, transform: "scaleX(0)" }, { offset: from, opacity: 1, transform: "scaleX(0)" },
  { offset: to - (to - from) * 0.25, opacity: 1, transform: "scaleX(1)" },
  { offset: to, opacity: 0, transform: "scaleX(1)" }, { offset: 1, opacity: 0, transform: "scaleX(1)" },
];
