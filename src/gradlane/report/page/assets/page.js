"use strict";
// Puts the page together from the data that it carries.

async function readData() {
  const text = document.getElementById("data").textContent;
  const compressed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

// of the columns those are shown that some arm has something for
function armsTable(trial) {
  const has = (name) => trial.arms.some((arm) => arm[name] !== null);
  const measured = has("median_ms"), spread = trial.arms.some((arm) => arm.speedup && arm.speedup[1] < arm.speedup[2]);
  const columns = [
    ["policy", true, (arm) => arm.name + (arm.note ? ` (${arm.note})` : "")],
    ["step ms", measured, (arm) => ms(arm.median_ms)],
    ["p10 .. p90", measured, (arm) => (arm.median_ms === null ? "-" : `${ms(arm.low_ms)} .. ${ms(arm.high_ms)}`)],
    ["x DDP", has("speedup"), (arm) => (arm.speedup ? arm.speedup[0].toFixed(2) + (arm.beats_bound ? " !" : "") : "-")],
    ["p25 .. p75", spread, (arm) => (arm.speedup ? `${arm.speedup[1].toFixed(2)} .. ${arm.speedup[2].toFixed(2)}` : "-")],
    ["simulated", has("predicted_ms"), (arm) => ms(arm.predicted_ms)],
    ["bound", has("bound_ms"), (arm) => ms(arm.bound_ms)],
    ["hidden", has("hidden"), (arm) => percent(arm.hidden)],
    ["= DDP", has("equal_to_ddp"), (arm) => ({ true: "yes", false: "no", null: "-" }[arm.equal_to_ddp])],
  ].filter(([, shown]) => shown);
  return table(columns.map(([heading]) => heading), trial.arms.map((arm) => columns.map(([, , text]) => text(arm))), trial.arms.findIndex((arm) => arm.name === trial.recommended));
}

function plans(trial) {
  const planned = trial.arms.filter((arm) => arm.plan);
  const into = el("div", {});
  const choice = el("select", { "aria-label": "policy", onchange: () => into.replaceChildren(planPicture(planned[choice.selectedIndex].plan)) },
    ...planned.map((arm) => el("option", {}, arm.name)));
  choice.selectedIndex = planned.indexOf(mainArms(trial, planned).at(-1));
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

const TIMELINE_HELP = "A thin line is a message that waits to start, a bar one that is under way; an outline is the same message in the simulator. " +
  "W and S zoom, A and D move. Drag to sum up a range, Shift and drag to move. Click on a red wait to mark the message that held it.";
const KEYS = [["forward", "forward"], ["backward", "backward"], ["update", "update"], ["wait", "waits for a sum"]];

function drawTrial(trial, computeKinds, into) {
  const some = (name) => trial.arms.some((arm) => (Array.isArray(arm[name]) ? arm[name].length : arm[name]));
  const section = (title, text, ...content) => into.append(el("h2", {}, title), el("p", { class: "faint" }, text), ...content);
  const later = [];  // what needs to know how wide it is
  into.append(el("p", { class: "faint" }, trial.title), el("div", { class: "top" },
    el("div", { class: "answer" }, el("strong", {}, trial.number), el("p", {}, trial.answer)), drawSpeedups(trial)));
  if (some("timeline")) {
    const drawn = trial.arms.filter((arm) => arm.timeline), lanes = el("div", { id: "timeline" });
    const source = sourceOf(drawn, (arm) => arm.timeline.ranks[0].rank >= 0);
    into.append(el("h2", {}, "Timelines"),
      el("p", { class: "keys" }, ...KEYS.map(([name, text]) => el("span", { class: "key" }, el("i", { style: `background: var(--${name})` }), text)),
        el("span", { class: "key" }, el("i", { class: "urgencies", style: `background: linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(urgency).join(", ")})` }), "messages, from needed first to needed last")),
      lanes, el("p", { class: "faint" }, `${source}. ${TIMELINE_HELP}`));
    later.push(() => (lanes.view = new Timeline(trial, computeKinds, lanes)));
  }
  if (trial.arms.length) into.append(el("h2", {}, "All policies"), armsTable(trial));
  const compared = some("equal_to_ddp") ? " = DDP: parameters and buffers at the end equal DDP's bit for bit." : "";
  const ratio = some("speedup") ? `x DDP: DDP's step time divided by this one's; of what was measured, the median over turns.${compared}` : "";
  if (ratio || trial.bound) into.append(el("p", { class: "faint" }, `${ratio}${trial.bound ? ` Bound: ${trial.bound}.` : ""}`));
  into.append(...trial.remarks.map((remark) => el("p", {}, remark)));
  for (const chart of trial.charts) {
    const box = el("div", { class: "chart" });
    into.append(el("h2", {}, chart.title), box);
    later.push(() => drawChart(chart, box));
  }
  for (const each of trial.tables) into.append(el("h2", {}, each.title), table(each.headings, each.rows));
  if (some("turns_ms")) {
    const steps = el("div", {});
    section("Steps", "Measured: every step, in the order of the turns; a line joins the turns' medians. The bar is the 10th to 90th percentile.", steps);
    later.push(() => drawSteps(trial, steps));
  }
  if (some("parts")) {
    const parts = el("div", {});
    section("Where a step's time goes", `${sourceOf(trial.arms.filter((arm) => arm.parts), (arm) => (arm.timeline ? arm.timeline.ranks[0].rank >= 0 : arm.turns_ms.length))}, on one rank, without what overlaps. Waiting is the communication that nothing hides.`, parts);
    drawParts(trial, parts);
  }
  if (some("plan")) section("Plans", "Above, the tensors in the order in which their gradients are ready, as wide as the square root of their bytes; below, a row for each message, the first to start on top.", ...plans(trial));
  into.append(...searches(trial));
  later.forEach((draw) => draw());
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
  if (facts.about.length) page.append(el("h2", {}, "To run it again"), el("dl", {}, ...facts.about.flatMap(([what, value]) => [el("dt", {}, what), el("dd", {}, value)])));
  document.body.dataset.ready = "yes";
}).catch((error) => {
  document.getElementById("page").textContent = `This report cannot be shown: ${error}. It needs a browser of 2023 or later.`;
});
