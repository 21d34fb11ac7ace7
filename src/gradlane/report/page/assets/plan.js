"use strict";
// A plan as a picture: above, the model's tensors in order of readiness; below, a row for each message
// at the bytes that it carries, from the one that starts first to the last.

const MOST_ROWS = 120;

function planPicture(plan) {
  const total = plan.tensors.reduce((sum, [, size]) => sum + size, 0);
  // small tensors would vanish beside large ones: the width goes with the square root of the size
  const widths = plan.tensors.map(([, size]) => Math.sqrt(size));
  const scale = 1000 / widths.reduce((sum, width) => sum + width, 0);
  const starts = [];
  widths.reduce((at, width, tensor) => ((starts[tensor] = at), at + width * scale), 0);
  const order = plan.messages.map((_, at) => at).sort((a, b) => plan.messages[a][2] - plan.messages[b][2]);
  const rows = order.slice(0, MOST_ROWS), height = Math.max(3, Math.min(12, 360 / rows.length));
  const ranks = [...new Set(plan.messages.map((message) => message[1]))].sort((a, b) => a - b);
  const picture = el("svg", { class: "plan", viewBox: `0 0 1000 ${30 + rows.length * height}`, role: "img", "aria-label": plan.headline });
  const say = (shape, text) => {
    shape.addEventListener("pointermove", (event) => tip.show(text, event));
    shape.addEventListener("pointerleave", () => tip.hide());
    return shape;
  };
  plan.tensors.forEach(([name, size], tensor) => {
    const box = el("rect", { x: starts[tensor], y: 0, width: Math.max(0.3, widths[tensor] * scale - 0.5), height: 20, fill: colour(tensor % 2 ? "backward" : "forward") });
    picture.append(say(box, `${name}\n${bytes(size)}, the ${tensor + 1}. gradient to be ready`));
  });
  rows.forEach((message, row) => {
    const [lane, rank, place, text] = plan.messages[message];
    const part = ranks.length > 1 ? ranks.indexOf(rank) / (ranks.length - 1) : 0;
    const slices = plan.slices[message];
    for (let at = 0; at < slices.length; at += 3) {
      const [tensor, offset, size] = slices.slice(at, at + 3);
      const whole = plan.tensors[tensor][1], width = widths[tensor] * scale;
      const box = el("rect", {
        x: starts[tensor] + (width * offset) / whole, y: 28 + row * height,
        width: Math.max(0.6, (width * size) / whole - 0.4), height: height - 0.8, fill: urgency(part),
      });
      picture.append(say(box, `${text}\nlane ${lane}, starts as number ${place + 1} of ${plan.messages.length}`));
    }
  });
  const rest = order.length - rows.length;
  return el("div", {}, el("p", { class: "faint" }, plan.headline + (rest > 0 ? `; the first ${MOST_ROWS} messages` : "")), picture);
}
