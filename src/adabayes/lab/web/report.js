// Draws the report from the JSON in it. Everything that can be worked out beforehand was, in report.py.
const state = { when: "final", split: "test", metric: "error", x: "epoch", logx: false, logy: true, shown: new Set(data.optimizers.map((o) => o.name)), preset: "all" };
const colour = (o) => (dark.matches ? o.dark : o.light);
const swatch = (o) => make("span", { class: "swatch", style: `background:${colour(o)}`, "aria-hidden": "true" });
const fixed = (value, digits) => (value === null || value === undefined ? "" : value.toFixed(digits));
const withError = (m, digits) => (m ? fixed(m.mean, digits) + (m.error === null ? "" : " ± " + fixed(m.error, digits)) : "");

// The table

let order = { column: null, up: true };
const figures = (when) => data.panels.flatMap((panel) => [
  { panel, key: `${when}_test_error`, digits: 2, title: "error %" },
  { panel, key: `${when}_test_loss`, digits: 3, title: "loss" },
]);

function tableRows() {
  const columns = figures(state.when);
  const rows = data.optimizers.map((o) => ({ o, cells: columns.map((c) => data.summary[c.panel.key]?.[o.name]?.[c.key] ?? null) }));
  if (order.column !== null) {
    const value = (row) => (order.column === -1 ? row.o.label : row.cells[order.column]?.mean ?? Infinity);
    rows.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (order.up ? 1 : -1));
  }
  const least = (column, of) => Math.min(...rows.filter(of).map((row) => row.cells[column]?.mean ?? Infinity));
  const best = columns.map((_, i) => least(i, () => true));
  const adaptive = columns.map((_, i) => least(i, (row) => row.o.adaptive));
  return { columns, rows, best, adaptive };
}

function drawTable() {
  const { columns, rows, best, adaptive } = tableRows();
  const header = (text, column) => make("th", { scope: "col", "aria-sort": order.column === column ? (order.up ? "ascending" : "descending") : "none" },
    make("button", { type: "button", onclick: () => { order = { column, up: order.column === column ? !order.up : true }; drawTable(); } }, text));
  const top = make("tr", {}, make("th", {}, ""), ...data.panels.map((p) => make("th", { colspan: 2 + (p.published ? 2 : 0), style: "text-align:center" }, p.title)));
  const names = make("tr", {}, header("optimizer", -1));
  columns.forEach((c, i) => {
    names.append(header(c.title, i));
    if (c.panel.published && i % 2 === 1) names.append(make("th", {}, "paper %"), make("th", {}, "paper loss"));
  });
  const body = rows.map(({ o, cells }) => {
    const row = make("tr", { "data-optimizer": o.name }, make("td", {}, swatch(o), o.label));
    cells.forEach((cell, i) => {
      const marks = [cell && cell.mean === best[i] ? "best" : "", cell && o.adaptive && cell.mean === adaptive[i] ? "adaptive" : ""].join(" ").trim();
      row.append(make("td", { class: marks || undefined }, withError(cell, columns[i].digits)));
      const paper = columns[i].panel.published;
      if (paper && i % 2 === 1) row.append(make("td", { class: "soft" }, fixed(paper[o.name]?.[0], 2)), make("td", { class: "soft" }, fixed(paper[o.name]?.[1], 3)));
    });
    return row;
  });
  renew(get("results"), make("thead", {}, top, names), make("tbody", {}, ...body));
  get("table-note").textContent = "Bold: the best. Underlined: the best adaptive method (all but SGD), as the paper marks them. "
    + (state.when === "best" ? "Of each run the best epoch, for error and loss apart, chosen on the data that is shown: flattering, and what the paper's table has." : "Of each run the last epoch.");
}

function copied(kind) {
  const { columns, rows, best, adaptive } = tableRows();
  const head = ["optimizer", ...columns.map((c) => `${c.panel.title} ${c.title}`)];
  const cell = (row, i) => {
    const text = withError(row.cells[i], columns[i].digits);
    if (!text) return "";
    const is = { best: row.cells[i].mean === best[i], adaptive: row.o.adaptive && row.cells[i].mean === adaptive[i] };
    if (kind === "markdown") return is.best ? `**${text}**` : is.adaptive ? `*${text}*` : text;
    const tex = text.replace("±", "$\\pm$");
    return is.best ? `\\textbf{${tex}}` : is.adaptive ? `\\underline{${tex}}` : tex;
  };
  const lines = rows.map((row) => [row.o.label, ...columns.map((_, i) => cell(row, i))]);
  if (kind === "markdown") return [head, head.map((_, i) => (i ? "---:" : "---")), ...lines].map((line) => `| ${line.join(" | ")} |`).join("\n") + "\n";
  const tex = (line) => line.join(" & ") + " \\\\";
  return ["\\begin{tabular}{l" + "r".repeat(columns.length) + "}", "\\toprule", tex(head.map((text) => text.replace("%", "\\%"))), "\\midrule", ...lines.map(tex), "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
}

function drawTableBar() {
  const button = (kind, text) => {
    const node = make("button", { type: "button", id: `copy-${kind}`, onclick: () => copyText(copied(kind), node) }, text);
    return node;
  };
  renew(get("table-bar"),
    choice("epoch", [["final", "last"], ["best", "best"]], state.when, (value) => { state.when = value; drawTableBar(); drawTable(); }),
    button("markdown", "copy as Markdown"), button("latex", "copy as LaTeX"));
}

// The curves

const names = { error: "error (%)", loss: "loss", epoch: "epoch", seconds: "seconds of training" };

function traces(panel) {
  const found = [];
  for (const o of data.optimizers) {
    const curve = data.curves[panel.key]?.[o.name];
    if (!curve || !state.shown.has(o.name)) continue;
    const of = curve[`${state.split}_${state.metric}`];
    const x = state.x === "epoch" ? of.mean.map((_, i) => i + 1) : curve.seconds;
    const line = { color: colour(o), width: o.ours ? 2.6 : 1.7, dash: o.dash };
    if (of.error) {
      const low = of.mean.map((m, i) => Math.max(m - of.error[i], m / 50)), high = of.mean.map((m, i) => m + of.error[i]);
      found.push({ x: [...x, ...x.slice().reverse()], y: [...high, ...low.reverse()], fill: "toself", fillcolor: colour(o) + "22", line: { width: 0 }, mode: "lines", hoverinfo: "skip", name: `${o.name} band` });
    }
    found.push({ x, y: of.mean, mode: "lines", line, name: o.label, hovertemplate: "%{y:.4g}" });
  }
  return found;
}

function drawCurves() {
  const grid = get("curves");
  if (!grid.children.length) {
    for (const panel of data.panels) {
      grid.append(make("div", { class: "panel" }, make("h3", {}, panel.title), make("div", { class: "plot", id: `plot-${panel.key}`, role: "img", "aria-label": `curves of ${panel.title}` })));
    }
  }
  for (const panel of data.panels) {
    Plotly.react(`plot-${panel.key}`, traces(panel), layout({
      xaxis: { title: { text: names[state.x] }, ...scale(state.logx) },
      yaxis: { title: { text: `${state.split} ${names[state.metric]}` }, ...scale(state.logy) },
    }), config);
  }
}

function drawCurveBar() {
  const set = (key) => (value) => { state[key] = value; drawCurveBar(); drawCurves(); };
  const toggle = (key, text) => make("button", { type: "button", id: key, "aria-pressed": String(state[key]), onclick: () => { state[key] = !state[key]; drawCurveBar(); drawCurves(); } }, text);
  const preset = (value) => {
    const found = data.presets.find((p) => p.key === value);
    state.preset = value;
    state.shown = new Set(found.optimizers);
    if (found.split) state.split = found.split;
    drawCurveBar(); drawCurves();
  };
  renew(get("curve-bar"),
    choice("show", data.presets.map((p) => [p.key, p.label]), state.preset, preset),
    choice("on", [["test", "test"], ["train", "training"]], state.split, set("split")),
    choice("", [["error", "error"], ["loss", "loss"]], state.metric, set("metric")),
    choice("over", [["epoch", "epochs"], ["seconds", "time"]], state.x, set("x")),
    make("fieldset", {}, make("legend", {}, "log"), toggle("logx", "x"), toggle("logy", "y")));
  renew(get("legend"), ...data.optimizers.map((o) => make("button", {
    type: "button", "data-optimizer": o.name, "aria-pressed": String(state.shown.has(o.name)),
    onclick: () => { state.shown.has(o.name) ? state.shown.delete(o.name) : state.shown.add(o.name); state.preset = ""; drawCurveBar(); drawCurves(); },
  }, swatch(o), o.label)));
}

// What each weight gets

const rates = { run: 0, epoch: -1, layer: "" };

function drawRates() {
  if (!data.rates.length) return;
  get("rates-section").hidden = false;
  const run = data.rates[rates.run];
  if (rates.epoch < 0 || rates.epoch >= run.epochs.length) rates.epoch = run.epochs.length - 1;
  const now = run.epochs[rates.epoch];
  const layers = run.layers.filter((l) => !rates.layer || l === rates.layer);
  const x = [], y = [];
  for (const layer of layers) { x.push(...now.adam[run.layers.indexOf(layer)]); y.push(...now.gain[run.layers.indexOf(layer)]); }
  const left = Math.min(now.lr_sgd / 30, ...x.filter((v) => v > 0)) / 2, right = now.lr_sgd * 1000;
  const at = spaced(left, right, 200), colours = hues();
  const adam = at.filter((a) => a < 3 * now.lr_sgd), sgd = at.filter((a) => a > now.lr_sgd / 3);
  Plotly.react("rates", [
    { x: x.map((v) => Math.min(v, right)), y, mode: "markers", type: "scattergl", name: "weights", marker: { size: 4, color: colours.dots, opacity: 0.45 }, hovertemplate: "Adam %{x:.2g}, gets %{y:.2g}<extra></extra>" },
    line(adam, adam, "Adam, lr / rms(g)", colours.adam, "dash"), line(sgd, sgd.map(() => now.lr_sgd), "SGD, lr_sgd", colours.sgd, "dash"),
    line(at, at.map((a) => fixedPoint((now.lr / a) ** 2, now.lr, now.lr_sgd)), "fixed point", colours.point, "solid"),
    line([now.lr_sgd, now.lr_sgd], [left, 3 * now.lr_sgd], "crossover", colours.cross, "dot"),
  ], { ...layout({
    xaxis: { type: "log", title: { text: "Adam's learning rate, lr / √⟨g²⟩" }, range: [Math.log10(left), Math.log10(right)], exponentformat: "power", dtick: 1 },
    yaxis: { type: "log", title: { text: "effective learning rate" }, exponentformat: "power", dtick: 1 },
  }), hovermode: "closest", showlegend: true, legend: { x: 0.99, y: 0.02, xanchor: "right", yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" } }, config);
  get("rates-epoch").textContent = `epoch ${now.epoch + 1}`;
}

function drawRatesBar() {
  if (!data.rates.length) return;
  const run = data.rates[rates.run];
  const pick = (label, id, options, current, choose) => make("label", {}, label + " ", make("select", { id, onchange: (event) => choose(event.target.value) },
    ...options.map(([value, text]) => make("option", { value, selected: String(value) === String(current) ? "" : undefined }, text))));
  const slider = make("input", { type: "range", id: "rates-slider", min: 0, max: run.epochs.length - 1, value: rates.epoch < 0 ? run.epochs.length - 1 : rates.epoch, "aria-label": "epoch",
    oninput: (event) => { rates.epoch = Number(event.target.value); drawRates(); } });
  renew(get("rates-bar"),
    pick("run", "rates-run", data.rates.map((r, i) => [i, r.title]), rates.run, (value) => { rates.run = Number(value); rates.layer = ""; rates.epoch = -1; drawRatesBar(); drawRates(); }),
    pick("layer", "rates-layer", [["", "all"], ...run.layers.map((l) => [l, l])], rates.layer, (value) => { rates.layer = value; drawRates(); }),
    slider, make("span", { id: "rates-epoch" }));
}

// The rest

function drawText() {
  get("title").textContent = data.title;
  get("lead").textContent = data.lead;
  get("problems").replaceChildren(...data.problems.map((text) => make("p", { class: "warn" }, text)));
  const row = (cells, tag = "td") => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  get("cost").replaceChildren(make("thead", {}, row(["optimizer", ...data.panels.flatMap((p) => [`${p.title}: ms a step`, "state, bytes a weight"])], "th")),
    make("tbody", {}, ...data.optimizers.map((o) => row([o.label, ...data.panels.flatMap((p) => {
      const cost = data.summary[p.key]?.[o.name];
      return [withError(cost?.milliseconds_per_step, 1), fixed(cost?.state_bytes?.mean, 1)];
    })]))));
  get("made").replaceChildren(make("pre", {}, data.commands.join("\n")), ...data.environments.map((e) => make("p", { class: "soft" }, e)));
}

function drawAll() {
  drawText(); drawTableBar(); drawTable(); drawCurveBar(); drawCurves(); drawRatesBar(); drawRates();
}
dark.addEventListener("change", drawAll);
drawAll();
