"use strict";
// The measured steps of each arm as points, with its median and 10th to 90th percentile.

function drawSteps(trial, into) {
  const xs = [], points = [], turns = [], medians = [], lows = [], highs = [];
  trial.arms.filter((arm) => arm.turns_ms.length).forEach((arm, place) => {
    const count = arm.turns_ms.length;
    arm.turns_ms.forEach((steps, turn) => {
      const x = place + (count > 1 ? (0.56 * turn) / (count - 1) : 0.28) - 0.4;
      const middle = [...steps].sort((a, b) => a - b)[Math.floor(steps.length / 2)];
      steps.forEach((step, at) => {
        xs.push(x + 0.02 * (at / steps.length));
        points.push(step); turns.push(at === 0 ? middle : null);
        medians.push(null); lows.push(null); highs.push(null);
      });
    });
    xs.push(place + 0.3);
    points.push(null); turns.push(NaN); medians.push(arm.median_ms); lows.push(arm.low_ms); highs.push(arm.high_ms);
  });
  // a gap (null) ends the line that joins an arm's turns; undefined does not
  const joined = turns.map((value) => (Number.isNaN(value) ? null : value === null ? undefined : value));
  const ink = colour("ink"), faint = colour("faint"), grid = { stroke: colour("line"), width: 1 };
  const dots = (size, fill) => ({ show: true, size, fill, stroke: fill });
  const series = [
    {},
    { label: "a step", stroke: colour("other"), paths: () => null, points: dots(4, colour("other")) },
    { label: "a turn's median", stroke: faint, width: 1, points: dots(4, faint) },
    { label: "median, p10 to p90", stroke: colour("accent"), paths: () => null, points: dots(9, colour("accent")) },
  ];
  const data = [xs, points, joined, medians];
  const shades = ["update", "wait", "backward"];
  trial.lines.forEach(([label, value], at) => {
    series.push({ label, stroke: colour(shades[at % 3]), width: 1.5, dash: [6, 4], points: { show: false } });
    data.push(xs.map(() => value));
  });
  const whiskers = (plot) => {
    const context = plot.ctx;
    context.save();
    context.strokeStyle = colour("accent");
    context.setLineDash([]);
    context.lineWidth = 2 * devicePixelRatio;
    medians.forEach((median, at) => {
      if (median === null) return;
      const x = plot.valToPos(xs[at], "x", true);
      context.beginPath();
      context.moveTo(x, plot.valToPos(lows[at], "y", true));
      context.lineTo(x, plot.valToPos(highs[at], "y", true));
      context.stroke();
    });
    context.restore();
  };
  const width = () => Math.max(300, into.clientWidth);
  const names = trial.arms.filter((arm) => arm.turns_ms.length).map((arm) => arm.name);
  const plot = new uPlot({
    width: width(), height: 360, series, hooks: { draw: [whiskers] },
    scales: { x: { time: false, range: [-0.6, names.length - 0.4] }, y: { range: (_, low, high) => [0, 1.05 * Math.max(high, ...highs)] } },
    axes: [
      {
        stroke: ink, grid, size: 90, rotate: -40, splits: () => names.map((_, at) => at),
        values: (_, splits) => splits.map((at) => names[at] ?? ""),
      },
      { stroke: ink, grid, label: "ms a step", size: 60 },
    ],
    legend: { live: false }, cursor: { drag: { x: false, y: false }, x: false, y: false },
  }, data, into);
  addEventListener("resize", () => plot.setSize({ width: width(), height: 360 }));
}
