"use strict";
// What the page of a run and the board share.
const el = (tag, attributes, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) if (value != null) made.setAttribute(name, value);
  made.append(...children.filter((child) => child != null));
  return made;
};
const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const amount = (value) => {
  if (typeof value !== "number") return value ?? "";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  for (const [unit, least] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) if (size >= least) return `${(value / least).toPrecision(4)}${unit}`;
  return Number.isInteger(value) || size >= 1000 ? whole(value) : value.toPrecision(4);
};
