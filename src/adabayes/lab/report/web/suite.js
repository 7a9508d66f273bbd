// Draws the suite's page from the JSON in it, which suite_page.py has computed.
const state = { clock: "steps", x: "steps", end: "loss", shown: new Set(data.optimizers.map((o) => o.name)) };
const colour = (o) => (dark.matches ? o.dark : o.light);
const short = (value, digits) => (value === null || value === undefined ? "-" : value.toFixed(digits));
const significant = (value) => (value === null || value === undefined ? "-" : Number(value.toPrecision(4)).toString());

function drawLegend() {
  renew(get("legend"), ...data.optimizers.map((o) => make("button", {
    type: "button", "aria-pressed": String(state.shown.has(o.name)),
    onclick: () => { if (!state.shown.delete(o.name)) state.shown.add(o.name); drawAll(); },
  }, swatch(o), o.label)));
}

function swatch(o) {
  const node = make("span", { class: "swatch", "aria-hidden": "true" });
  node.innerHTML = `<svg width="22" height="8"><line x1="0" y1="4" x2="22" y2="4" stroke="${colour(o)}" stroke-width="3"/></svg>`;
  return node;
}

function drawProfile(clock) {
  const traces = data.optimizers.filter((o) => state.shown.has(o.name)).map((o) => {
    const points = data.profiles[clock][o.name] ?? [];
    const last = points.length ? points[points.length - 1][1] : 0;
    const x = [1, ...points.map((p) => p[0]), data.widest], y = [points.length && points[0][0] === 1 ? points[0][1] : 0, ...points.map((p) => p[1]), last];
    return { x, y, name: plain(o.label), mode: "lines", line: { color: colour(o), width: o.ours ? 2.8 : 1.7, shape: "hv", dash: o.dash }, hovertemplate: "%{y:.0%}" };
  });
  Plotly.react(`profile-${clock}`, traces, layout({
    xaxis: { title: { text: `${clock}, as a multiple of the fastest` }, ...scale(true), range: [0, Math.log10(data.widest)] },
    yaxis: { title: { text: "share of workloads" }, range: [-0.02, 1.04], tickformat: ".0%" },
  }), config);
}

function table(id, columns, rows, least) {
  const best = columns.map((_, i) => (least ? Math.min(...rows.map((r) => r.values[i] ?? Infinity)) : NaN));
  const head = make("tr", {}, make("th", { scope: "col" }, "optimizer"), ...columns.map((c) => make("th", { scope: "col" }, c)));
  const body = rows.map((row) => make("tr", { "data-optimizer": row.o.name }, make("td", {}, swatch(row.o), row.o.label),
    ...row.texts.map((text, i) => make("td", {}, make("span", { class: row.values[i] === best[i] && Number.isFinite(best[i]) ? "best" : undefined }, ...[].concat(text))))));
  renew(get(id), make("thead", {}, head), make("tbody", {}, ...body));
}

function drawTimes() {
  const set = (value) => { state.clock = value; drawTimes(); };
  renew(get("clock-bar"), choice("", [["steps", "steps"], ["seconds", "seconds"], ["within", "within a run"]], state.clock, set));
  const key = state.clock === "within" ? "within" : `share_of_${state.clock}`;
  const rows = data.optimizers.map((o) => {
    const values = data.workloads.map((w) => w.reached[o.name]?.[key] ?? null);
    const mean = data.means[state.clock][o.name] ?? null;
    return { o, values: [...values, mean], texts: [...values, mean].map((v) => short(v, 2)) };
  });
  table("times", [...data.workloads.map((w) => w.name), "geometric mean"], rows, true);
}

function drawEnds() {
  const set = (value) => { state.end = value; drawEnds(); };
  renew(get("end-bar"), choice("", [["loss", "test loss"], ["error", "test error"], ["difference", "difference to AdamW"]], state.end, set));
  const rows = data.optimizers.map((o) => {
    const cells = data.workloads.map((w) => w.ends[o.name]);
    if (state.end === "difference") {
      return { o, values: cells.map((c) => c?.difference?.mean ?? null), texts: cells.map((c) => (c?.difference
        ? [signed(c.difference.mean), make("div", { class: "soft" }, `${signed(c.difference.low)} to ${signed(c.difference.high)}`), make("div", { class: "soft" }, c.difference.verdict)] : "")) };
    }
    return { o, values: cells.map((c) => c?.[state.end]?.mean ?? null), texts: cells.map((c) => (c?.[state.end]
      ? [significant(c[state.end].mean), make("div", { class: "soft" }, c[state.end].half === null ? "" : `± ${Number(c[state.end].half.toPrecision(2))}`)] : "-")) };
  });
  table("ends", data.workloads.map((w) => w.name + (state.end === "error" ? ` (${w.error})` : "")), rows, true);
  get("end-note").textContent = state.end === "difference"
    ? `Paired over seeds, in test loss, with a 95 % interval; below zero is better. "Better" and "worse": ${data.test}`
    : `Mean over seeds with a 95 % interval, on the test set, at the end of training. Bold: the best.`;
}

function drawCurves() {
  const grid = get("curves");
  const set = (value) => { state.x = value; drawCurves(); };
  renew(get("curve-bar"), choice("against", [["steps", "steps"], ["seconds", "seconds"]], state.x, set));
  if (!grid.children.length) {
    for (const w of data.workloads) {
      grid.append(make("div", { class: "panel" }, make("h3", {}, `${w.name}: ${w.description}`), make("div", { class: "plot", id: `curve-${w.name}`, role: "img", "aria-label": `curves of ${w.name}` })));
    }
  }
  for (const w of data.workloads) {
    const traces = data.optimizers.filter((o) => state.shown.has(o.name) && w.curves[o.name]).map((o) => {
      const curve = w.curves[o.name];
      return { x: curve[state.x], y: curve.loss, name: plain(o.label), mode: "lines", line: { color: colour(o), width: o.ours ? 2.6 : 1.6, dash: o.dash }, hovertemplate: "%{y:.4g}" };
    });
    if (w.target !== null) {
      const all = traces.flatMap((t) => t.x);
      traces.push({ x: [0, Math.max(1, ...all)], y: [w.target, w.target], mode: "lines", name: "target", line: { color: "#888", width: 1, dash: "dot" }, hoverinfo: "skip" });
    }
    Plotly.react(`curve-${w.name}`, traces, layout({
      xaxis: { title: { text: state.x === "steps" ? "steps" : "seconds of training, one thread" } },
      yaxis: { title: { text: "validation loss" }, ...scale(true), range: w.range },
    }), config);
  }
}

function drawBands() {
  const rows = data.optimizers.map((o) => {
    const cells = data.workloads.map((w) => w.bands[o.name]);
    return { o, values: cells.map(() => null), texts: cells.map((c) => (c ? [significant(c.lr), make("div", { class: "soft" }, `× ${c.factor.toFixed(1)}`)] : "-")) };
  });
  table("bands", data.workloads.map((w) => w.name), rows, false);
}

function drawAll() { drawLegend(); drawProfile("steps"); drawProfile("seconds"); drawTimes(); drawEnds(); drawCurves(); drawBands(); }

get("title").textContent = data.title;
get("lead").textContent = data.lead;
get("problems").append(...data.problems.map((text) => make("p", { class: "warn" }, text)));
get("made").append(...data.made.map((text) => make("p", { class: "soft" }, text)),
  make("pre", {}, data.commands.join("\n")));
drawAll();
dark.addEventListener("change", drawAll);
