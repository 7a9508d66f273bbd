"use strict";
// Shared by all pages.
const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const get = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Replaces the children of a node, and keeps the keyboard's focus.
function renew(node, ...children) {
  const focusable = () => [...node.querySelectorAll("button, select, input")];
  const at = focusable().indexOf(document.activeElement);
  node.replaceChildren(...children);
  if (at >= 0) focusable()[at]?.focus();
}

// A row of buttons, one of which is pressed.
function choice(label, options, current, choose) {
  const set = make("fieldset", {}, make("legend", {}, label));
  for (const [value, text] of options) {
    set.append(make("button", { type: "button", "data-value": value, "aria-pressed": String(current === value), onclick: () => choose(value) }, text));
  }
  return set;
}

function layout(extra = {}) {
  const fore = dark.matches ? "#e9eaec" : "#1d1f23", line = dark.matches ? "#363b43" : "#e3e5e9";
  const axis = { gridcolor: line, zeroline: false, linecolor: line, automargin: true };
  return {
    margin: { l: 8, r: 12, t: 12, b: 8 }, showlegend: false, hovermode: "x unified", dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: fore, size: 12 }, hoverlabel: { bgcolor: dark.matches ? "#1c1f24" : "#fff", font: { color: fore } },
    xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis },
  };
}
const config = { displayModeBar: false, responsive: true };

// Logarithmic axes with whole numbers at 1, 2 and 5, which Plotly would shorten to their first digit.
const ticks = Array.from({ length: 12 }, (_, i) => i - 5).flatMap((power) => [1, 2, 5].map((digit) => Number((digit * 10 ** power).toPrecision(1))));
const scale = (log) => (log ? { type: "log", tickmode: "array", tickvals: ticks, ticktext: ticks.map(String) } : { type: "linear", tickmode: "auto" });

// A paired difference and its interval.
const signed = (value) => (value > 0 ? "+" : "") + Number(value.toPrecision(3));
const withInterval = (d) => `${signed(d.mean)} (${signed(d.low)} to ${signed(d.high)})`;

// Text for Plotly, which interprets some HTML.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

// The two limits of the gain, and where the filter settles between them: the paper's Eq. 21.
const hues = () => dark.matches
  ? { adam: "#7cc4f5", sgd: "#f5b041", point: "#6fd69c", cross: "#c9a0dc", dots: "#c9ccd1" }
  : { adam: "#0072b2", sgd: "#c46a00", point: "#117733", cross: "#882255", dots: "#333333" };
const fixedPoint = (meanSquare, eta, sigma2) => 1 / (0.5 / sigma2 + Math.sqrt(0.25 / sigma2 ** 2 + meanSquare / eta ** 2));
const spaced = (from, to, count) => Array.from({ length: count }, (_, i) => from * (to / from) ** (i / (count - 1)));
const line = (x, y, name, color, dash) => ({ x, y, name, mode: "lines", line: { color, width: 1.8, dash } });

async function copyText(text, button) {
  button.dataset.label ??= button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // pages opened from disk may not be allowed to, so copy in the old way
    const area = make("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  clearTimeout(button.timer);
  button.timer = setTimeout(() => { button.textContent = button.dataset.label; }, 1200);
}
