// Draws the report from the JSON in the page, which adabayes.lab.report has computed.
const state = { when: data.panels.some((p) => p.published) ? "best" : "final", split: "test", metric: "error", x: "epoch", logx: false, logy: true, shown: new Set(data.optimizers.map((o) => o.name)), preset: "all" };
const colour = (o) => (dark.matches ? o.dark : o.light);
const dashes = { solid: "", dash: "6 3", dot: "2 3", dashdot: "7 3 2 3", longdash: "10 3" };
function swatch(o) {  // a piece of its line
  const node = make("span", { class: "swatch", "aria-hidden": "true" });
  node.innerHTML = `<svg width="26" height="8"><line x1="0" y1="4" x2="26" y2="4" stroke="${colour(o)}" stroke-width="3" stroke-dasharray="${dashes[o.dash]}"/></svg>`;
  return node;
}
const fixed = (value, digits) => (value === null || value === undefined ? "" : value.toFixed(digits));
const withError = (m, digits) => (m ? fixed(m.mean, digits) + (m.error === null ? "" : " ± " + fixed(m.error, digits)) : "");

// The table

let order = { column: null, up: true };
const figures = (when) => data.panels.flatMap((panel) => [
  { panel, key: `${when}_test_error`, digits: panel.digits, title: panel.error },
  { panel, key: `${when}_test_loss`, digits: panel.loss_digits, title: "loss" },
]);

function tableRows() {
  const columns = figures(state.when);
  const rows = data.optimizers.map((o) => ({ o, cells: columns.map((c) => data.summary[c.panel.key]?.[o.name]?.[c.key] ?? null) }));
  if (order.column !== null) {
    const value = (row) => (order.column === -1 ? row.o.label.toLowerCase() : row.cells[order.column]?.mean);
    const sign = order.up ? 1 : -1;  // missing figures come last in both directions
    rows.sort((a, b) => (value(a) === undefined) - (value(b) === undefined) || (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
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
  const top = make("tr", {}, make("th", {}, ""), ...data.panels.map((p) => make("th", { colspan: 2, style: "text-align:center" }, p.title)));
  const names = make("tr", {}, header("optimizer", -1), ...columns.map((c, i) => header(c.title, i)));
  const body = rows.map(({ o, cells }) => {
    const row = make("tr", { "data-optimizer": o.name }, make("td", {}, swatch(o), o.label));
    cells.forEach((cell, i) => {
      const marks = [cell && cell.mean === best[i] ? "best" : "", cell && o.adaptive && cell.mean === adaptive[i] ? "adaptive" : ""].join(" ").trim();
      const node = make("td", {}, make("span", { class: marks || undefined }, withError(cell, columns[i].digits)));
      const paper = published(columns[i], o);
      if (paper) node.append(make("div", { class: "soft" }, `published ${paper}`));
      const difference = data.summary[columns[i].panel.key]?.[o.name]?.differences[columns[i].key];
      if (difference) node.append(make("div", { class: "soft difference" }, withInterval(difference)));
      row.append(node);
    });
    return row;
  });
  renew(get("results"), make("thead", {}, top, names), make("tbody", {}, ...body));
  get("table-note").textContent = "Bold: the best. Underlined: the best adaptive method (all but SGD), as in the paper. "
    + (data.panels.some((p) => p.published) ? "Below each: the published figure. " : "")
    + (references.size ? `Small, with signs: the difference to ${[...references].join(" and ")} with the same seeds and batches, and its 95 % interval by Student's t, without a correction for the number of comparisons. ` : "")
    + (state.when === "best" ? "Figures are at the best epoch of each run, separately for error and loss, chosen on the data that is shown: flattering, and as in the paper's table." : "Figures are at the last epoch.");
}

const references = new Set(Object.values(data.summary).flatMap(Object.values).filter((s) => Object.keys(s.differences).length)
  .map((s) => data.optimizers.find((o) => o.name === s.reference).label));
const published = (column, o) => fixed(column.panel.published?.[o.name]?.[column.title === "loss" ? 1 : 0], column.digits);

function copied(kind) {
  const { columns, rows, best, adaptive } = tableRows();
  const papers = columns.filter((c) => c.panel.published);
  const head = ["optimizer", ...columns.map((c) => `${c.panel.title} ${c.title}`), ...papers.map((c) => `published ${c.panel.title} ${c.title}`)];
  const escaped = (text) => (kind === "markdown" ? text.replaceAll("|", "\\|") : text.replace(/[&%$#_{}]/g, "\\$&"));
  const cell = (row, i) => {
    const text = withError(row.cells[i], columns[i].digits);
    if (!text) return "";
    const is = { best: row.cells[i].mean === best[i], adaptive: row.o.adaptive && row.cells[i].mean === adaptive[i] };
    if (kind === "markdown") return is.best ? `**${text}**` : is.adaptive ? `*${text}*` : text;
    const tex = text.replace("±", "$\\pm$");
    return is.best ? `\\textbf{${tex}}` : is.adaptive ? `\\underline{${tex}}` : tex;
  };
  const lines = rows.map((row) => [escaped(row.o.label), ...columns.map((_, i) => cell(row, i)), ...papers.map((c) => published(c, row.o))]);
  if (kind === "markdown") return [head, head.map((_, i) => (i ? "---:" : "---")), ...lines].map((line) => `| ${line.join(" | ")} |`).join("\n") + "\n";
  const tex = (line) => line.join(" & ") + " \\\\";
  return ["\\begin{tabular}{l" + "r".repeat(head.length - 1) + "}", "\\toprule", tex(head.map(escaped)), "\\midrule", ...lines.map(tex), "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
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

const names = { loss: "loss", epoch: "epoch", seconds: "seconds of training" };

function traces(panel) {
  const found = [];
  for (const o of data.optimizers) {
    const curve = data.curves[panel.key]?.[o.name];
    if (!curve || !state.shown.has(o.name)) continue;
    const of = curve[`${state.split}_${state.metric}`];
    // A logarithmic axis cannot show values that are not positive.
    const at = of.mean.map((_, i) => i).filter((i) => of.mean[i] !== null && (of.mean[i] > 0 || !state.logy));
    const x = at.map((i) => (state.x === "epoch" ? i + 1 : curve.seconds[i])), mean = at.map((i) => of.mean[i]);
    const line = { color: colour(o), width: o.ours ? 2.6 : 1.7, dash: o.dash };
    if (of.error) {
      const low = at.map((i) => Math.max(of.mean[i] - of.error[i], of.mean[i] / 50)), high = at.map((i) => of.mean[i] + of.error[i]);
      found.push({ x: [...x, ...x.slice().reverse()], y: [...high, ...low.reverse()], fill: "toself", fillcolor: colour(o) + "22", line: { width: 0 }, mode: "lines", hoverinfo: "skip", name: `${o.name} band` });
    }
    found.push({ x, y: mean, mode: mean.length > 1 ? "lines" : "markers", line, marker: { color: colour(o) }, name: plain(o.label), hovertemplate: "%{y:.4g}" });
  }
  return found;
}

function drawCurves() {
  const grid = get("curves");
  if (!Object.keys(data.curves).length) {
    grid.textContent = "No run has completed an epoch yet.";
    return;
  }
  if (!grid.children.length) {
    for (const panel of data.panels) {
      grid.append(make("div", { class: "panel" }, make("h3", {}, panel.title), make("div", { class: "plot", id: `plot-${panel.key}`, role: "img", "aria-label": `curves of ${panel.title}` })));
    }
  }
  for (const panel of data.panels) {
    Plotly.react(`plot-${panel.key}`, traces(panel), layout({
      xaxis: { title: { text: names[state.x] }, ...scale(state.logx) },
      yaxis: { title: { text: `${state.split} ${state.metric === "error" ? panel.error : names[state.metric]}` }, ...scale(state.logy) },
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

// Learning rates of weights

const rates = { run: 0, epoch: data.rates[0]?.start, layer: "" };

function drawRates() {
  if (!data.rates.length) return;
  get("rates-section").hidden = false;
  const run = data.rates[rates.run], now = run.epochs[rates.epoch];
  const chosen = run.layers.map((_, i) => i).filter((i) => !rates.layer || run.layers[i] === rates.layer);
  const points = (epoch, key) => chosen.flatMap((i) => epoch[key][i]);
  // All epochs have the same axes, so that points can be seen to move.
  const positive = (key) => run.epochs.flatMap((epoch) => points(epoch, key)).filter((v) => v > 0);
  const highest = Math.max(...run.epochs.map((epoch) => epoch.lr_sgd)), lowest = Math.min(...run.epochs.map((epoch) => epoch.lr_sgd));
  const left = Math.min(lowest / 30, ...positive("adam")) / 2, right = highest * 1000, bottom = Math.min(left, ...positive("gain"));
  const at = spaced(left, right, 200), colours = hues();
  const adam = at.filter((a) => a < 3 * now.lr_sgd), sgd = at.filter((a) => a > now.lr_sgd / 3);
  const axis = (title, from, to) => ({ type: "log", title: { text: title }, range: [Math.log10(from), Math.log10(to)], exponentformat: "power", dtick: 1 });
  Plotly.react("rates", [
    { x: points(now, "adam").map((v) => (v === null ? v : Math.min(v, right))), y: points(now, "gain"), mode: "markers", name: "weights", marker: { size: 4, color: colours.dots, opacity: 0.45 }, hovertemplate: "Adam %{x:.2g}, gets %{y:.2g}<extra></extra>" },
    line(adam, adam, "Adam, lr / rms(g)", colours.adam, "dash"), line(sgd, sgd.map(() => now.lr_sgd), "SGD, lr_sgd", colours.sgd, "dash"),
    line(at, at.map((a) => fixedPoint((now.lr / a) ** 2, now.lr, now.lr_sgd)), "fixed point", colours.point, "solid"),
    line([now.lr_sgd, now.lr_sgd], [bottom, 3 * highest], "crossover, lr_sgd = B σ²", colours.cross, "dot"),
  ], { ...layout({ xaxis: axis("Adam's learning rate, lr / √⟨g²⟩", left, right), yaxis: axis("effective learning rate", bottom, 3 * highest) }),
    hovermode: "closest", showlegend: true, legend: { x: 0.99, y: 0.02, xanchor: "right", yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" } }, config);
  get("rates-epoch").textContent = `epoch ${now.epoch + 1}`;
}

function drawRatesBar() {
  if (!data.rates.length) return;
  const run = data.rates[rates.run];
  const pick = (label, id, options, current, choose) => make("label", {}, label + " ", make("select", { id, onchange: (event) => choose(event.target.value) },
    ...options.map(([value, text]) => make("option", { value, selected: String(value) === String(current) ? "" : undefined }, text))));
  const slider = make("input", { type: "range", id: "rates-slider", min: 0, max: run.epochs.length - 1, value: rates.epoch, "aria-label": "epoch",
    oninput: (event) => { rates.epoch = Number(event.target.value); drawRates(); } });
  renew(get("rates-bar"),
    pick("run", "rates-run", data.rates.map((r, i) => [i, `${r.panel} ${r.optimizer}`]), rates.run, (value) => { rates.run = Number(value); rates.layer = ""; rates.epoch = data.rates[value].start; drawRatesBar(); drawRates(); }),
    pick("layer", "rates-layer", [["", "all"], ...run.layers.map((l) => [l, l])], rates.layer, (value) => { rates.layer = value; drawRates(); }),
    slider, make("span", { id: "rates-epoch" }));
}

// The rest

// A few runs are named directly, many are folded away.
const problem = ({ text, runs }) => (runs.length <= 3
  ? make("p", { class: "warn" }, `${text}: ${runs.join("; ")}.`)
  : make("details", { class: "warn" }, make("summary", {}, `${text}.`), make("ul", {}, ...runs.map((run) => make("li", {}, run)))));

function drawText() {
  get("title").textContent = data.title;
  get("lead").textContent = data.lead;
  get("problems").replaceChildren(...data.problems.map(problem));
  const row = (cells, tag = "td") => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  get("cost").replaceChildren(make("thead", {},
    make("tr", {}, make("th", {}, ""), ...data.panels.map((p) => make("th", { colspan: 2, style: "text-align:center" }, p.title))),
    row(["optimizer", ...data.panels.flatMap(() => ["ms per step", "bytes per weight"])], "th")),
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
