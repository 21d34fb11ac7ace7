"use strict";
// Puts the page together from the data that it carries.

async function readData() {
  const text = document.getElementById("data").textContent;
  const compressed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

function armsTable(trial) {
  const simulated = trial.arms.some((arm) => arm.predicted_ms !== null);
  const ratios = trial.arms.map((arm) => (arm.speedup ? arm.speedup[0] : 0));
  const rows = trial.arms.map((arm) => [
    arm.name + (arm.note ? ` (${arm.note})` : ""), ms(arm.median_ms), `${ms(arm.low_ms)} .. ${ms(arm.high_ms)}`,
    arm.speedup ? arm.speedup[0].toFixed(2) + (arm.beats_bound ? " !" : "") : "-",
    arm.speedup ? `${arm.speedup[1].toFixed(2)} .. ${arm.speedup[2].toFixed(2)}` : "-",
    ...(simulated ? [ms(arm.predicted_ms), ms(arm.bound_ms)] : [percent(arm.hidden)]),
    { true: "yes", false: "no", null: "-" }[arm.equal_to_ddp],
  ]);
  const headings = ["policy", "step ms", "p10 .. p90", "x DDP", "p25 .. p75", ...(simulated ? ["simulated", "bound"] : ["hidden"]), "= DDP"];
  return table(headings, rows, ratios.indexOf(Math.max(...ratios)));
}

function plans(trial) {
  const planned = trial.arms.filter((arm) => arm.plan);
  const into = el("div", {});
  const choice = el("select", { "aria-label": "policy", onchange: () => into.replaceChildren(planPicture(planned[choice.selectedIndex].plan)) },
    ...planned.map((arm) => el("option", {}, arm.name)));
  choice.selectedIndex = Math.min(1, planned.length - 1);
  into.append(planPicture(planned[choice.selectedIndex].plan));
  return [el("div", { class: "controls" }, choice), into];
}

function searches(trial) {
  return trial.arms.filter((arm) => arm.searches.length).flatMap((arm) => [
    el("h2", {}, `What ${arm.name} looked at`),
    ...arm.searches.flatMap((search) => [
      el("p", {}, search.verdict),
      table([`tried since ${search.why}`, "ms a step"], search.tried.map(([choice, times]) => [choice, times.map(ms).join(", ")])),
    ]),
  ]);
}

const KEYS = [["forward", "forward"], ["backward", "backward"], ["update", "update"], ["wait", "waits for a sum"]];

function drawTrial(trial, computeKinds, into) {
  const steps = el("div", {}), parts = el("div", {}), lanes = el("div", { id: "timeline" });
  const section = (title, text, ...content) => into.append(el("h2", {}, title), el("p", { class: "faint" }, text), ...content);
  into.append(el("p", { class: "faint" }, trial.title), el("div", { class: "answer" }, el("strong", {}, trial.number), el("p", {}, trial.answer)));
  into.append(armsTable(trial), el("p", { class: "faint" }, `x DDP: torch DDP's step over this one's, the median over turns. = DDP: parameters and buffers at the end equal DDP's bit for bit. Bound: ${trial.bound}.`));
  into.append(...trial.remarks.map((remark) => el("p", {}, remark)));
  section("Timelines", "Two iterations of each policy. A message is a line while it waits to start, and a bar until its sum is there, from urgent (yellow) to patient (blue); an outline is the same message in the simulator. Drag to move, Ctrl and the wheel to zoom.",
    el("div", {}, ...KEYS.map(([name, text]) => el("span", { class: "key" }, el("i", { style: `background: var(--${name})` }), text))), lanes);
  section("Steps", "Every measured step, in the order of the turns; a line joins the turns' medians. The bar is the 10th to 90th percentile.", steps);
  section("Where a step's time goes", "On rank 0, without what overlaps. Waiting is the communication that nothing hides.", parts);
  section("Plans", "Above, the tensors in the order in which their gradients are ready, as wide as the square root of their bytes; below, a row for each message, the first to start on top.", ...plans(trial));
  into.append(...searches(trial));
  lanes.view = new Timeline(trial, computeKinds, lanes);
  drawSteps(trial, steps);
  if (!drawParts(trial, parts)) parts.append("The run left no whole step.");
}

readData().then(({ computeKinds, facts }) => {
  const page = document.getElementById("page"), into = el("div", {});
  const show = (at) => (into.replaceChildren(), drawTrial(facts.trials[at], computeKinds, into));
  page.append(el("h1", {}, facts.title));
  if (facts.trials.length > 1) {
    const choice = el("select", { "aria-label": "run", onchange: () => show(choice.selectedIndex) }, ...facts.trials.map((trial) => el("option", {}, trial.title)));
    page.append(el("div", { class: "controls" }, choice));
  }
  page.append(into);
  show(0);
  page.append(el("h2", {}, "To run it again"), el("dl", {}, ...facts.about.flatMap(([what, value]) => [el("dt", {}, what), el("dd", {}, value)])));
  document.body.dataset.ready = "yes";
}).catch((error) => {
  document.getElementById("page").textContent = `This report cannot be shown: ${error}. It needs a browser of 2023 or later.`;
});
