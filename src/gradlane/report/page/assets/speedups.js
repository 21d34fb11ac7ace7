"use strict";
// How many times as fast as DDP each arm is: a bar, the spread of its turns, and what no schedule can exceed.

const MOST_SPEEDUPS = 8;

// what the answer is about beside what it is compared with; of an arm alone, that one
function mainArms(trial, arms) {
  const main = [trial.baseline, trial.recommended].map((name) => arms.find((arm) => arm.name === name)).filter(Boolean);
  return main.length ? [...new Set(main)] : arms.slice(0, 1);
}

// "Measured", "Simulated", or which of them is which
function sourceOf(arms, isMeasured) {
  const measured = arms.filter(isMeasured);
  if (measured.length === arms.length) return "Measured";
  return measured.length ? `Measured: ${measured.map((arm) => arm.name).join(", ")}. Simulated: the others` : "Simulated";
}

function drawSpeedups(trial) {
  const others = trial.arms.filter((arm) => arm.speedup && arm.name !== trial.baseline);
  if (!others.length) return null;
  const main = mainArms(trial, trial.arms.filter((arm) => arm.speedup));
  const rest = others.filter((arm) => !main.includes(arm)).sort((a, b) => b.speedup[0] - a.speedup[0]);
  const shown = [...main, ...rest].slice(0, MOST_SPEEDUPS), hidden = main.length + rest.length - shown.length;
  const most = 1.04 * Math.max(trial.limit ?? 0, ...shown.map((arm) => arm.speedup[2]));
  const at = (ratio) => `${(100 * ratio) / most}%`;
  const limit = () => (trial.limit === null ? null : el("i", { class: "limit", style: `left: ${at(trial.limit)}` }));
  const rows = shown.map((arm) => {
    const [ratio, low, high] = arm.speedup, isMain = arm.name === trial.recommended;
    return el("div", { class: isMain ? "speedup main" : "speedup" }, el("span", { class: "name" }, arm.name),
      el("div", { class: "track" },
        el("i", { class: arm.name === trial.baseline ? "fill of-baseline" : "fill", style: `width: ${at(ratio)}` }),
        low < high ? el("i", { class: "spread", style: `left: ${at(low)}; width: ${at(high - low)}` }) : null, limit()),
      el("span", { class: "number" }, `${ratio.toFixed(2)}x`));
  });
  const what = sourceOf(others, (arm) => arm.turns_ms.length);
  const spread = shown.some((arm) => arm.speedup[1] < arm.speedup[2]) ? "; the mark is the middle half of the turns" : "";
  const bound = trial.limit === null ? "" : ` The line at ${trial.limit.toFixed(2)}x is what no schedule can exceed.`;
  return el("figure", { class: "speedups" }, ...rows,
    el("figcaption", { class: "faint" }, `${what}: times as fast as DDP${spread}.${bound}${hidden > 0 ? ` ${hidden} more in the table.` : ""}`));
}
