// Helpers that create elements and format numbers. All data is inserted as text; no code of the page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const $ = (id) => document.getElementById(id);

// Writes only changed text, so that screen readers stay quiet and the layout is not recomputed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

export const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);

export function count(value) {
  const number = Number(value);
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)}k`;
  return number.toLocaleString("en");
}

export function rate(value) {
  return value >= 100 ? count(Math.round(value)) : value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

export function seconds(value) {
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  const ms = value * 1000;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function duration(value) {
  const s = Math.floor(value), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s % 60} s` : `${s} s`;
}

export const bytes = (value) =>
  value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : value >= 2 ** 20 ? `${(value / 2 ** 20).toFixed(1)} MiB`
    : `${(value / 2 ** 10).toFixed(1)} KiB`;

// The end of a request id, because the beginning is the same for all requests of some seconds.
export const shortId = (id) => (id.length > 12 ? `…${id.slice(-8)}` : id);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${Number(number) === 1 ? one : many}`;
