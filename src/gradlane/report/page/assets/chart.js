"use strict";
// Lines over numbers, all of one scale: what a sweep or a question to the simulator found.

const LINE_HUES = 9;
const LABEL_WIDTH = 48; // pixels

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
  const isLog = chart.log_x && xs[0] > 0, first = xs[0], last = xs[xs.length - 1];
  // a margin for the outermost points; a single one stands in the middle
  const margin = first === last ? (isLog ? 2 : 1) : isLog ? (last / first) ** 0.04 : 0.04 * (last - first);
  const range = isLog ? [first / margin, last * margin] : [first - margin, last + margin];
  // the axis names what was asked for, where there is room, and no other values
  const splits = (plot) => {
    let before = -Infinity;
    return xs.filter((x) => {
      const at = plot.valToPos(x, "x"), hasRoom = at - before >= LABEL_WIDTH;
      if (hasRoom) before = at;
      return hasRoom;
    });
  };
  const values = (_, named) => named.map((x) => x.toLocaleString(undefined, { maximumSignificantDigits: 4 }));
  const plot = new uPlot({
    width: width(), height: 320, series: [{ label: chart.x }, ...series],
    scales: { x: { time: false, range, ...(isLog ? { distr: 3 } : {}) } },
    axes: [{ stroke: ink, grid, label: chart.x, splits, values, filter: (_, named) => named }, { stroke: ink, grid, label: chart.y, size: 60 }],
  }, [xs, ...columns], into);
  addEventListener("resize", () => plot.setSize({ width: width(), height: 320 }));
}
