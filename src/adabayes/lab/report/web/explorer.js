// The learning rate of a weight as a function of the settings. The mathematics is that of adabayes.filtering.
const state = { ...data, weight_decay: 0.05, source: "adamw" };
const sources = {
  adamw: { lr: 1e-3, beta1: 0.9, weight_decay: 0.05 },
  sgd: { lr: 0.1, momentum: 0.9, weight_decay: 5e-4 },
  paper: { eta: 1e-3, eta_sgd: 0.1, beta1: 0.9, lambda: 5e-5 },
};

// Conversions of other optimizers' settings into ours.
const convert = {
  adamw: ({ lr, beta1, weight_decay }) => ({ lr, lr_sgd: 100 * lr, momentum: beta1, weight_decay }),
  // torch sums past gradients, where we average them; it multiplies weight decay by its learning rate, we by lr.
  sgd: ({ lr, momentum, weight_decay }) => {
    const lr_sgd = lr / (1 - momentum);
    return { lr: lr_sgd / 100, lr_sgd, momentum, weight_decay: 100 * weight_decay };
  },
  paper: ({ eta, eta_sgd, beta1, lambda }) => ({ lr: eta, lr_sgd: eta_sgd, momentum: beta1, weight_decay: lambda / eta }),
};

function filter({ lr, lr_sgd, batch_size }) {
  const k = (batch_size * lr ** 2) / (2 * lr_sgd);
  const decay = Math.exp(-2 * k), noise = -lr_sgd * Math.expm1(-2 * k);
  // Where the gain settles for gradients of this size, and how many steps that takes.
  const settled = (g) => {
    const h = batch_size * g * g, b = noise / lr_sgd + noise * h;
    return (2 * noise) / (b + Math.sqrt(b * b + 4 * noise * decay * h));
  };
  const time = (g) => {
    const prior = decay * settled(g) + noise;
    return 1 / (2 * k + 2 * Math.log1p(prior * batch_size * g * g));
  };
  return { settled, time, crossover: lr / lr_sgd, end: 1 / (batch_size * lr), memory: 1 / (2 * k) };
}

const short = (value) => Number(value.toPrecision(3)).toString();  // for computed values
const whole = (value) => Number(value.toPrecision(12)).toString();  // for settings
const steps = (value) => (value < 1 ? "less than one step" : `${short(value)} steps`);
const code = (s) => `AdaBayes(model.parameters(), lr=${whole(s.lr)}, lr_sgd=${whole(s.lr_sgd)}, batch_size=${s.batch_size}, `
  + `beta1=${whole(s.momentum)}, weight_decay=${whole(s.weight_decay)})`;

// Sliders are logarithmic; that of momentum is so in 1 - momentum.
const inverse = { to: (v) => -Math.log10(1 - v), from: (p) => 1 - 10 ** -p }, logarithm = { to: Math.log10, from: (p) => 10 ** p };
const sliders = {
  lr: { label: "lr, Adam's learning rate", from: 1e-6, to: 1, scale: logarithm },
  lr_sgd: { label: "lr_sgd, SGD's, of averaged gradients", from: 1e-4, to: 100, scale: logarithm },
  batch_size: { label: "batch_size, of a whole step", from: 1, to: 65536, scale: logarithm },
  momentum: { label: "momentum, beta1", from: 0, to: 0.999, scale: inverse },
};

// A box for a number, with a warning if the number is not permitted.
function number(id, value, label, from, to, set) {
  const node = make("input", { type: "number", id, step: "any", min: from, max: to, "aria-label": label, oninput: () => {
    const fits = node.value !== "" && node.checkValidity();
    node.setAttribute("aria-invalid", String(!fits));
    if (fits) set(node.valueAsNumber);
    else get("warning").textContent = `${id.replace("from-", "")} must be a number from ${from} to ${to}`;
  } });
  node.value = whole(value);
  return node;
}

function makeSliders() {
  for (const [name, { label, from, to, scale }] of Object.entries(sliders)) {
    const range = make("input", { type: "range", id: `${name}-slider`, min: scale.to(from), max: scale.to(to), step: 0.01, "aria-label": label,
      oninput: (event) => change({ [name]: Number(scale.from(event.target.valueAsNumber).toPrecision(name === "batch_size" ? 5 : 3)) }) });
    const box = number(name, state[name], label, from, to, (value) => change({ [name]: value }, box));
    get("sliders").append(make("div", { class: "slider" }, make("label", { for: `${name}-slider` }, label), range, box));
  }
}

// Changes settings and shows them everywhere except in the box that is being typed into.
function change(settings, typing) {
  Object.assign(state, settings);
  state.batch_size = Math.max(1, Math.round(state.batch_size));
  for (const [name, { scale }] of Object.entries(sliders)) {
    get(`${name}-slider`).value = scale.to(state[name]);
    if (get(name) !== typing) {
      get(name).value = whole(state[name]);
      get(name).removeAttribute("aria-invalid");
    }
  }
  draw();
}

function drawSource() {
  renew(get("source"), choice("coming from", [["adamw", "AdamW"], ["sgd", "torch.optim.SGD"], ["paper", "the paper"]], state.source, (value) => { state.source = value; drawSource(); apply(); }));
  const given = sources[state.source];
  const range = { momentum: [0, 0.999], beta1: [0, 0.999], weight_decay: [0, 100], lambda: [0, 1] };
  renew(get("fields"), ...Object.entries(given).map(([name, value]) => make("label", {}, `${name} `,
    number(`from-${name}`, value, name, ...(range[name] ?? [1e-9, 1e3]), (now) => { given[name] = now; apply(); }))));
}
const apply = () => change(convert[state.source](sources[state.source]));

function draw() {
  const f = filter(state), colours = hues();
  const low = Math.min(f.crossover, f.end) / 1e3, high = Math.max(f.crossover, f.end) * 1e2;
  const x = spaced(low, high, 300);
  const axis = { type: "log", exponentformat: "power", dtick: 1 };
  const upright = (at, from, to, name, colour) => line([at, at], [from, to], name, colour, "dot");
  const bottom = f.settled(high), top = 3 * state.lr_sgd;
  const adam = x.filter((g) => state.lr / g < top);
  Plotly.react("gain", [
    line(adam, adam.map((g) => state.lr / g), "Adam, lr / rms(g)", colours.adam, "dash"),
    line(x, x.map(() => state.lr_sgd), "SGD, lr_sgd", colours.sgd, "dash"),
    line(x, x.map((g) => fixedPoint(g * g, state.lr, state.lr_sgd)), "AdaBayes-FP", colours.point, "dashdot"),
    line(x, x.map(f.settled), "AdaBayes, settled", colours.point, "solid"),
    upright(f.crossover, bottom, top, "crossover, lr / lr_sgd", colours.cross),
    upright(f.end, bottom, top, "end of Adam's regime, 1 / (B lr)", colours.dots),
  ], { ...layout({ xaxis: { ...axis, title: { text: "gradient size, rms(g)" } }, yaxis: { ...axis, title: { text: "learning rate" } } }),
    showlegend: true, legend: { orientation: "h", y: -0.25, yanchor: "top" } }, config);
  Plotly.react("memory", [line(x, x.map(f.time), "steps", colours.point, "solid"), upright(f.crossover, f.time(high), f.memory, "crossover", colours.cross)],
    layout({ xaxis: { ...axis, title: { text: "gradient size, rms(g)" } }, yaxis: { ...axis, dtick: undefined, title: { text: "steps" } } }), config);

  const row = (...cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  const lambda = state.lr * state.weight_decay;
  get("facts").replaceChildren(
    row("crossover: SGD below this gradient size, Adam above", short(f.crossover)),
    row("end of Adam's regime", short(f.end)),
    row("time constant of the filter, lr_sgd / (batch_size lr²)", steps(f.memory)),
    row("memory of momentum, 1 / (1 - momentum)", steps(1 / (1 - state.momentum))));
  get("elsewhere").replaceChildren(
    row("AdamW, the limit of large gradients", `torch.optim.AdamW(lr=${whole(state.lr)}, betas=(${whole(state.momentum)}, 0.999), weight_decay=${whole(state.weight_decay)})`),
    row("SGD, the limit of small gradients", `torch.optim.SGD(lr=${short(state.lr_sgd * (1 - state.momentum))}, momentum=${whole(state.momentum)}, weight_decay=${short(lambda / state.lr_sgd)})`),
    row("the paper", `η = ${short(state.lr)}, η_SGD = ${short(state.lr_sgd)}, σ² = ${short(state.lr_sgd / state.batch_size)}, λ = ${short(lambda)}`));
  get("code").textContent = code(state);
  get("warning").textContent = f.end < f.crossover
    ? "There is no Adam regime: a single gradient outweighs all that the filter knew. Lower batch_size or lr, or use AdaBayes-FP." : "";
}

get("copy").addEventListener("click", () => copyText(code(state), get("copy")));
dark.addEventListener("change", draw);
makeSliders();
drawSource();
change({});
