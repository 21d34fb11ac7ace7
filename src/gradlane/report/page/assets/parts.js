"use strict";
// Where the time of a step goes, a bar for each arm, all on one scale.

const PARTS = ["forward", "backward", "update", "wait", "other"];
const PART_NAMES = { wait: "waiting for sums", other: "other" };

function drawParts(trial, into) {
  const arms = trial.arms.filter((arm) => arm.parts);
  if (!arms.length) return false;
  const total = (arm) => PARTS.reduce((sum, part) => sum + arm.parts[part], 0);
  const longest = Math.max(...arms.map(total));
  into.append(el("div", {}, ...PARTS.map((part) => el("span", { class: "key" }, el("i", { style: `background: var(--${part})` }), PART_NAMES[part] ?? part))));
  into.append(...arms.map((arm) => {
    const bar = el("div", { class: "bar", style: `width: ${(100 * total(arm)) / longest}%` });
    for (const part of PARTS) {
      const most = part === "wait" ? arm.parts.waited_for.map(([name, took]) => `\n  ${name}: ${ms(took)} ms`).join("") : "";
      const text = `${arm.name}: ${PART_NAMES[part] ?? part}, ${ms(arm.parts[part])} ms of ${ms(total(arm))} ms a step${most ? `; for${most}` : ""}`;
      bar.append(el("div", {
        style: `background: var(--${part}); width: ${(100 * arm.parts[part]) / total(arm)}%`,
        onpointermove: (event) => tip.show(text, event), onpointerleave: () => tip.hide(),
      }));
    }
    return el("div", { class: "part" }, el("span", {}, arm.name), bar, el("span", { class: "faint" }, `waits ${ms(arm.parts.wait)} ms`));
  }));
  const rows = arms.filter((arm) => arm.parts.wait > 0).map((arm) => [
    arm.name, ms(arm.parts.wait), arm.parts.waited_for.map(([name, took]) => `${name} ${ms(took)}`).join(", "),
  ]);
  if (rows.length) into.append(el("details", {}, el("summary", {}, "What each waits for, in ms a step"), table(["policy", "waits", "for"], rows)));
  return true;
}
