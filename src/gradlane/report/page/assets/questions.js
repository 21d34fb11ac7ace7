"use strict";
// What can be asked of a rank's bars: sums over a range of time, which message held a wait, what carries a tensor.

const ROUNDED = 2;  // us: times were rounded when they were put on the page

const messageBytes = (plan, message) => plan.slices[message].reduce((sum, number, at) => (at % 3 === 2 ? sum + number : sum), 0);
const carries = (plan, message, has) => plan.slices[message].some((tensor, at) => at % 3 === 0 && has(tensor));

// Time in [from, to] that is computed and waited in, and the bytes of messages, each by the part of its bar in the range.
function sumsIn(plan, compute, messages, from, to) {
  const covered = (bars) => {
    let sum = 0, last = from;
    for (const { begin, length } of bars) {  // by begin: what lies in another counts once
      const start = Math.max(begin, last), end = Math.min(begin + length, to);
      if (end > start) [sum, last] = [sum + end - start, end];
    }
    return sum;
  };
  const waiting = covered(compute.filter((bar) => bar.kind === "wait"));
  let carried = 0;
  for (const { message, start, end } of messages) {
    const part = Math.min(end, to) - Math.max(start, from);
    if (part > 0) carried += (messageBytes(plan, message) * part) / (end - start);
  }
  return { computing: covered(compute) - waiting, waiting, bytes: Math.round(carried) };
}

// The message of the tensor that was waited for (-1: of any) that arrived last while the wait went on; null if none did.
function holderOf(plan, wait, messages) {
  const end = wait.begin + wait.length, has = (tensor) => wait.subject < 0 || tensor === wait.subject;
  const held = messages.filter((bar) => bar.end <= end + ROUNDED && bar.end >= wait.begin - ROUNDED && carries(plan, bar.message, has));
  return held.reduce((last, bar) => (!last || bar.end > last.end ? bar : last), null);
}

// The message whose end let another one of its lane start; null if it did not wait for one.
function startedAfter(plan, held, messages) {
  if (held.start - held.ready <= ROUNDED) return null;
  const lane = plan.messages[held.message][0];
  const earlier = messages.filter((bar) => bar !== held && plan.messages[bar.message][0] === lane && bar.left > held.ready && bar.left <= held.start + ROUNDED);
  return earlier.reduce((last, bar) => (!last || bar.left > last.left ? bar : last), null);
}

// The tensors whose names have a text in them, and the messages that carry one of them.
function carriersOf(plan, text) {
  const found = new Set(plan.tensors.flatMap(([name], tensor) => (name.toLowerCase().includes(text.toLowerCase()) ? [tensor] : [])));
  return { tensors: found, messages: new Set([...plan.messages.keys()].filter((message) => carries(plan, message, (tensor) => found.has(tensor)))) };
}
