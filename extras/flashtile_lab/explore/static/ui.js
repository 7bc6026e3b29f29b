"use strict";
/* What all figures share: the page's data, controls, tables, axes. A figure is a record of controls and a function that
   draws from their values; what that returns is kept in explore.numbers under the figure's name. */

const explore = { data: JSON.parse(document.getElementById("data").textContent), numbers: {}, figures: {} };

explore.element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list" && typeof value !== "string") made[name] = value;
    else made.setAttribute(name === "className" ? "class" : name, value);
  }
  made.append(...children.filter((each) => each !== null));
  return made;
};

// Numbers for readers: three digits of a quantity with a unit of a thousand, or so many digits of a plain number.
explore.quantity = (x, unit, base = 1000) => {
  if (x === 0) return `0 ${unit}`;
  const large = base === 1024 ? ["", "Ki", "Mi", "Gi", "Ti", "Pi"] : ["", "k", "M", "G", "T", "P", "E"];
  const small = ["", "m", "u", "n", "p"];
  let step = 0,
    size = Math.abs(x);
  while (size >= base && step < large.length - 1) {
    size /= base;
    step += 1;
  }
  while (size < 1 && -step < small.length - 1 && base === 1000) {
    size *= 1000;
    step -= 1;
  }
  const shown = x < 0 ? -size : size;
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return `${shown.toFixed(digits)} ${step >= 0 ? large[step] : small[-step]}${unit}`;
};
explore.bytes = (x) => explore.quantity(x, "B");
explore.seconds = (x) => explore.quantity(x, "s");
explore.integer = (x) => Math.round(x).toLocaleString("en-US");
explore.length = (n) => (n >= 1024 && n % 1024 === 0 ? `${n / 1024}k` : String(n));
explore.digits = (x, digits) => (Number.isFinite(x) ? x.toPrecision(digits) : x > 0 ? "inf" : x < 0 ? "-inf" : "nan");

explore.table = (parent, caption, head, rows, litRow = -1) => {
  const { element } = explore;
  const table = element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map((each) => element("th", { scope: "col" }, each)))),
  );
  const body = element("tbody");
  rows.forEach((row, i) => {
    const cells = row.map((each) => element("td", {}, each instanceof Node ? each : String(each)));
    body.append(element("tr", { className: i === litRow ? "lit" : "" }, ...cells));
  });
  table.append(body);
  parent.append(element("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table));
};

explore.legend = (parent, entries) => {
  const { element } = explore;
  parent.append(
    element(
      "div",
      { className: "legend" },
      ...entries.map(([text, colour]) => element("span", {}, element("i", { style: `background: ${colour}` }), text)),
    ),
  );
};

explore.note = (parent, text) => parent.append(explore.element("p", { className: "note" }, text));

// An empty drawing as wide as its parent.
explore.svg = (parent, height, label, width = Math.max(260, parent.clientWidth)) => ({
  width,
  height,
  svg: d3
    .select(parent)
    .append("svg")
    .attr("width", width)
    .attr("height", height)
    .attr("viewBox", `0 0 ${width} ${height}`)
    .attr("role", "img")
    .attr("aria-label", label),
});

// Axes with a grid; x and y are D3's scales, their ticks are formatted by the functions given.
explore.axes = (
  svg,
  x,
  y,
  { width, height, left = 56, bottom = 34, right = 10, top = 8 },
  labels,
  formats,
  ticks = {},
) => {
  const few = width < 420;
  const xAxis = d3.axisBottom(x).tickFormat(formats[0]),
    yAxis = d3.axisLeft(y).tickFormat(formats[1]);
  if (ticks.x) xAxis.tickValues(few ? ticks.x.filter((_, i) => i % 2 === 0) : ticks.x);
  else xAxis.ticks(few ? 4 : 8);
  if (ticks.y) yAxis.tickValues(ticks.y);
  else yAxis.ticks(6);
  svg
    .append("g")
    .attr("class", "axis")
    .attr("transform", `translate(0,${height - bottom})`)
    .call(xAxis);
  svg.append("g").attr("class", "axis").attr("transform", `translate(${left},0)`).call(yAxis);
  svg
    .append("text")
    .attr("class", "soft")
    .attr("x", width - right)
    .attr("y", height - 3)
    .attr("text-anchor", "end")
    .text(labels[0]);
  svg
    .append("text")
    .attr("class", "soft")
    .attr("x", left + 6)
    .attr("y", top + 10)
    .text(labels[1]);
};

// A horizontal bar for each row [label, value, colour, text behind it].
explore.bars = (parent, label, rows, { top = null, lineHeight = 26 } = {}) => {
  const { svg, width } = explore.svg(parent, rows.length * lineHeight + 4, label);
  const left = Math.min(190, width * 0.46),
    room = width - left - 92;
  const most = top ?? d3.max(rows, (row) => row[1]);
  rows.forEach(([name, value, colour, text], i) => {
    const y = i * lineHeight + 2;
    svg
      .append("text")
      .attr("x", left - 8)
      .attr("y", y + 16)
      .attr("text-anchor", "end")
      .text(name);
    svg
      .append("rect")
      .attr("x", left)
      .attr("y", y + 3)
      .attr("height", lineHeight - 8)
      .attr("fill", colour)
      .attr("width", Math.max(1, (value / most) * room));
    svg
      .append("text")
      .attr("x", left + 6 + (value / most) * room)
      .attr("y", y + 16)
      .text(text);
  });
};

const _control = (spec, state, change) => {
  const { element } = explore;
  const set = (value) => {
    state[spec.name] = value;
    change();
  };
  if (spec.choices) {
    const options = spec.choices.map((each) => (Array.isArray(each) ? each : [each, String(each)]));
    const select = element(
      "select",
      { name: spec.name },
      ...options.map(([value, text]) => element("option", { value: String(value) }, text)),
    );
    select.value = String(state[spec.name]);
    select.addEventListener("input", () => set(options.find(([value]) => String(value) === select.value)[0]));
    return {
      node: element("label", {}, spec.label, select),
      refresh() {
        select.value = String(state[spec.name]);
      },
    };
  }
  if (spec.check) {
    const box = element("input", { type: "checkbox", name: spec.name });
    box.checked = state[spec.name];
    box.addEventListener("input", () => set(box.checked));
    return {
      node: element("label", { className: "check" }, box, spec.label),
      refresh() {
        box.checked = state[spec.name];
      },
    };
  }
  if (spec.text) {
    const field = element("input", { type: "text", name: spec.name, value: state[spec.name], autocomplete: "off" });
    field.addEventListener("input", () => set(field.value));
    return {
      node: element("label", {}, spec.label, field),
      refresh() {
        field.value = state[spec.name];
      },
    };
  }
  const shown = element("output"),
    slider = element("input", { type: "range", name: spec.name });
  const limits = () => (typeof spec.range === "function" ? spec.range(state) : spec.range);
  const refresh = () => {
    const [low, high, step = 1] = limits();
    Object.assign(slider, { min: low, max: high, step });
    state[spec.name] = Math.min(high, Math.max(low, state[spec.name]));
    slider.value = state[spec.name];
    shown.textContent = spec.show ? spec.show(state[spec.name], state) : String(state[spec.name]);
    slider.setAttribute("aria-valuetext", shown.textContent);
  };
  slider.addEventListener("input", () => set(Number(slider.value)));
  refresh();
  if (!spec.stepper)
    return { node: element("label", {}, element("span", {}, `${spec.label}: `, shown), slider), refresh };
  slider.setAttribute("aria-label", spec.label);
  const go = (to) => {
    const [low, high] = limits();
    set(Math.min(high, Math.max(low, to)));
  };
  const button = (text, name, act) => {
    const made = element("button", { type: "button", "aria-label": name, title: name }, text);
    made.addEventListener("click", act);
    return made;
  };
  const node = element(
    "div",
    { className: "stepper" },
    element("span", {}, `${spec.label}: `, shown),
    element(
      "div",
      {},
      button("|<", "first step", () => go(limits()[0])),
      button("<", "step back", () => go(state[spec.name] - 1)),
      button(">", "step", () => go(state[spec.name] + 1)),
      button(">|", "last step", () => go(limits()[1])),
      slider,
    ),
  );
  return { node, refresh };
};

const _sources = (spec, number) => {
  const { element, data } = explore;
  const found = data.sources[spec.name];
  const parts = found.flatMap(([title, text]) => [
    element("p", {}, element("code", {}, title)),
    element("pre", { tabindex: "0", role: "region", "aria-label": `Figure ${number}: ${title}` }, text),
  ]);
  return element(
    "details",
    { className: "sources" },
    element("summary", {}, spec.sourcesTitle ?? "The lines of flashtile"),
    ...parts,
  );
};

// Figures below the first screen are drawn once the page has loaded, one after the other, so that it opens at once.
const EAGER = 2;
const _later = [];
explore.ready = new Promise((done) => {
  const next = () => {
    const draw = _later.shift();
    if (draw) {
      draw();
      setTimeout(next);
      return;
    }
    // What was drawn has moved the figure that the address names.
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
    done(true);
  };
  addEventListener("load", () => setTimeout(next));
});

/* spec: name; title; see, the one sentence; controls; draw(state, plot, figure), which returns numbers. */
explore.figure = (spec) => {
  const { element } = explore;
  const number = Object.keys(explore.figures).length + 1;
  const state = Object.fromEntries(spec.controls.map((each) => [each.name, each.value]));
  const controls = element("div", {
    className: "controls",
    role: "group",
    "aria-label": `Controls of figure ${number}`,
  });
  const plot = element("div", { className: "plot" });
  const title = element("h2", { id: `${spec.name}-title` }, `${number}. ${spec.title}`);
  const section = element(
    "section",
    { id: spec.name, "aria-labelledby": `${spec.name}-title` },
    title,
    element("p", { className: "see" }, spec.see),
    controls,
    plot,
    _sources(spec, number),
  );
  document.getElementById("figures").append(section);
  document.getElementById("contents").append(element("li", {}, element("a", { href: `#${spec.name}` }, spec.title)));
  let made = [];
  const draw = () => {
    // A step keeps the page where it is, though the drawing goes and comes.
    plot.style.minHeight = `${plot.offsetHeight}px`;
    plot.replaceChildren();
    made.forEach((each, i) => {
      each.refresh();
      const when = spec.controls[i].when;
      if (when) each.node.hidden = !when(state);
    });
    explore.numbers[spec.name] = spec.draw(state, plot, figure);
    plot.style.minHeight = "";
  };
  const figure = { state, draw, plot, section };
  made = spec.controls.map((each) => _control(each, state, draw));
  controls.append(...made.map((each) => each.node));
  explore.figures[spec.name] = figure;
  if (number <= EAGER) draw();
  else _later.push(draw);
  let width = plot.clientWidth;
  new ResizeObserver(() => {
    if (plot.clientWidth !== width) {
      width = plot.clientWidth;
      draw();
    }
  }).observe(plot);
};

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
