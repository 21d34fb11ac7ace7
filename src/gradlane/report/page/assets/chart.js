"use strict";
// Lines over numbers, all of one scale: what a sweep or a question to the simulator found.

const LINE_HUES = 9;

function drawChart(chart, into) {
  const xs = [...new Set(chart.lines.flatMap(([, points]) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const columns = chart.lines.map(([, points]) => {
    const at = new Map(points);
    return xs.map((x) => at.get(x) ?? null);
  });
  const ink = colour("ink"), grid = { stroke: colour("line"), width: 1 };
  const hue = (line) => `hsl(${(360 * line) / LINE_HUES} 65% ${line < LINE_HUES ? 50 : 35}%)`;
  const series = chart.lines.map(([label], line) => ({ label, stroke: hue(line), width: 2, spanGaps: true, points: { show: true, size: 5 } }));
  const width = () => Math.max(300, into.clientWidth);
  const plot = new uPlot({
    width: width(), height: 320, series: [{ label: chart.x }, ...series],
    scales: { x: { time: false, ...(chart.log_x && xs[0] > 0 ? { distr: 3 } : {}) } },
    axes: [{ stroke: ink, grid, label: chart.x }, { stroke: ink, grid, label: chart.y, size: 60 }],
  }, [xs, ...columns], into);
  addEventListener("resize", () => plot.setSize({ width: width(), height: 320 }));
}
