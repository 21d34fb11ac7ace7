"use strict";
// Elements, numbers as text, colours. All text goes in as text nodes: what files say is never HTML.

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "g", "title", "text", "line"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function table(headings, rows, best = -1) {
  const line = (tag, cells) => cells.map((cell) => el(tag, { class: typeof cell === "string" && cell.length > 60 ? "long" : null }, String(cell)));
  const rowsShown = el("table", {},
    el("thead", {}, el("tr", {}, ...line("th", headings))),
    el("tbody", {}, ...rows.map((row, at) => el("tr", { class: at === best ? "best" : null }, ...line("td", row)))));
  const box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": headings.join(", ") }, rowsShown);
  const hint = el("p", { class: "hint", hidden: true }, "More columns to the right: swipe or scroll the table.");
  const look = () => (hint.hidden = box.scrollWidth - box.clientWidth - box.scrollLeft < 2);
  box.addEventListener("scroll", look);
  const sizes = new ResizeObserver(look);
  sizes.observe(box);
  sizes.observe(rowsShown);
  return el("div", {}, hint, box);
}

const ms = (value) => (value === null || value === undefined ? "-" : value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2));
const us = (value) => (Math.abs(value) >= 1000 ? `${ms(value / 1000)} ms` : `${value.toFixed(0)} us`);
const percent = (value) => (value === null || value === undefined ? "-" : `${Math.round(100 * value)} %`);

function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  return `${value} B`;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// from urgent, yellow, to patient, dark blue
const urgency = (part) => `hsl(${48 + 190 * part} 75% ${58 - 20 * part}%)`;

const tip = {
  box: null,
  show(text, event) {
    if (!this.box) document.body.append((this.box = el("div", { class: "tip" })));
    this.box.textContent = text;
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    this.box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    this.box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};
