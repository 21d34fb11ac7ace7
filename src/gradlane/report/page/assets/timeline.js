"use strict";
// The timelines of several arms above one another, on a canvas that draws only what is in view.
//
// A rank has a track of what it computed and one for each lane of messages. A message is a thin line
// from ready to start, a bar until it has left its first phase, and a paler one until it has arrived.
// Outlines are the same messages in the simulator.

const AXIS = 20, HEADING = 40, NAME = 20, COMPUTE = 16, STRIP = 6, LINK = 26, GAP = 4;
const MOST_TRACKS = 48, VIEW = 620, LABELS = 112;
const CLICK = 4;  // pixels: what moves less is no drag

// Bars come as columns, each start counted from the one before.
function computeBars([kinds, subjects, starts, lengths], names) {
  let begin = 0;
  return kinds.map((kind, at) => ({ kind: names[kind], subject: subjects[at], begin: (begin += starts[at]), length: lengths[at] }));
}

function messageBars([messages, iterations, starts, waits, firsts, seconds]) {
  let start = 0;
  return messages.map((message, at) => {
    start += starts[at];
    const left = start + firsts[at];
    return { message, iteration: iterations[at], ready: start - waits[at], start, left, end: left + seconds[at], track: 0 };
  });
}

class Timeline {
  constructor(trial, computeKinds, into) {
    this.trial = trial;
    this.computeKinds = computeKinds;
    const drawn = trial.arms.filter((arm) => arm.timeline), main = mainArms(trial, drawn);
    this.arms = [...main, ...drawn.filter((arm) => !main.includes(arm))];
    this.shown = new Set(main);
    this.hasMore = drawn.some((arm) => arm.timeline.ranks.length > 1 || arm.timeline.links.length);
    this.showsAll = false;  // ranks and links; else the first rank alone
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Timelines of iterations. A and D or the arrow keys move, W and S or + and - zoom." });
    this.said = el("div", { role: "status" });
    this.pointer = null;  // its pixel, from the left
    this.range = this.marked = this.found = null;  // [from, to]; {row, wait, held, after}; by arm what carries the tensor
    this.body = el("div", {}, this.canvas);
    this.frame = el("div", { class: "lanes" }, this.body);
    into.append(this.controls(), this.frame, this.said);
    this.context = this.canvas.getContext("2d");
    this.listen();
    this.choose();
  }

  controls() {
    const boxes = this.arms.map((arm) => {
      const box = el("input", { type: "checkbox", onchange: () => (this.shown[box.checked ? "add" : "delete"](arm), this.choose()) });
      box.checked = this.shown.has(arm);
      return el("label", {}, box, ` ${arm.name}`);
    });
    const all = el("input", { type: "checkbox", onchange: () => ((this.showsAll = all.checked), this.choose()) });
    const button = (text, title, act) => el("button", { type: "button", title, onclick: act }, text);
    const names = [...new Set(this.arms.flatMap((arm) => arm.plan.tensors.map(([name]) => name)))];
    const search = el("input", { type: "search", placeholder: "find a tensor", "aria-label": "find a tensor", list: "tensors", oninput: () => this.find(search.value.trim()) });
    return el("div", { class: "controls" }, ...boxes, this.hasMore ? el("label", { class: "apart" }, all, " all ranks and links") : null,
      button("+", "zoom in", () => this.zoom(0.5)), button("-", "zoom out", () => this.zoom(2)), button("all", "both iterations", () => this.reset()),
      search, el("datalist", { id: "tensors" }, ...names.map((name) => el("option", { value: name }))));
  }

  // -- what is where ---------------------------------------------------------------------------------

  choose() {
    this.rows = [];
    this.range = this.marked = null;
    let top = AXIS;
    const add = (row) => { row.top = top; top += row.height + (row.gap ?? GAP); this.rows.push(row); };
    this.length = 1;
    for (const arm of this.arms.filter((each) => this.shown.has(each))) {
      const { timeline, plan } = arm;
      this.length = Math.max(this.length, timeline.iterations.at(-1) ?? 1);
      const ranks = new Map(plan.messages.map((message) => message[1]).sort((a, b) => a - b).map((rank) => [rank, 0]));
      [...ranks.keys()].forEach((rank, at) => ranks.set(rank, ranks.size > 1 ? at / (ranks.size - 1) : 0));
      const fills = plan.messages.map((message) => urgency(ranks.get(message[1])));
      add({ kind: "heading", text: `${arm.name}, ${timeline.ranks[0].rank < 0 ? "simulated" : "measured"}`, arm, height: HEADING, gap: 0 });
      timeline.ranks.slice(0, this.showsAll ? Infinity : 1).forEach((rank, place) => {
        const lanes = this.lanesOf(arm, rank, place === 0 ? timeline.simulated : null);
        const compute = (of, text, height, messages) => add({ kind: "compute", text, arm, bars: computeBars(of.compute, this.computeKinds), messages, height });
        compute(rank, rank.rank < 0 ? "simulated" : `rank ${rank.rank}`, COMPUTE, lanes.flatMap((lane) => lane.bars));
        if (place === 0 && timeline.simulated) compute(timeline.simulated, "simulated", STRIP, null);
        for (const lane of lanes) add({ kind: "messages", arm, fills, ...lane });
      });
      for (const link of this.showsAll ? timeline.links : []) {
        let most = 1;
        for (let at = 1; at < link.samples.length; at += 3) most = Math.max(most, link.samples[at]);
        add({ kind: "link", text: link.name, arm, samples: link.samples, most, height: LINK });
      }
    }
    this.height = top;
    this.say();
    this.reset();
  }

  // Messages of a lane that are in flight together go on tracks below one another. A message has the
  // same track in the simulator, so that the two can be compared.
  lanesOf(arm, rank, simulated) {
    const { messages } = arm.plan, lanes = new Map();
    for (const bar of messageBars(rank.messages)) {
      const number = messages[bar.message][0];
      if (!lanes.has(number)) lanes.set(number, { ends: [], tracks: new Map(), bars: [], outlines: [] });
      const lane = lanes.get(number);
      bar.track = lane.ends.findIndex((end) => end <= bar.start);
      if (bar.track < 0) bar.track = lane.ends.length < MOST_TRACKS ? lane.ends.length : lane.ends.indexOf(Math.min(...lane.ends));
      lane.ends[bar.track] = bar.end;
      lane.tracks.set(`${bar.message} ${bar.iteration}`, bar.track);
      lane.bars.push(bar);
    }
    for (const bar of simulated ? messageBars(simulated.messages) : []) {
      const lane = lanes.get(messages[bar.message][0]);
      bar.track = lane?.tracks.get(`${bar.message} ${bar.iteration}`);
      if (bar.track !== undefined) lane.outlines.push(bar);
    }
    return [...lanes].sort(([a], [b]) => a - b).map(([number, { ends, bars, outlines }]) => {
      const each = Math.max(3, Math.min(11, Math.floor(150 / ends.length)));
      return { text: `lane ${number}`, bars, outlines, each, height: each * ends.length };
    });
  }

  // -- asking ----------------------------------------------------------------------------------------

  find(text) {
    this.found = text ? new Map(this.arms.map((arm) => [arm, carriersOf(arm.plan, text)])) : null;
    this.say();
    this.later();
  }

  select(from, to) {
    this.range = from < to ? [from, to] : [to, from];
    this.say();
    this.later();
  }

  // a wait that was clicked on, or nothing
  mark(event) {
    const { row, time, near } = this.under(event);
    const waits = row?.messages ? row.bars.filter((bar) => bar.kind === "wait" && bar.begin - near <= time && time <= bar.begin + bar.length + near) : [];
    const wait = waits.reduce((least, bar) => (!least || bar.length < least.length ? bar : least), null);
    const held = wait && holderOf(row.arm.plan, wait, row.messages);
    this.marked = wait && { row, wait, held, after: held && startedAfter(row.arm.plan, held, row.messages) };
    if (!wait) this.range = null;
    this.say();
    this.later();
  }

  say() {
    const shown = this.arms.filter((arm) => this.shown.has(arm)), lines = [];
    if (this.found) {
      const counts = shown.map((arm) => [arm, this.found.get(arm)]);
      lines.push(el("p", {}, counts.map(([arm, { tensors, messages }]) => `${arm.name}: ${tensors.size} tensors found, in ${messages.size} of ${arm.plan.messages.length} messages`).join("; ")));
    }
    if (this.marked) lines.push(el("p", {}, this.sentence(this.marked)));
    if (this.range) {
      const [from, to] = this.range;
      const rows = this.rows.filter((row) => row.messages).map((row) => {
        const { computing, waiting, bytes: carried } = sumsIn(row.arm.plan, row.bars, row.messages, from, to);
        return [row.arm.name, row.text, us(computing), us(waiting), bytes(carried)];
      });
      lines.push(el("p", {}, `From ${us(from)} to ${us(to)}, ${us(to - from)}; of a message, as many bytes as its bar is in the range:`),
        table(["policy", "rank", "computing", "waiting", "bytes"], rows));
    }
    this.said.replaceChildren(...lines);
  }

  sentence({ row, wait, held, after }) {
    const { plan } = row.arm, of = wait.subject < 0 ? "all sums" : plan.tensors[wait.subject][0];
    const said = `${row.arm.name}, ${row.text}: a wait of ${us(wait.length)} for ${of}`;
    if (!held) return `${said}; no message that is shown ended in it.`;
    const queued = held.start - held.ready;
    const behind = after ? ` until message ${after.message} had left` : "";
    return `${said}, held by ${plan.messages[held.message][3]}, which ${queued > ROUNDED ? `waited ${us(queued)} to start${behind}, and ` : ""}took ${us(held.end - held.start)}.`;
  }

  // -- moving ----------------------------------------------------------------------------------------

  reset() {
    this.begin = -0.01 * this.length;
    this.end = 1.02 * this.length;
    this.resize();
  }

  resize(height = Math.min(VIEW, this.height)) {
    const width = this.frame.clientWidth;
    this.body.style.height = `${this.height}px`;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * devicePixelRatio);
    this.canvas.height = Math.round(height * devicePixelRatio);
    this.draw();
  }

  zoom(factor, at = (this.begin + this.end) / 2) {
    const most = 1.2 * this.length, span = Math.min(most, Math.max(5, (this.end - this.begin) * factor));
    this.begin = at - ((at - this.begin) * span) / (this.end - this.begin);
    this.end = this.begin + span;
    this.move(0);
  }

  move(by) {
    const span = this.end - this.begin;
    this.begin = Math.max(-0.1 * this.length, Math.min(1.1 * this.length - span, this.begin + by));
    this.end = this.begin + span;
    this.later();
  }

  later() {
    if (!this.pending) this.pending = requestAnimationFrame(() => ((this.pending = 0), this.draw()));
  }

  listen() {
    const { canvas } = this;
    let held = null;  // where the pointer went down, and where it was last
    canvas.addEventListener("pointerdown", (event) => {
      held = { first: event.offsetX, last: event.clientX, time: this.timeAt(event.offsetX), moves: event.shiftKey || event.pointerType === "touch", dragged: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (held && !held.dragged) this.mark(event);
      held = null;
    });
    canvas.addEventListener("pointercancel", () => (held = null));
    canvas.addEventListener("pointerleave", () => ((this.pointer = null), tip.hide()));
    canvas.addEventListener("pointermove", (event) => {
      if (held === null) return this.hover(event);
      held.dragged ||= Math.abs(event.offsetX - held.first) > CLICK;
      if (!held.dragged) return;
      tip.hide();
      if (held.moves) this.move((held.last - event.clientX) * this.perPixel);
      else this.select(held.time, this.timeAt(event.offsetX));
      held.last = event.clientX;
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(1.002 ** event.deltaY, this.timeAt(event.offsetX));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) * this.perPixel);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.offsetX)));
    // W A S D as in Perfetto, with the pointer over the timelines or the canvas focused
    document.addEventListener("keydown", (event) => {
      const typing = ["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox";
      if (typing || event.ctrlKey || event.metaKey || event.altKey || !(document.activeElement === canvas || this.frame.matches(":hover"))) return;
      const tenth = (this.end - this.begin) / 10;
      const pointed = () => (this.pointer === null ? undefined : this.timeAt(this.pointer));
      const left = () => this.move(-tenth), right = () => this.move(tenth), nearer = () => this.zoom(0.7, pointed()), further = () => this.zoom(1.4, pointed());
      const keys = { ArrowLeft: left, a: left, ArrowRight: right, d: right, "+": nearer, w: nearer, "-": further, s: further, Home: () => this.reset(), Escape: () => this.clear() };
      const act = keys[event.key] ?? keys[event.key.toLowerCase()];
      if (act) (act(), event.preventDefault());
    });
    this.frame.addEventListener("scroll", () => this.later());
    addEventListener("resize", () => this.resize());
    addEventListener("beforeprint", () => this.resize(this.height));
    addEventListener("afterprint", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }

  clear() {
    this.range = this.marked = null;
    this.say();
    this.later();
  }

  get labels() { return this.canvas.clientWidth < 600 ? 64 : LABELS; }
  get perPixel() { return (this.end - this.begin) / Math.max(1, this.canvas.clientWidth - this.labels); }
  timeAt(x) { return this.begin + (x - this.labels) * this.perPixel; }

  // -- drawing ---------------------------------------------------------------------------------------

  draw() {
    const { context, canvas } = this, scroll = this.frame.scrollTop, width = canvas.clientWidth, height = canvas.clientHeight;
    const colours = Object.fromEntries(["ink", "faint", "line", "paper", "forward", "backward", "update", "wait", "accent"].map((name) => [name, colour(name)]));
    // asked once: each question about the canvas's width may cost a layout of the page
    const { labels, perPixel, begin } = this, x = (time) => labels + (time - begin) / perPixel;
    this.left = labels;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(labels, AXIS, width, height);
    context.clip();
    const inView = this.rows.filter((row) => row.top + row.height - scroll > AXIS && row.top - scroll < height);
    for (const row of inView) {
      const top = row.top - scroll;
      if (row.kind === "compute") this.drawCompute(row, top, x, width, colours);
      else if (row.kind === "messages") this.drawMessages(row, top, x, width, colours);
      else if (row.kind === "link") this.drawLink(row, top, x, colours);
      else this.drawIterations(row, top, x, colours);
    }
    this.drawAsked(scroll, x, height, colours);
    context.restore();
    for (const row of inView) {
      context.fillStyle = row.kind === "heading" ? colours.ink : colours.faint;
      context.font = row.kind === "heading" ? "600 13px system-ui, sans-serif" : row.height < 10 ? "9px system-ui, sans-serif" : "12px system-ui, sans-serif";
      const middle = row.top - scroll + (row.kind === "heading" ? NAME / 2 + 2 : Math.min(row.height, 40) / 2);
      if (middle > AXIS) context.fillText(row.text, 6, middle, row.kind === "heading" ? width : this.left - 8);
    }
    this.drawAxis(x, width, colours);
  }

  drawAsked(scroll, x, height, { accent, ink }) {
    const { context } = this;
    if (this.range) {
      const [left, right] = this.range.map(x);
      context.fillStyle = accent;
      context.globalAlpha = 0.18;
      context.fillRect(left, AXIS, right - left, height);
      context.globalAlpha = 1;
      context.fillRect(left, AXIS, 1, height);
      context.fillRect(right, AXIS, 1, height);
    }
    if (!this.marked?.held) return;
    const { row, wait, held, after } = this.marked;
    const outline = (bar, dash) => {
      const lane = this.rows.find((each) => each.kind === "messages" && each.bars.includes(bar)), top = lane.top - scroll + bar.track * lane.each;
      context.setLineDash(dash);
      context.strokeRect(x(bar.start) - 1, top - 1.5, x(bar.end) - x(bar.start) + 2, lane.each + 2);
      return top;
    };
    context.strokeStyle = ink;
    context.lineWidth = 2;
    if (after) outline(after, [4, 3]);
    const top = outline(held, []);
    context.strokeRect(x(wait.begin), row.top - scroll, x(wait.begin + wait.length) - x(wait.begin), row.height);
    context.beginPath();
    context.moveTo(x(held.end), top);
    context.lineTo(x(held.end), row.top - scroll + row.height);
    context.stroke();
    context.lineWidth = 0.8;
  }

  drawIterations(row, top, x, { line, faint }) {
    const { context } = this, { iterations } = row.arm.timeline;
    context.strokeStyle = line;
    context.fillStyle = faint;
    for (let at = 0; at < iterations.length; at += 2) {
      const left = x(iterations[at]), right = x(iterations[at + 1]);
      context.strokeRect(left, top + NAME + 1, right - left, HEADING - NAME - 4);
      if (right - left > 60 && left + 6 > this.left) context.fillText(`a step of ${us(iterations[at + 1] - iterations[at])}`, left + 6, top + (NAME + HEADING) / 2, right - left - 8);
    }
  }

  drawCompute(row, top, x, width, colours) {
    const { context } = this;
    // waits are inside of what waits, and go on top
    for (const waits of [false, true]) {
      let drawn = -1;  // up to which pixel, so that thousands of thin bars cost one a pixel
      for (const { kind, begin, length } of row.bars) {
        const left = x(begin), right = x(begin + length);
        if ((kind === "wait") !== waits || right < this.left || left > width || right < drawn) continue;
        context.fillStyle = colours[kind];
        context.fillRect(left, top, Math.max(0.5, right - left - 0.3), row.height);
        drawn = left + 0.5;
      }
    }
  }

  drawMessages(row, top, x, width, { faint, ink }) {
    const { context } = this, { each } = row, thick = each - 1, drawn = new Float64Array(MOST_TRACKS);
    const found = this.found?.get(row.arm).messages, strength = (message) => (!found || found.has(message) ? 1 : 0.15);
    context.fillStyle = faint;
    for (const { track, ready, start } of row.bars) {
      const left = x(ready), right = x(start);
      if (right - left > 1 && right > this.left && left < width) context.fillRect(left, top + track * each + thick / 2, right - left, 0.7);
    }
    for (const { track, message, start, left, end } of row.bars) {
      const begin = x(start), finish = x(end);
      if (finish < this.left || begin > width || finish < drawn[track]) continue;
      const middle = Math.max(begin + 0.8, x(left));
      context.fillStyle = row.fills[message];
      context.globalAlpha = strength(message);
      context.fillRect(begin, top + track * each, middle - begin, thick);
      if (finish > middle) {
        context.globalAlpha = 0.55 * strength(message);
        context.fillRect(middle, top + track * each, finish - middle, thick);
      }
      drawn[track] = begin + 0.8;
    }
    context.globalAlpha = 1;
    context.strokeStyle = ink;
    context.lineWidth = 0.8;
    for (const { track, message, start, end } of row.outlines) {
      const begin = x(start), finish = x(end);
      context.globalAlpha = strength(message);
      if (finish > this.left && begin < width) context.strokeRect(begin, top + track * each + 0.4, Math.max(0.5, finish - begin), thick - 0.8);
    }
    context.globalAlpha = 1;
  }

  drawLink(row, top, x, { accent, wait, line }) {
    const { context } = this, { samples } = row;
    context.strokeStyle = line;
    context.strokeRect(this.left, top, this.canvas.clientWidth, LINK);
    context.fillStyle = accent;
    context.globalAlpha = 0.6;
    for (let at = 0; at + 3 < samples.length; at += 3) {
      const high = (samples[at + 1 + 3] / row.most) * (LINK - 2);
      context.fillRect(x(samples[at]), top + LINK - high, x(samples[at + 3]) - x(samples[at]), high);
    }
    context.globalAlpha = 1;
    context.fillStyle = wait;
    for (let at = 0; at < samples.length; at += 3) if (samples[at + 2] > 0) context.fillRect(x(samples[at]) - 1, top, 2, 4);
  }

  drawAxis(x, width, { line, faint, paper }) {
    const { context } = this;
    context.fillStyle = paper;
    context.fillRect(0, 0, width, AXIS);
    context.font = "11px system-ui, sans-serif";
    const rough = 90 * this.perPixel, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    for (let time = Math.ceil(this.begin / step) * step; time < this.end; time += step) {
      if (x(time) < this.left) continue;
      context.fillStyle = line;
      context.fillRect(x(time), AXIS - 5, 1, 5);
      context.fillStyle = faint;
      context.fillText(us(Math.round(time)), x(time) + 3, AXIS / 2);
    }
  }

  // -- what is under the pointer ---------------------------------------------------------------------

  under(event) {
    const y = event.offsetY + this.frame.scrollTop, isIn = event.offsetX > this.labels && event.offsetY > AXIS;
    const row = isIn ? this.rows.find((each) => y >= each.top && y < each.top + each.height) : undefined;
    return { row, y, time: this.timeAt(event.offsetX), near: 1.5 * this.perPixel };
  }

  hover(event) {
    const { row, y, time, near } = this.under(event), text = row ? this.describe(row, y - row.top, time, near) : null;
    this.pointer = event.offsetX > this.labels ? event.offsetX : null;
    if (text) tip.show(`${row.arm.name}, ${text}`, event);
    else tip.hide();
  }

  describe(row, y, time, near) {
    if (row.kind === "messages") {
      const track = Math.floor(y / row.each);
      const bar = row.bars.find((each) => each.track === track && each.start - near <= time && time <= each.end + near);
      if (!bar) return null;
      const { message, ready, start, left, end } = bar;
      const phases = end > left ? `, left after ${us(left - start)}` : "";
      return `${row.arm.plan.messages[message][3]}\nready at ${us(ready)}, waited ${us(start - ready)} to start${phases}, summed after ${us(end - start)}`;
    }
    if (row.kind === "compute") {
      const under = row.bars.filter((bar) => bar.begin - near <= time && time <= bar.begin + bar.length + near);
      if (!under.length) return null;
      const { kind, subject, length } = under.reduce((least, bar) => (bar.length <= least.length ? bar : least));
      const what = subject < 0 ? "" : kind === "forward" ? ` of ${this.trial.layers[subject] ?? subject}` : ` for ${row.arm.plan.tensors[subject][0]}`;
      return `${row.text}: ${kind === "wait" ? "waits" : kind}${what}, ${us(length)}`;
    }
    if (row.kind === "link") {
      let at = 0;
      while (at + 3 < row.samples.length && row.samples[at + 3] < time) at += 3;
      return row.samples.length ? `${row.text}: ${row.samples[at + 1]} Mbit/s, ${bytes(row.samples[at + 2])} queued` : null;
    }
    return null;
  }
}
